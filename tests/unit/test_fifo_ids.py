"""SQS FIFO's deduplication ids of messages that are published without a task id, as nearly all are."""
# mypy: allow-untyped-decorators

from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.headers import CONFLICTS_HEADER, OUTAGES_HEADER


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The deduplication ids that reach Celery's ``send_task``."""
    found: list[str] = []
    monkeypatch.setattr(Celery, "send_task", lambda *args, **options: found.append(options["MessageDeduplicationId"]))
    return found


@pytest.fixture
def app() -> Celery:
    app = Celery("fifo", set_as_current=False, broker="sqs://a:b@127.0.0.1:1//")
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, task_default_queue="orders.fifo")
    return app


@pytest.mark.parametrize("waiting", ["link", "link_error"])
def test_two_calls_with_a_callback_have_two_ids(app: Celery, ids: list[str], waiting: str) -> None:
    """SQS must not drop the second message: its callback would never run."""

    @app.task(base=IdempotentTask, name="fifo.charge", shared=False, idempotent=Policy(key="order_id"))
    def charge(order_id: int) -> None: ...

    charge.apply_async((7,), **{waiting: charge.si(8)})
    charge.apply_async((7,), **{waiting: charge.si(8)})

    assert len(set(ids)) == 2


def test_two_ticks_of_beat_have_two_ids(app: Celery, ids: list[str]) -> None:
    """Each tick of a task keyed by all arguments is an operation of its own, less than five minutes apart, too."""

    @app.task(base=IdempotentTask, name="fifo.rebuild", shared=False)
    def rebuild() -> None: ...

    rebuild.apply_async(headers={"celery_beat_task": True})
    rebuild.apply_async(headers={"celery_beat_task": True})

    assert len(set(ids)) == 2


def test_two_plain_calls_of_one_effect_have_one_id(app: Celery, ids: list[str]) -> None:
    """The task id of a call that nothing waits for stays out of it, so SQS drops the double publish."""

    @app.task(base=IdempotentTask, name="fifo.charge", shared=False, idempotent=Policy(key="order_id"))
    def charge(order_id: int) -> None: ...

    charge.delay(7)
    charge.delay(order_id=7)

    assert len(set(ids)) == 1


@pytest.mark.parametrize("header", [CONFLICTS_HEADER, OUTAGES_HEADER])
def test_a_postponed_message_has_another_id_each_time(app: Celery, ids: list[str], header: str) -> None:
    """SQS would drop it for a copy of the one that it stands for, and the task would be lost."""

    @app.task(base=IdempotentTask, name="fifo.charge", shared=False, idempotent=Policy(key="order_id"))
    def charge(order_id: int) -> None: ...

    for count in range(3):
        charge.apply_async((7,), headers={header: count})

    assert len(set(ids)) == 3


def test_a_router_is_asked_with_the_arguments(app: Celery, ids: list[str]) -> None:
    """As Celery asks it: one that chooses queue and message group by them is how a whole app gets its groups."""

    @app.task(base=IdempotentTask, name="fifo.charge", shared=False, idempotent=Policy(key="order_id"))
    def charge(order_id: int, customer: str) -> None: ...

    def by_customer(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **rest: Any) -> dict[str, Any]:
        assert task.name == name
        return {"queue": "orders.fifo", "MessageGroupId": f"{args[0]}-{kwargs['customer']}"}

    app.conf.task_default_queue = "standard"
    app.conf.task_routes = [by_customer]
    charge.apply_async((7,), {"customer": "7"})

    assert len(ids) == 1
