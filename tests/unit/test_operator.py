"""What a person may say about an operation that cannot go on by itself, and what the library refuses to be told."""
# mypy: allow-untyped-decorators

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import IdempotentTask, OutcomeUnknown, Policy, PolicyError, Status, StoreMisconfigured
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app, deliver
from tests.support.judging import judge

LEASE, GRACE = 60_000, 1_000
CH_1 = Encoded('"ch_1"', "application/json")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock.now)


def _stored(store: MemoryStore, **changes: Any) -> Record:
    record = replace(a_record(), lease_until=store.now() + LEASE, **changes)
    store.swap(record, None)
    return record


def test_release_gives_back_what_ended_without_a_word(store: MemoryStore, clock: FakeClock) -> None:
    """When lease and grace are over, the record becomes RELEASED under a new revision, its steps kept."""
    record = _stored(store, steps={"charge": {"result": "ch_1"}})
    clock.advance(LEASE + GRACE)

    released = judge(store, record.key, Action.RELEASE, grace=GRACE)

    assert store.get(record.key) == released
    assert (released.status, released.steps) == (Status.RELEASED, record.steps)
    assert released.revision != record.revision


def test_release_waits_for_lease_and_grace(store: MemoryStore, clock: FakeClock) -> None:
    """A millisecond before their end the body may be alive; the answer says for how long and on which worker."""
    record = _stored(store)
    clock.advance(LEASE + GRACE - 1)

    with pytest.raises(PolicyError, match=r"may be alive on celery@example: .* for another 1 ms"):
        judge(store, record.key, Action.RELEASE, grace=GRACE)

    assert store.get(record.key) == record


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status.UNKNOWN, "check the receiver, then resolve it"),
        (Status.COMPLETED, "it is COMPLETED"),
        (Status.FAILED, "it is FAILED"),
        (Status.RELEASED, "it is RELEASED"),
    ],
)
def test_release_is_for_what_is_in_progress(store: MemoryStore, clock: FakeClock, status: Status, reason: str) -> None:
    """An outcome is never given back, and an unknown one wants a verdict."""
    record = _stored(store, status=status)
    clock.advance(LEASE + GRACE)

    with pytest.raises(PolicyError, match=reason):
        judge(store, record.key, Action.RELEASE, grace=GRACE)

    assert store.get(record.key) == record


def test_release_of_nothing_is_refused(store: MemoryStore) -> None:
    """A mistyped key is told as such."""
    with pytest.raises(PolicyError, match="nothing is recorded"):
        judge(store, "no such key", Action.RELEASE, grace=GRACE)


def test_verdicts_hold_for_the_record_that_was_looked_at(store: MemoryStore, clock: FakeClock) -> None:
    """A verdict given on one revision is refused when another is stored, even one of the same status."""
    unknown = _stored(store, status=Status.UNKNOWN)
    running = _stored(store)
    clock.advance(LEASE + GRACE)

    verdicts_on_another: list[Callable[[], Record]] = [
        lambda: judge(store, unknown.key, Action.RERUN, seen_revision="earlier"),
        lambda: judge(store, unknown.key, Action.COMPLETED, result=CH_1, retain=1, seen_revision="earlier"),
        lambda: judge(store, running.key, Action.RELEASE, grace=GRACE, seen_revision="earlier"),
    ]
    for give in verdicts_on_another:
        with pytest.raises(PolicyError, match="somebody else changed the record meanwhile"):
            give()

    assert {each.revision for each in store.scan()} == {unknown.revision, running.revision}
    assert judge(store, unknown.key, Action.RERUN, seen_revision=unknown.revision).status is Status.RELEASED
    assert judge(store, running.key, Action.RELEASE, grace=GRACE, seen_revision=running.revision)


def test_release_loses_against_a_write_meanwhile(clock: FakeClock) -> None:
    """A takeover between the look and the release stands."""

    class TakenOver(MemoryStore):
        def get(self, key: str) -> Record | None:
            seen = super().get(key)
            assert seen is not None
            self.swap(replace(seen, revision="of the takeover"), seen.revision)
            return seen

    store = TakenOver(clock.now)
    record = _stored(store)
    clock.advance(LEASE + GRACE)

    with pytest.raises(PolicyError, match="meanwhile"):
        judge(store, record.key, Action.RELEASE, grace=GRACE)

    assert [each.revision for each in store.scan()] == ["of the takeover"]


# The command


@pytest.fixture
def app(store: MemoryStore) -> Celery:
    app = an_app()
    app.conf.update(idempotency_store=store, idempotency_grace=3)
    runs: list[None] = []

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(on_takeover="refuse", lease=5))
    def charge() -> str:
        runs.append(None)
        return f"run {len(runs)}"

    app.finalize()
    return app


def _release(app: Celery, key: str, answer: str) -> Result:
    return CliRunner().invoke(idempotency, ["release", key], input=answer, obj=SimpleNamespace(app=app))


def _leave_behind(app: Celery, store: MemoryStore) -> str:
    """What a worker leaves that dies before its first write after the claim."""
    charge = app.tasks["charge"]
    deliver(charge)
    (done,) = store.scan()
    running = replace(
        done, status=Status.IN_PROGRESS, revision="r", lease_until=store.now() + 5_000, expires_at=None, result=None
    )
    store.swap(running, done.revision)
    return running.key


def test_command_releases_by_the_grace_of_the_app(app: Celery, store: MemoryStore, clock: FakeClock) -> None:
    """Refused before its end, granted at it, and the next delivery runs."""
    key = _leave_behind(app, store)
    clock.advance(8_000 - 1)

    refused = _release(app, key, "y\n")
    assert (refused.exit_code, "for another 1 ms" in refused.output) == (1, True)
    clock.advance(1)
    assert f"{key} is RELEASED" in _release(app, key, "y\n").output

    assert deliver(app.tasks["charge"]).value == "run 2"


def test_command_asks_before_it_releases(app: Celery, store: MemoryStore, clock: FakeClock) -> None:
    """Whoever did not check the receiver releases nothing; the next delivery then makes it UNKNOWN."""
    key = _leave_behind(app, store)
    clock.advance(8_000)

    answered = _release(app, key, "n\n")

    assert (answered.exit_code, "Did you check the receiver" in answered.output) == (1, True)
    assert isinstance(deliver(app.tasks["charge"]).value, OutcomeUnknown)


def test_verdict_over_a_damaged_step_is_refused() -> None:
    """Whether it had ended nobody can tell, so it is neither forgotten nor kept; the record stays as it is."""
    store = MemoryStore()
    record = replace(a_record(), status=Status.UNKNOWN, steps={"charge": {"text": 7}})
    store.swap(record, None)

    with pytest.raises(StoreMisconfigured, match="is damaged: ValueError: not a state of a step"):
        judge(store, record.key, Action.RERUN)
    assert store.get(record.key) == record
