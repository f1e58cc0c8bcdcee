"""What a person may say, in Python, about an operation that cannot go on by itself, and what nobody may say of it."""
# mypy: allow-untyped-decorators

import getpass
import socket
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, Record, Status, current_attempt, forget, release, resolve, signals
from celery_idempotent.errors import OutcomeUnknown, PolicyError, StoreMisconfigured
from celery_idempotent.integration.operating.verdicts import this_user
from celery_idempotent.protocol.effects import AtMostOnce, Keyed
from celery_idempotent.protocol.verdicts import Action, kept_until
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.commands import keep
from tests.support.deliveries import an_app, deliver
from tests.support.judging import judge

GRACE = 5_000
WHY: dict[str, Any] = {"by": "ann", "reason": "ticket 7"}
YEAR = 365 * 86_400_000


@pytest.fixture
def app(store: MemoryStore) -> Celery:
    app = an_app(idempotency_store=store, idempotency_grace=5)

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=Policy(on_takeover="refuse"))
    def charge() -> str:
        return "charged"

    app.finalize()
    return app


def _kept(app: Celery, status: Status = Status.IN_PROGRESS, left: int = 0, **values: Any) -> Record:
    """A record whose lease and grace are over in ``left`` milliseconds."""
    now = app.conf.idempotency_store.now()
    times = {"fencing_token": now, "lease_until": now - GRACE + left}
    return keep(app, status=status, **{"task": "shop.charge", **times, **values})


@pytest.mark.parametrize(
    ("action", "status", "left", "reason"),
    [
        (Action.RELEASE, Status.IN_PROGRESS, 1, "may be alive on celery@example: .* for another 1 ms"),
        (Action.RELEASE, Status.UNKNOWN, 0, "then resolve it"),
        *((Action.RELEASE, each, 0, f"it is {each}") for each in ("COMPLETED", "FAILED", "RELEASED")),
        *((Action.RERUN, each, 0, f"it is {each}") for each in ("COMPLETED", "FAILED", "RELEASED", "IN_PROGRESS")),
        (Action.COMPLETED, Status.RELEASED, 0, "it is RELEASED"),
    ],
)
def test_verdict_that_does_not_fit_is_refused(
    app: Celery, store: MemoryStore, action: Action, status: str, left: int, reason: str
) -> None:
    """A body may be alive, an outcome is never given back, and only what is UNKNOWN is resolved."""
    record = _kept(app, Status(status), left)
    with pytest.raises(PolicyError, match=reason):
        judge(store, record.key, action, grace=GRACE)
    assert store.get(record.key) == record


def test_release_is_by_the_grace_of_the_app_and_the_next_delivery_runs(
    app: Celery, store: MemoryStore, clock: FakeClock
) -> None:
    """Refused a millisecond before, granted then; also under "refuse", where the next delivery would not run."""
    charge = app.tasks["shop.charge"]
    record = _kept(app, left=1, key=charge.idempotency_key_for(), fingerprint=None, steps={"paid": {"lost": "x"}})
    with pytest.raises(PolicyError, match="for another 1 ms"):
        release(record.key, app=app)
    clock.advance(1)

    released = release(record.key, app=app)

    assert store.get(record.key) == released
    assert (released.status, released.steps, released.revision == record.revision) == ("RELEASED", record.steps, False)
    assert deliver(charge).value == "charged"


def test_verdict_holds_for_the_record_that_was_looked_at(app: Celery, store: MemoryStore) -> None:
    """Another revision is another record, even of the same status."""
    unknown, abandoned, done = (_kept(app, each) for each in (Status.UNKNOWN, Status.IN_PROGRESS, Status.COMPLETED))
    for judged in (
        partial(resolve, unknown.key, rerun=True),
        partial(resolve, unknown.key, completed=1),
        partial(release, abandoned.key),
        partial(forget, done.key),
    ):
        with pytest.raises(PolicyError, match="changed the record meanwhile"):
            judged(app=app, seen_revision="earlier")
    assert list(store.scan()) == [unknown, abandoned, done]
    assert resolve(unknown.key, rerun=True, app=app, seen_revision=unknown.revision).status is Status.RELEASED
    with pytest.raises(PolicyError, match="nothing is recorded"):
        release("no such key", app=app)


