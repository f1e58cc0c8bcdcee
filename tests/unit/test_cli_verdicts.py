"""Verdicts by the command line: on a record that was shown, or on all that are asked for, and what became of each."""
# mypy: allow-untyped-decorators

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, Record, Status, StoreUnavailable, signals
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.operating.verdicts import this_user
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import an_app, deliver
from tests.support.links import unlinked

PAST = 1_700_000_000_000
WHY = ("--reason", "PAY-1", "--by", "ann")


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def app(store: FaultyStore) -> Celery:
    app = an_app()
    app.conf.idempotency_store = store

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=Policy(key="order", label="order"))
    def charge(order: str) -> str:
        return f"charged {order}"

    app.finalize()
    return app


def keep(store: FaultyStore, key: str, status: Status, **values: Any) -> Record:
    times = {"lease_until": 1, "updated_at": PAST, "fencing_token": 1}
    record: Record = replace(a_record(), key=key, status=status, **{**times, "label": f"acme/{key}", **values})
    store.swap(record, None)
    return record


_INITIALS = {Status.UNKNOWN: "u", Status.IN_PROGRESS: "p"}


def statuses(store: FaultyStore) -> dict[str, str]:
    return {each.key: str(each.status) for each in store.scan()}


@pytest.mark.parametrize(
    ("verdict", "judged", "becomes"),
    [
        (("resolve", "--completed", '"ch_1"'), "u", "COMPLETED"),
        (("resolve", "--rerun"), "u", "RELEASED"),
        (("release",), "p", "RELEASED"),
    ],
)
def test_many_are_judged_that_take_the_verdict(
    app: Celery, store: FaultyStore, verdict: tuple[str, ...], judged: str, becomes: str
) -> None:
    """Those of the status that the verdict is for, by whom and why they were told, and no others."""
    for status in Status:
        for number in range(3):
            keep(store, f"{_INITIALS.get(status, status)}{number}", status)
    before = statuses(store)

    result = run(app, *verdict, "--label", "acme/*", "--yes", *WHY)

    assert (result.exit_code, result.stdout) == (0, "judged 3, refused 0\n")
    assert result.stderr == ""
    mine = {each for each in before if each[0] == judged}
    assert statuses(store) == {**before, **dict.fromkeys(mine, becomes)}
    for key in mine:
        told = (store.get(key) or a_record()).verdict
        assert (told["by"], told["reason"]) == ("ann", "PAY-1")


def test_all_about_a_tenant_is_forgotten_but_what_is_open(app: Celery, store: FaultyStore) -> None:
    """What is IN_PROGRESS or UNKNOWN is left and named, and the exit status says that something was."""
    for status in Status:
        keep(store, str(status), status, expires_at=2**31 if status in {Status.COMPLETED, Status.FAILED} else None)
    other = keep(store, "other", Status.COMPLETED, label="globex/1", expires_at=2**31)

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


def test_forgotten_call_runs_again(app: Celery, store: FaultyStore) -> None:
    """By its label, which is all that a customer knows."""
    charge = app.tasks["shop.charge"]
    deliver(charge, "acme/7")
    key = charge.idempotency_key_for("acme/7")
    (done,) = store.scan()
    store.swap(replace(done, revision="r", fencing_token=1), done.revision)

    forgotten = run(app, "forget", "acme/7", answer="y\n")

    assert forgotten.exit_code == 0
    assert "Shall it be forgotten? The next delivery runs again." in forgotten.stdout
    assert forgotten.stdout.endswith(f"{key} is FORGOTTEN\n")
    assert (store.get(key) or done).verdict["by"] == this_user()
    deliver(charge, "acme/7")
    assert (store.get(key) or done).attempts == 1
    assert (store.get(key) or done).label == "acme/7"


