"""Verdicts by the command line: on a record that was shown, or on all that are asked for, and what became of each."""
# mypy: allow-untyped-decorators

import re
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, Record, Status, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support import commands
from tests.support.commands import run, told
from tests.support.deliveries import an_app
from tests.support.links import unlinked

PAST = 1_700_000_000_000
WHY = ("--reason", "PAY-1", "--by", "ann")
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
    """Which message, and since when; what is stated; and after a no it is as it was."""
    record = keep(app, "k", status, error="it stalled")
    result = run(app, *verdict, "k", answer="n\n")
    known = (record.task_id, "2023-11-14T22:13:20.000Z", "it stalled", question)
    assert [each for each in known if each not in result.stdout] == []
    assert (result.exit_code, store.get("k")) == (1, record)


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
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, "judged 3, refused 2")
    assert [each in result.stdout for each in ("acme/IN_PROGRESS", "acme/UNKNOWN")] == [True, True]
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
    summary, reason = result.stdout.splitlines()[-4:-2]
    assert (summary, reason[:30]) == ("would judge 1, would refuse 2", "  2: the body may be alive on ")


def test_bulk_verdict_is_on_what_was_listed(app: Celery, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert reason in made["unclear"][0]["reason"]
    keys = {name: [each["key"] for each in made[name]] for name in ("judged", "refused", "unclear")}
    assert (keys, made["left"]) == ({"judged": ["u1"], "refused": [], "unclear": ["u2"]}, ["u3"])


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
    for key, arguments, answer, asked in (
        ("u1", ("u1",), "\ny\n", 1),
        ("u2", ("u2", "--yes"), "", 0),
        ("u3", ("u3", "--reason", "PAY-3"), "y\n", 0),
        ("u4", ("--status", "unknown"), "\nPAY-2\ny\n", 2),
    ):
        keep(app, key)
        result = run(app, "resolve", *arguments, "--rerun", answer=answer)
        assert (result.exit_code, result.stdout.count("Reason: ")) == (0, asked)
    assert [each.verdict["reason"] for each in store.scan()] == ["", "", "PAY-3", "PAY-2"]
