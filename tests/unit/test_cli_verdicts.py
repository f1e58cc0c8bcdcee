"""Verdicts by the command line: on a record that was shown, or on all that are asked for, and what became of each."""
# mypy: allow-untyped-decorators

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, Record, Status, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.operating.display import iso
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support import commands
from tests.support.commands import run, told
from tests.support.deliveries import an_app
from tests.support.links import unlinked

PAST = 1_700_000_000_000
WHY = ("--reason", "PAY-1", "--by", "ann")
NOTHING = "nothing is recorded under it, and it is no record's task id or label"
ALL_UNKNOWN = ("resolve", "--status", "UNKNOWN", "--rerun", *WHY)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def app(store: FaultyStore) -> Celery:
    app = an_app(idempotency_store=store)

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=Policy())
    def charge() -> None: ...

    app.finalize()
    return app


def keep(app: Celery, key: str, status: Status = Status.UNKNOWN, **values: Any) -> Record:
    times = {"lease_until": 1, "updated_at": PAST, "fencing_token": 1}
    return commands.keep(app, key=key, status=status, **{**times, "label": f"acme/{key}", **values})


def statuses(store: FaultyStore) -> dict[str, str]:
    return {each.key: str(each.status) for each in store.scan()}


def think(monkeypatch: pytest.MonkeyPatch, store: FaultyStore, record: Record) -> list[str]:
    """A delivery changes the record while the person thinks; what was asked."""
    asked: list[str] = []

    def confirm(question: str, **_: object) -> None:
        asked.append(question)
        store.swap(record.but(revision="newer"), record.revision)

    monkeypatch.setattr("click.confirm", confirm)
    return asked


# -- one


@pytest.mark.parametrize(
    ("verdict", "status", "question"),
    [
        (("resolve", "--rerun"), Status.UNKNOWN, "that the effect did not happen, and will you publish"),
        (("resolve", "--completed", "null"), Status.UNKNOWN, "that the effect happened"),
        (("release",), Status.IN_PROGRESS, "Did you check the receiver"),
        (("forget",), Status.RELEASED, "Shall it be forgotten?"),
    ],
)
def test_record_is_shown_before_a_verdict_is_asked_for(
    app: Celery, store: FaultyStore, verdict: tuple[str, ...], status: Status, question: str
) -> None:
    """Which task, which message, which worker, and since when; what is stated; and after a no it is as it was."""
    record = keep(app, "k", status, error="it stalled")

    result = run(app, *verdict, "k", answer="n\n")

    names = ("status", "key", "label", "task", "task_id", "worker", "attempts", "created_at", "updated_at", "error")
    times = {"created_at": iso(record.created_at), "updated_at": "2023-11-14T22:13:20.000Z"}
    shown = [f"{name:>14}  {times.get(name, getattr(record, name))}" for name in names]
    assert result.stdout.splitlines()[: len(names)] == shown
    assert question in result.stdout
    assert (result.exit_code, store.get("k")) == (1, record)