def test_verdict_is_told_by_a_signal(app: Celery, store: FaultyStore) -> None:
    """The command gives it as Python and the pages do."""
    keep(store, "u", Status.UNKNOWN)
    seen: list[tuple[str, str, str]] = []

    def receive(action: str, by: str, reason: str, **_: Any) -> None:
        seen.append((action, by, reason))

    signals.verdict_given.connect(receive)
    run(app, "resolve", "u", "--rerun", "--yes", *WHY)
    assert seen == [("rerun", "ann", "PAY-1")]


@pytest.mark.parametrize("json_too", [False, True])
def test_dry_run_judges_nothing(app: Celery, store: FaultyStore, json_too: bool) -> None:
    """It says what would be judged, what refused, and why; no reason is needed yet."""
    keep(store, "old", Status.IN_PROGRESS)
    alive = keep(store, "alive", Status.IN_PROGRESS, lease_until=store.now() + 60_000)
    before = list(store.scan())

    result = run(app, "release", "--label", "acme/*", "--dry-run", *(["--json"] if json_too else []))

    assert result.exit_code == 0
    assert list(store.scan()) == before
    if json_too:
        told = json.loads(result.stdout)
        assert (told["dry_run"], told["judged"]) == (True, [{"key": "old", "status": "IN_PROGRESS"}])
        ((refused),) = told["refused"]
        assert refused["key"] == "alive"
        assert refused["reason"].startswith(f"the body may be alive on {alive.worker}: ")
    else:
        _, old, summary, reason, named = result.stdout.splitlines()
        assert old.startswith("IN_PROGRESS  2023-11-14T22:13:20Z")
        assert summary == "would judge 1, would refuse 1"
        assert reason.startswith("  1: the body may be alive on")
        assert named == "    IN_PROGRESS  alive  acme/alive"


def test_reasons_are_told_once_each(app: Celery, store: FaultyStore) -> None:
    """Those that differ by a number are one: of 200 leases, each ends at another millisecond."""
    for number in range(3):
        keep(store, f"alive-{number}", Status.IN_PROGRESS, lease_until=store.now() + 60_000 + number)

    told = run(app, "release", "--label", "acme/*", "--yes", *WHY)

    assert told.exit_code == 1
    assert [line for line in told.stdout.splitlines() if "may be alive" in line and line.startswith("  3: ")]
    assert told.stdout.count("may be alive") == 1