def test_release_loses_to_a_write_meanwhile(app: Celery, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A takeover between the look and the release stands."""
    record, get = _kept(app), store.get

    def taken_over(key: str) -> Record | None:
        seen = get(key)
        store.swap(record.but(revision="of the takeover"), record.revision)
        return seen

    monkeypatch.setattr(store, "get", taken_over)
    with pytest.raises(PolicyError, match="meanwhile"):
        release(record.key, app=app)
    assert [each.revision for each in store.scan()] == ["of the takeover"]


def test_verdict_over_a_damaged_step_is_refused(app: Celery, store: MemoryStore) -> None:
    """Whether it had ended nobody can tell, so it is neither forgotten nor kept; the record stays as it is."""
    record = _kept(app, Status.UNKNOWN, steps={"charge": {"text": 7}})
    with pytest.raises(StoreMisconfigured, match="damaged"):
        resolve(record.key, rerun=True, app=app)
    assert store.get(record.key) == record


def test_verdict_must_be_one(app: Celery) -> None:
    """Neither none nor two."""
    for resolved in (partial(resolve, "k"), partial(resolve, "k", completed=1, rerun=True)):
        with pytest.raises(PolicyError, match="either completed=<its result> or rerun=True"):
            resolved(app=app)


@pytest.fixture
def texts() -> list[str]:
    return []


@pytest.fixture
def in_doubt(app: Celery, texts: list[str]) -> Any:
    """A task with a finished step, and one that began and did not end."""
    effects = Policy(effects={"charge": Keyed(), "sms": AtMostOnce()})

    @app.task(base=IdempotentTask, name="notify", shared=False, idempotent=effects)
    def notify(order: str) -> list[str]:
        def send(step: Any) -> str:
            texts.append(order)
            if len(texts) == 1:
                raise TimeoutError
            return "sent"

        return [current_attempt().step("charge", lambda step: "paid"), current_attempt().step("sms", send)]

    for error in (TimeoutError, OutcomeUnknown):
        with pytest.raises(error):
            notify.apply(("o-1",), throw=True)
    return notify


def test_verdict_that_it_did_not_happen_runs_what_is_left(app: Celery, texts: list[str], in_doubt: Any) -> None:
    """Finished steps stay finished, the one in doubt is called; in a shell of the project there is a current app."""
    app.set_current()
    record = resolve(in_doubt.idempotency_key_for("o-1"), rerun=True)
    assert (record.status, set(record.steps)) == (Status.RELEASED, {"charge"})
    assert (in_doubt.apply(("o-1",)).get(), len(texts)) == (["paid", "sent"], 2)


def test_verdict_that_it_happened_is_the_outcome(app: Celery, texts: list[str], in_doubt: Any) -> None:
    """Every later delivery is answered with it, and nothing is called."""
    assert resolve(in_doubt.idempotency_key_for("o-1"), completed=None, app=app).status is Status.COMPLETED
    assert (in_doubt.apply(("o-1",)).get(), len(texts)) == (None, 1)


def test_release_leaves_a_begun_step_in_doubt(app: Celery, store: MemoryStore, texts: list[str], in_doubt: Any) -> None:
    """To give a claim back says nothing about a step: the next delivery asks for a verdict."""
    (unknown,) = store.scan()
    store.swap(unknown.but(status=Status.IN_PROGRESS, revision="left behind", lease_until=0), unknown.revision)

    assert "sms" in release(unknown.key, app=app).steps
    with pytest.raises(OutcomeUnknown):
        in_doubt.apply(("o-1",), throw=True)
    assert len(texts) == 1


def test_each_verdict_is_told_with_a_name_and_a_reason(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """By a signal whose sender is the task, if this app has it, and by a line in the log."""
    hear = Mock()
    signals.verdict_given.connect(hear)
    try:
        resolve(_kept(app, Status.UNKNOWN).key, completed=None, app=app, **WHY)
        resolve(_kept(app, Status.UNKNOWN).key, rerun=True, app=app, **WHY)
        release(_kept(app).key, app=app, **WHY)
        forget(_kept(app, Status.COMPLETED, task="mail.send").key, app=app, **WHY)
    finally:
        signals.verdict_given.disconnect(hear)

    heard = [each.kwargs for each in hear.call_args_list]
    assert [each["action"] for each in heard] == ["completed", "rerun", "release", "forget"]
    assert [each["sender"] for each in heard] == [*[app.tasks["shop.charge"]] * 3, None]
    assert {(each["by"], each["reason"]) for each in heard} == {("ann", "ticket 7")}
    assert caplog.text.count("idempotency.verdict_given task=") == caplog.text.count("ticket 7") == 4


@pytest.mark.parametrize(
    ("setting", "kept"), [({}, YEAR), ({"idempotency_keep_verdicts": 7}, 7_000), ({"idempotency_keep_verdicts": 0}, 0)]
)
def test_proof_of_a_verdict_stays_by_the_setting(app: Celery, setting: dict[str, int], kept: int) -> None:
    """A year, or what the setting says; what is forgotten on purpose is not kept for the sake of that."""
    app.conf.update(setting)
    judged = resolve(key := _kept(app, Status.UNKNOWN).key, completed=None, app=app)
    assert kept_until(judged) == (judged.verdict["at"] + kept if kept else 0)
    assert "kept_until" not in forget(key, app=app).verdict


@pytest.mark.parametrize(("task", "days"), [("charge", 30), ("removed", 7)])
def test_verdict_counts_as_long_as_the_task_says(app: Celery, task: str, days: int) -> None:
    """For the task's own ``retain``, or the app's where the task is gone."""

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(retain=30 * 86_400))
    def charge() -> None: ...

    app.conf.idempotency_keep_verdicts = 0
    judged = resolve(_kept(app, Status.UNKNOWN, task=task).key, completed=None, app=app)
    assert (judged.result, judged.expires_at) == ("null", judged.updated_at // 1000 + days * 86_400)


def test_who_judges_is_the_user_of_the_process_unless_said(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its machine; of a user id without a name, the machine alone."""
    record = _kept(app, Status.UNKNOWN)
    assert resolve(record.key, rerun=True, app=app).verdict["by"] == f"{getpass.getuser()}@{socket.gethostname()}"
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=KeyError("getpwuid(): uid not found: 10001")))
    assert this_user() == socket.gethostname()
