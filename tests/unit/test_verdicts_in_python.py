"""Verdicts as people give them: with a name, a reason, and told to whoever listens."""

import getpass
import socket
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, PolicyError, Record, Status, forget, release, resolve, signals
from celery_idempotent.integration.operating.verdicts import judge_each, this_user
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.verdicts import Action, kept_until
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app


@pytest.fixture
def app() -> Celery:
    app = an_app()
    clock = FakeClock()
    app.conf.update(idempotency_store=MemoryStore(clock.now), idempotency_grace=5)

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=Policy("order"))
    def charge(order: str) -> None:
        """Nothing."""

    app.finalize()
    return app


def _stored(app: Celery, **changes: Any) -> Record:
    store = runtime_of(app).store
    record = replace(
        a_record(),
        **{"task": "shop.charge", "fencing_token": store.now(), "lease_until": store.now() - 5_000, **changes},
    )
    store.swap(record, None)
    return record


def test_each_verdict_is_told_with_a_name_and_a_reason(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """By a signal whose sender is the task, and by a line in the log."""
    told = []

    def tell(**kwargs: Any) -> None:
        told.append(kwargs)

    unknown = [_stored(app, status=Status.UNKNOWN) for _ in range(2)]
    abandoned, completed = _stored(app), _stored(app, status=Status.COMPLETED)
    why: dict[str, Any] = {"by": "ann", "reason": "ticket 7", "app": app}
    signals.verdict_given.connect(tell)
    try:
        resolve(unknown[0].key, completed=None, **why)
        resolve(unknown[1].key, rerun=True, **why)
        release(abandoned.key, **why)
        forget(completed.key, **why)
    finally:
        signals.verdict_given.disconnect(tell)

    assert [each["action"] for each in told] == ["completed", "rerun", "release", "forget"]
    assert {(each["by"], each["reason"], each["task"]) for each in told} == {("ann", "ticket 7", "shop.charge")}
    assert {each["sender"] for each in told} == {app.tasks["shop.charge"]}
    assert caplog.text.count("idempotency.verdict_given task=shop.charge") == 4
    assert caplog.text.count("ticket 7") == 4


@pytest.mark.parametrize(
    ("setting", "kept"),
    [({}, 365 * 86_400_000), ({"idempotency_keep_verdicts": 7}, 7_000), ({"idempotency_keep_verdicts": 0}, 0)],
)
def test_proof_of_a_verdict_stays_by_the_setting(app: Celery, setting: dict[str, int], kept: int) -> None:
    """A year, or what the setting says; what is forgotten on purpose is not kept for the sake of that."""
    app.conf.update(setting)
    unknown, abandoned = _stored(app, status=Status.UNKNOWN), _stored(app)
    judged = [resolve(unknown.key, completed=None, app=app), release(abandoned.key, app=app)]

    assert [kept_until(each) for each in judged] == [each.verdict["at"] + kept if kept else 0 for each in judged]
    assert "kept_until" not in forget(unknown.key, app=app).verdict


def test_a_verdict_on_a_task_of_another_app_has_no_sender(app: Celery) -> None:
    """One app judges what several have recorded; the name of the task stands beside."""
    told = []

    def tell(**kwargs: Any) -> None:
        told.append((kwargs["sender"], kwargs["task"]))

    signals.verdict_given.connect(tell)
    try:
        forget(_stored(app, task="mail.send", status=Status.FAILED).key, app=app)
    finally:
        signals.verdict_given.disconnect(tell)

    assert told == [(None, "mail.send")]


def test_a_release_waits_for_the_grace_of_the_task(app: Celery) -> None:
    """The policy of the record's own task says how long a body may be alive."""
    record = _stored(app, lease_until=runtime_of(app).store.now() - 4_999)

    with pytest.raises(PolicyError, match="for another 1 ms"):
        release(record.key, app=app)


def test_who_judges_is_the_user_of_the_process_unless_said(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its machine; of a user id without a name, the machine alone."""
    record = _stored(app, status=Status.UNKNOWN)

    assert resolve(record.key, rerun=True, app=app).verdict["by"] == f"{getpass.getuser()}@{socket.gethostname()}"

    def nameless() -> NoReturn:
        raise KeyError("getpwuid(): uid not found: 10001")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert this_user() == socket.gethostname()


def test_verdicts_hold_for_what_was_seen(app: Celery) -> None:
    """In Python, too, a person may say which revision they mean."""
    unknown, abandoned = _stored(app, status=Status.UNKNOWN), _stored(app)
    completed = _stored(app, status=Status.COMPLETED)

    with pytest.raises(PolicyError, match="meanwhile"):
        resolve(unknown.key, rerun=True, app=app, seen_revision="earlier")
    with pytest.raises(PolicyError, match="meanwhile"):
        release(abandoned.key, app=app, seen_revision="earlier")
    with pytest.raises(PolicyError, match="meanwhile"):
        forget(completed.key, app=app, seen_revision="earlier")


def test_one_refusal_does_not_end_the_verdicts_on_many(app: Celery) -> None:
    """What changed meanwhile is told, and left as it is."""
    records = [_stored(app, status=Status.UNKNOWN) for _ in range(3)]
    store = runtime_of(app).store
    store.swap(replace(records[1], revision="changed"), records[1].revision)

    judged = list(judge_each(Action.RERUN, records, app=app))

    assert [each.record.status for each in judged] == [Status.RELEASED, Status.UNKNOWN, Status.RELEASED]
    assert [bool(each.refusal) for each in judged] == [False, True, False]
    assert "meanwhile" in judged[1].refusal