def test_verdict_on_many_is_given_on_what_was_listed(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delivery did while the person thought is not overruled, and told."""
    first, _ = (keep(store, each, Status.UNKNOWN) for each in ("u1", "u2"))

    def think(question: str, **_: object) -> None:
        assert question.endswith("(of all 2)")
        store.swap(replace(first, revision="newer"), first.revision)

    monkeypatch.setattr("click.confirm", think)
    result = run(app, "resolve", "--status", "unknown", "--rerun", *WHY)

    assert result.exit_code == 1
    assert "judged 1, refused 1\n  1: somebody else changed the record meanwhile; look again\n" in unlinked(
        result.stdout
    )
    assert statuses(store) == {"u1": "UNKNOWN", "u2": "RELEASED"}


def test_bulk_ends_where_it_is_unclear_what_became_of_one(app: Celery, store: FaultyStore) -> None:
    """That one is named, and how many are left; the exit status says so."""
    for number in range(4):
        keep(store, f"u{number}", Status.UNKNOWN, updated_at=PAST + number)
    swaps = iter(range(9))

    def fail(record: Record) -> None:
        if next(swaps) == 1:
            raise StoreUnavailable("s", "swap", "timed out")

    store.before_swap = fail
    result = run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", *WHY)

    assert (result.exit_code, result.stdout) == (1, "judged 1, refused 0\n")
    assert unlinked(result.stderr).splitlines() == [
        "unclear what became of u1: s: swap failed: timed out; look at it before you repeat",
        "2 after it were not judged; give the same command again",
    ]
    store.before_swap = lambda record: None
    again = json.loads(run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", "--json", *WHY).stdout)
    assert [each["key"] for each in again["judged"]] == ["u1", "u2", "u3"]
    assert (again["refused"], again["unclear"], again["left"]) == ([], [], [])


def test_bulk_that_is_interrupted_says_how_far_it_came(app: Celery, store: FaultyStore) -> None:
    """A person's Ctrl-C ends it in the middle of a verdict."""
    for number in range(3):
        keep(store, f"u{number}", Status.UNKNOWN, updated_at=PAST + number)

    def interrupt(record: Record) -> None:
        raise KeyboardInterrupt

    store.before_swap = interrupt
    result = run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", "--json", *WHY)

    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["unclear"] == [{"key": "u0", "reason": "interrupted"}]
    assert told["left"] == ["u1", "u2"]


def test_bulk_that_is_interrupted_between_two_verdicts_tells_of_those_given(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal is told how far it came after each: a Ctrl-C strikes there, too."""
    for number in range(3):
        keep(store, f"u{number}", Status.UNKNOWN, updated_at=PAST + number)

    def counted(label: str, items: Iterable[Record], *, total: int | None = None) -> Iterator[Record]:
        for each in items:
            yield each
            if label == "judging":
                raise KeyboardInterrupt

    monkeypatch.setattr(screen, "counted", counted)
    result = run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", "--json", *WHY)

    told = json.loads(result.stdout)
    assert [each["key"] for each in told["judged"]] == ["u0"]
    assert told["unclear"] == [{"key": "u1", "reason": "interrupted"}]
    assert told["left"] == ["u2"]


def test_record_whose_step_is_damaged_does_not_end_a_bulk(app: Celery, store: FaultyStore) -> None:
    """It is refused, and the others are judged."""
    keep(store, "bad", Status.UNKNOWN, updated_at=PAST, steps={"charge": {"text": 7}})
    keep(store, "good", Status.UNKNOWN, updated_at=PAST + 1)

    result = run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", *WHY)

    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "judged 1, refused 1")
    assert "is damaged" in result.stdout
    assert statuses(store) == {"bad": "UNKNOWN", "good": "RELEASED"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("resolve", "--rerun"), "give a KEY, or say which records"),
        (("forget", "k", "--label", "acme/*"), "give either a KEY or filters, not both"),
        (("forget", "--label", "acme/*"), "a verdict on many records needs a --reason"),
        (("forget", "k", "--json"), "--json asks no questions; give --yes or --dry-run, too"),
        (("resolve", "k"), "give either --completed RESULT or --rerun"),
        (("resolve", "k", "--rerun", "--completed", "1"), "give either --completed RESULT or --rerun"),
        (("resolve", "k", "--completed", "ch_1"), "not JSON"),
        (("release", "--older-than", "2"), "must be an age"),
    ],
)
def test_arguments_are_checked_before_anything_is_asked(
    app: Celery, store: FaultyStore, arguments: tuple[str, ...], told: str
) -> None:
    """Nothing is read, and nobody confirms what cannot be done."""
    app.conf.idempotency_store = None

    refused = run(app, *arguments, answer="y\n")

    assert refused.exit_code == 2
    assert told in refused.stderr
    assert refused.stdout == ""


@pytest.fixture
def conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_idempotent.integration.cli.screen.is_conversation", lambda: True)


@pytest.mark.usefixtures("conversation")
def test_reason_is_asked_for_in_a_terminal(app: Celery, store: FaultyStore) -> None:
    """Of many it is asked until it is given; of one it may be left out; with --reason nobody is asked."""
    for each in ("u1", "u2", "u3", "u4"):
        keep(store, each, Status.UNKNOWN)

    def reason(key: str) -> Any:
        return (store.get(key) or a_record()).verdict["reason"]

    one = run(app, "resolve", "u1", "--rerun", answer="\ny\n")
    assert (one.exit_code, reason("u1"), "Reason: " in one.stdout) == (0, "", True)
    run(app, "resolve", "u2", "--rerun", "--yes")
    assert reason("u2") == ""
    many = run(app, "resolve", "--status", "unknown", "--rerun", answer="\nPAY-2\ny\n")
    assert (many.exit_code, many.stdout.count("Reason: "), reason("u3"), reason("u4")) == (0, 2, "PAY-2", "PAY-2")
    keep(store, "u5", Status.UNKNOWN)
    assert "Reason" not in run(app, "resolve", "u5", "--rerun", "--reason", "PAY-3", answer="y\n").stdout


@pytest.mark.parametrize(
    ("verdict", "asked"),
    [
        (("--rerun",), "that the effect did not happen, and will you publish the call again? [y/N]"),
        (("--completed", "null"), "that the effect happened? [y/N]"),
    ],
)
def test_the_question_says_what_the_verdict_states(
    app: Celery, store: FaultyStore, verdict: tuple[str, ...], asked: str
) -> None:
    """Both are given in a hurry, and each is wrong where the other is right."""
    keep(store, "u1", Status.UNKNOWN)

    assert asked in run(app, "resolve", "u1", *verdict, *WHY, answer="n\n").stdout


def test_many_are_listed_before_they_are_asked_about(app: Celery, store: FaultyStore) -> None:
    """And after a no they are as they were."""
    keep(store, "u1", Status.UNKNOWN)

    result = run(app, "resolve", "--status", "UNKNOWN", "--rerun", *WHY, answer="n\n")

    assert result.exit_code == 1
    assert "acme/u1" in result.stdout.split("Did you check")[0]
    assert statuses(store) == {"u1": "UNKNOWN"}


def test_nothing_that_fits_is_no_error(app: Celery) -> None:
    """A second erasure finds nothing; a task that the app does not have is told, as advice."""
    result = run(app, "forget", "--task", "shop.chrge", *WHY)

    assert (result.exit_code, result.stdout) == (0, "judged 0, refused 0\n")
    assert "its idempotent tasks: shop.charge" in result.stderr


@pytest.mark.parametrize(("label", "is_told"), [("acme", True), ("globex/*", False)])
def test_an_erasure_that_finds_no_such_label_says_how_to_mean_a_tenant(
    app: Celery, store: FaultyStore, label: str, is_told: bool
) -> None:
    """Else a person takes a tenant for erased of whom everything is still there."""
    keep(store, "o-1", Status.COMPLETED, expires_at=store.now() // 1000 + 600)

    result = run(app, "forget", "--label", label, "--yes", *WHY)

    assert (result.exit_code, result.stdout) == (0, "judged 0, refused 0\n")
    assert ("'acme/*' stands for all that begin so" in result.stderr) == is_told


@pytest.mark.parametrize("at_a_terminal", [False, True])
def test_verdict_is_logged_but_to_the_terminal_of_who_is_told_of_it(
    app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, at_a_terminal: bool
) -> None:
    """Where nobody has configured logging, a script's log has the proof; other warnings are sentences."""
    monkeypatch.setattr(screen, "is_terminal", lambda err=False: at_a_terminal and err)
    monkeypatch.setattr(screen, "counted", lambda label, items, total=None: iter(items))
    keep(store, "u1", Status.UNKNOWN)
    monkeypatch.setattr("logging.root.handlers", [])
    before = logging.lastResort
    scan = store.scan

    def unreadable(**asked: Any) -> Iterator[Record]:
        logging.getLogger("celery_idempotent.stores").warning("idempotency.record_unreadable key=%s", "\x1b")
        return scan(**asked)

    monkeypatch.setattr(store, "scan", unreadable)
    told = run(app, "resolve", "--status", "UNKNOWN", "--rerun", "--yes", *WHY)

    assert told.stdout == "judged 1, refused 0\n"
    warned, *logged = told.stderr.splitlines()
    assert warned == "Warning: idempotency.record_unreadable key=\\x1b"
    assert [each.split()[0] for each in logged] == ["event=idempotency.verdict_given"] * (not at_a_terminal)
    assert logging.lastResort is before