@pytest.mark.parametrize(
    ("verdict", "status", "reason"),
    [
        (("resolve", "k", "--rerun"), None, NOTHING),
        (("release", "k"), None, NOTHING),
        (("resolve", "k", "--rerun"), Status.RELEASED, "only an UNKNOWN outcome takes a verdict; it is RELEASED"),
        (("release", "k"), Status.COMPLETED, "only what is IN_PROGRESS can be released; it is COMPLETED"),
    ],
)
def test_nobody_is_asked_about_what_takes_no_verdict(
    app: Celery, verdict: tuple[str, ...], status: Status | None, reason: str
) -> None:
    """The record is looked up before the question, which would be about nothing."""
    if status:
        keep(app, "k", status)
    result = run(app, *verdict, answer="y\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert unlinked(result.stderr) == f"Error: key='k': {reason}\n"


def test_verdict_counts_for_the_record_that_was_shown(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delivery did while the person thought is not overruled."""
    think(monkeypatch, store, keep(app, "k"))
    assert "somebody else changed the record meanwhile" in run(app, "resolve", "k", "--rerun").output
    assert statuses(store) == {"k": "UNKNOWN"}


# -- many


@pytest.mark.parametrize(
    ("verdict", "of", "becomes"),
    [
        (("resolve", "--completed", '"ch_1"'), Status.UNKNOWN, "COMPLETED"),
        (("resolve", "--rerun"), Status.UNKNOWN, "RELEASED"),
        (("release",), Status.IN_PROGRESS, "RELEASED"),
    ],
)
def test_many_are_judged_that_take_the_verdict(
    app: Celery, store: FaultyStore, verdict: tuple[str, ...], of: Status, becomes: str
) -> None:
    """Those of the status that the verdict is for, by whom and why they were told, and no others."""
    for status in Status:
        for number in range(2):
            keep(app, f"{status}{number}", status)
    before = statuses(store)

    result = run(app, *verdict, "--label", "acme/*", "--yes", *WHY)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "judged 2, refused 0\n", "")
    assert statuses(store) == {**before, f"{of}0": becomes, f"{of}1": becomes}
    proofs = [each.verdict for each in store.scan() if each.key.startswith(of)]
    assert [(each["by"], each["reason"]) for each in proofs] == [("ann", "PAY-1")] * 2


def test_all_about_a_tenant_is_forgotten_but_what_is_open(app: Celery, store: FaultyStore) -> None:
    """What is IN_PROGRESS or UNKNOWN is left and named, and the exit status says that something was."""
    for status in Status:
        keep(app, str(status), status, expires_at=2**31 if status in {Status.COMPLETED, Status.FAILED} else None)
    other = keep(app, "other", Status.COMPLETED, label="globex/1", expires_at=2**31)

    result = run(app, "forget", "--label", "acme/*", "--yes", *WHY)

    assert result.exit_code == 1
    assert unlinked(result.stdout).splitlines() == [
        "judged 3, refused 2",
        "  1: an attempt owns it; wait for its end, or release it once its lease is over",
        "    IN_PROGRESS  IN_PROGRESS  acme/IN_PROGRESS",
        "  1: its outcome is UNKNOWN; check the receiver, then resolve it",
        "    UNKNOWN  UNKNOWN  acme/UNKNOWN",
    ]
    assert {each.key for each in store.scan() if each.label} == {"IN_PROGRESS", "UNKNOWN", "other"}
    assert store.get("other") == other
    again = run(app, "forget", "--task", other.task, "--status", "forgotten", "--yes", *WHY)
    assert again.stdout == "judged 0, refused 0\n"


def test_dry_run_judges_nothing(app: Celery, store: FaultyStore) -> None:
    """It says what would be judged, what refused, and why, once each; no reason is needed yet."""
    keep(app, "old", Status.IN_PROGRESS)
    for each in (1, 2):
        keep(app, f"alive{each}", Status.IN_PROGRESS, lease_until=store.now() + 60_000 + each)
    before = list(store.scan())

    made = told(app, "release", "--label", "acme/*", "--dry-run")
    result = run(app, "release", "--label", "acme/*", "--dry-run")

    assert (result.exit_code, list(store.scan())) == (0, before)
    assert (made["dry_run"], made["judged"]) == (True, [{"key": "old", "status": "IN_PROGRESS"}])
    refused = {each["key"]: each["reason"].partition(" on ")[0] for each in made["refused"]}
    assert refused == dict.fromkeys(("alive1", "alive2"), "the body may be alive")
    old, summary, reason, *named = result.stdout.splitlines()[-5:]
    assert old.startswith("IN_PROGRESS  2023-11-14T22:13:20Z")
    assert (summary, reason[:30]) == ("would judge 1, would refuse 2", "  2: the body may be alive on ")
    assert named == ["    IN_PROGRESS  alive1  acme/alive1", "    IN_PROGRESS  alive2  acme/alive2"]


def test_verdict_on_many_is_given_on_what_was_listed(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a no they are as they were; what a delivery did while the person thought is told, and not overruled."""
    first, _ = keep(app, "u1"), keep(app, "u2")
    refused = run(app, *ALL_UNKNOWN, answer="n\n")
    assert (refused.exit_code, "acme/u1" in refused.stdout.split("Did you check")[0]) == (1, True)
    assert statuses(store) == {"u1": "UNKNOWN", "u2": "UNKNOWN"}

    asked = think(monkeypatch, store, first)
    result = run(app, *ALL_UNKNOWN)

    assert asked[0].endswith("(of all 2)")
    changed = "judged 1, refused 1\n  1: somebody else changed the record meanwhile; look again\n"
    assert (result.exit_code, changed in unlinked(result.stdout)) == (1, True)
    assert statuses(store) == {"u1": "UNKNOWN", "u2": "RELEASED"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(StoreUnavailable("s", "swap", "timed out"), "timed out"), (KeyboardInterrupt(), "interrupted")],
)
def test_bulk_ends_where_it_is_unclear_what_became_of_one(
    app: Celery, store: FaultyStore, error: BaseException, reason: str
) -> None:
    """By an outage or a person's Ctrl-C: that one is named, and how many are left; the same command goes on."""
    for number in range(4):
        keep(app, f"u{number}", updated_at=PAST + number)
    swaps = iter(range(9))

    def fail(record: Record) -> None:
        if next(swaps) in (1, 3):
            raise error

    store.before_swap = fail
    result = run(app, *ALL_UNKNOWN, "--yes")
    assert (result.exit_code, result.stdout) == (1, "judged 1, refused 0\n")
    unclear, left = unlinked(result.stderr).splitlines()
    assert re.match(f"unclear what became of u1: .*{reason}", unclear)
    assert left.startswith("2 after it were not judged")

    made = told(app, *ALL_UNKNOWN, "--yes")
    reason = made["unclear"][0].pop("reason")
    assert ("timed out" in reason, reason == "interrupted") == (
        isinstance(error, StoreUnavailable),
        "()" in repr(error),
    )
    keys = {name: [each["key"] for each in made[name]] for name in ("judged", "refused", "unclear")}
    assert (keys, made["left"]) == ({"judged": ["u1"], "refused": [], "unclear": ["u2"]}, ["u3"])


def test_bulk_that_is_interrupted_between_two_verdicts_tells_of_those_given(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal is told how far it came after each: a Ctrl-C strikes there, too."""
    for number in range(3):
        keep(app, f"u{number}", updated_at=PAST + number)

    def counted(label: str, items: Iterable[Record], *, total: int | None = None) -> Iterator[Record]:
        for each in items:
            yield each
            if label == "judging":
                raise KeyboardInterrupt

    monkeypatch.setattr(screen, "counted", counted)
    made = told(app, *ALL_UNKNOWN, "--yes")
    assert [each["key"] for each in made["judged"]] == ["u0"]
    assert (made["unclear"], made["left"]) == ([{"key": "u1", "reason": "interrupted"}], ["u2"])


@pytest.mark.parametrize(
    ("wanted", "advice"),
    [
        (("--task", "shop.chrge"), "its idempotent tasks: shop.charge"),
        (("--label", "acme"), "'acme/*' stands for all that begin so"),
        (("--label", "globex/*"), None),
    ],
)
def test_nothing_that_fits_is_no_error(app: Celery, wanted: tuple[str, ...], advice: str | None) -> None:
    """But nobody is to take a tenant for erased of whom everything is still there."""
    keep(app, "o-1", Status.COMPLETED, expires_at=2**31)
    result = run(app, "forget", *wanted, "--yes", *WHY)
    assert (result.exit_code, result.stdout) == (0, "judged 0, refused 0\n")
    assert (advice or "") in result.stderr
    assert bool(result.stderr) is bool(advice)


def test_reason_is_asked_for_in_a_terminal(app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many it is asked until it is given; of one it may be left out; with --reason nobody is asked."""
    monkeypatch.setattr(screen, "is_conversation", lambda: True)

    def judged(*arguments: str, answer: str = "") -> tuple[int, int, list[str]]:
        result = run(app, "resolve", *arguments, "--rerun", answer=answer)
        given = [each.verdict["reason"] for each in store.scan() if each.verdict]
        for each in store.scan(status=Status.RELEASED):
            store.delete(each.key, each.revision)
        return result.exit_code, result.stdout.count("Reason: "), given

    for each in ("u1", "u2", "u3", "u4", "u5"):
        keep(app, each)
    assert judged("u1", answer="\ny\n") == (0, 1, [""])
    assert judged("u2", "--yes") == (0, 0, [""])
    assert judged("u3", "--reason", "PAY-3", answer="y\n") == (0, 0, ["PAY-3"])
    assert judged("--status", "unknown", answer="\nPAY-2\ny\n") == (0, 2, ["PAY-2", "PAY-2"])


@pytest.mark.parametrize("at_a_terminal", [False, True])
def test_verdict_is_logged_but_to_the_terminal_of_who_is_told_of_it(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, at_a_terminal: bool
) -> None:
    """Where nobody has configured logging, a script's log has the proof; other warnings are sentences."""
    monkeypatch.setattr(screen, "is_terminal", lambda err=False: at_a_terminal and err)
    monkeypatch.setattr(screen, "counted", lambda label, items, total=None: iter(items))
    monkeypatch.setattr("logging.root.handlers", [])
    keep(app, "u1")
    before, scan = logging.lastResort, store.scan

    def unreadable(**asked: Any) -> Iterator[Record]:
        logging.getLogger("celery_idempotent.stores").warning("idempotency.record_unreadable key=%s", "\x1b")
        return scan(**asked)

    monkeypatch.setattr(store, "scan", unreadable)
    result = run(app, *ALL_UNKNOWN, "--yes")
    assert result.stdout == "judged 1, refused 0\n"
    warned, *logged = result.stderr.splitlines()
    assert warned == "Warning: idempotency.record_unreadable key=\\x1b"
    assert [each.split()[0] for each in logged] == ["event=idempotency.verdict_given"] * (not at_a_terminal)
    assert logging.lastResort is before
