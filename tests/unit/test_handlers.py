"""The author's handlers are told of bodies: once for each, and never of a replay or a postponed delivery."""

from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.signals import task_retry, task_success

from celery_idempotent import IdempotentMixin, IdempotentTask, KeyReused, Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import an_app, deliver, published, redeliver


@pytest.fixture
def app() -> Celery:
    return an_app()


class Telling:
    """Notes which of its handlers are called."""

    told: list[str]

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.told.append("before_start")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.told.append("on_success")

    def on_failure(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.told.append(f"on_failure {type(exc).__name__}")

    def on_retry(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.told.append(f"on_retry {type(exc).__name__}")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.told.append(f"after_return {status}")


class Above(Telling, IdempotentTask):
    """Handlers before the library's class."""


class Below(IdempotentMixin, Telling, Task):
    """And after it."""


def _task(app: Celery, body: Any, base: type[Task] = Above, policy: Policy = Policy("order_id")) -> Task:  # noqa: B008
    return app.task(bind=True, base=base, name=f"task-{uuid4()}", shared=False, idempotent=policy, told=[])(body)


@pytest.mark.parametrize("base", [Above, Below])
def test_replays_tell_nobody(app: Celery, base: type[Task]) -> None:
    """Three duplicates and one body: who counts money in ``on_success`` counts it once."""

    def charge(self: Any, order_id: str) -> str:
        self.told.append("body")
        return "charged"

    task = _task(app, charge, base)
    for _ in range(4):
        assert deliver(task, "o-1").value == "charged"

    assert task.told == ["before_start", "body", "on_success", "after_return SUCCESS"]


def test_replayed_failures_tell_nobody(app: Celery) -> None:
    """The failure was told when it happened."""

    def charge(self: Any, order_id: str) -> None:
        raise LookupError

    task = _task(app, charge, policy=Policy("order_id", remember=(LookupError,)))
    for _ in range(3):
        assert deliver(task, "o-1").state == "FAILURE"

    assert task.told == ["before_start", "on_failure LookupError", "after_return FAILURE"]


def test_refusals_of_the_library_are_told(app: Celery) -> None:
    """Nothing else tells the author that this call did not happen."""

    def charge(self: Any, order_id: str, cents: int) -> None: ...

    task = _task(app, charge)
    deliver(task, "o-1", 500)
    task.told.clear()

    assert isinstance(deliver(task, "o-1", 999).value, KeyReused)

    assert task.told == ["on_failure KeyReused", "after_return FAILURE"]


def test_postponed_deliveries_tell_nobody(app: Celery) -> None:
    """Neither handlers nor ``before_start``; Celery's signals tell it, with the reason."""
    app.conf.idempotency_store = FaultyStore(app.conf.idempotency_store, "request lost", "request lost")
    reasons = []

    def retried(reason: Any, **_: Any) -> None:
        reasons.append(type(reason.exc).__name__)

    def charge(self: Any, order_id: str) -> str:
        return "charged"

    task = _task(app, charge)
    task_retry.connect(retried, sender=task)
    try:
        assert deliver(task, "o-1").state == "RETRY"
    finally:
        task_retry.disconnect(retried, sender=task)

    assert task.told == []
    assert reasons == ["StoreUnavailable"]
    (message,) = published(app)
    assert redeliver(app, message).value == "charged"
    assert task.told == ["before_start", "on_success", "after_return SUCCESS"]


def test_retries_of_the_body_are_told(app: Celery) -> None:
    """They are the author's own."""

    def charge(self: Any, order_id: str) -> str:
        if self.request.retries == 0:
            raise self.retry(exc=ConnectionError(), countdown=0)
        return "charged"

    task = _task(app, charge)
    deliver(task, "o-1")
    (message,) = published(app)
    redeliver(app, message)

    assert task.told == [
        "before_start",
        "on_retry ConnectionError",
        "before_start",
        "on_success",
        "after_return SUCCESS",
    ]


def test_body_whose_outcome_another_recorded_tells_nobody(app: Celery) -> None:
    """The other's handlers are told of it."""
    store = app.conf.idempotency_store
    from dataclasses import replace

    from celery_idempotent.protocol.codec import Encoded
    from celery_idempotent.protocol.operation import ended
    from celery_idempotent.protocol.record import Status

    def charge(self: Any, order_id: str) -> str:
        record: Record = next(store.scan())
        other = replace(record, owner="other", revision="r")
        assert store.swap(
            ended(other, Status.COMPLETED, 1, 10**15, "r", Encoded("1", "application/json")), record.revision
        )
        return "mine"

    task = _task(app, charge)

    assert deliver(task, "o-1").value == 1
    assert task.told == ["before_start"]


def test_signals_tell_every_delivery(app: Celery) -> None:
    """They serve monitoring: a replay is a delivery that succeeded."""
    results = []

    def succeeded(result: Any, **_: Any) -> None:
        results.append(result)

    def charge(self: Any, order_id: str) -> str:
        return "charged"

    task = _task(app, charge)
    task_success.connect(succeeded, sender=task)
    try:
        for _ in range(2):
            deliver(task, "o-1")
    finally:
        task_success.disconnect(succeeded, sender=task)

    assert results == ["charged", "charged"]


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_unprotected_bodies_tell_as_ever(app: Celery, mode: Any) -> None:
    """Every body is one."""

    def charge(self: Any, order_id: str) -> str:
        return "charged"

    task = _task(app, charge, policy=Policy("order_id", mode=mode))
    for _ in range(2):
        deliver(task, "o-1")

    assert task.told == ["before_start", "on_success", "after_return SUCCESS"] * 2


def test_handlers_that_annotations_bring_are_told_of_bodies_only(app: Celery) -> None:
    """So are those given as options."""
    told = []

    def on_success(self: Any, *args: Any) -> None:
        told.append("annotated")

    def after_return(self: Any, *args: Any) -> None:
        told.append("option")

    name = f"task-{uuid4()}"
    app.conf.task_annotations = {name: {"on_success": on_success}}

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(base=IdempotentTask, name=name, shared=False, after_return=after_return)(charge)
    for _ in range(3):
        deliver(task, "o-1")

    assert told == ["annotated", "option"]


def test_handlers_that_a_workers_main_process_calls_are_told(app: Celery) -> None:
    """Such as ``on_failure`` of a task whose time limit or process ended: there is no delivery in that process."""

    def charge(self: Any, order_id: str) -> None: ...

    task = _task(app, charge)

    task.on_failure(TimeoutError(), "id", (), {}, None)

    assert task.told == ["on_failure TimeoutError"]


def test_handlers_may_be_static(app: Celery) -> None:
    """As any method may."""
    told = []

    class Static(IdempotentTask):
        @staticmethod
        def on_success(retval: Any, *args: Any) -> None:
            told.append(retval)

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(base=Static, name=f"task-{uuid4()}", shared=False)(charge)
    for _ in range(2):
        deliver(task, "o-1")

    assert told == ["charged"]


def test_result_that_celery_cannot_encode_is_no_failure_of_the_body(app: Celery) -> None:
    """Celery reports a failure; the effect has happened and is recorded, so nobody is told to make up for it."""
    app.conf.result_backend_transport_options = {}

    def charge(self: Any, order_id: str) -> Any:
        return object()

    task = _task(app, charge)

    assert deliver(task, "o-1").state == "FAILURE"
    assert task.told == ["before_start"]
