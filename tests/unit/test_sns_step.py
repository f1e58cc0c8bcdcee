"""Consumers in a worker: what keeps it from starting, and how they begin and end with it."""
# mypy: allow-untyped-decorators

import sys
import threading
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.contrib.sns import Route, consume, step
from celery_idempotent.contrib.sns.consumer import Pace
from celery_idempotent.contrib.sns.step import Subscribers
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration import settings
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import an_app, published
from tests.support.waiting import wait_until


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="charge")
    def charge(order_id: str) -> None: ...

    @app.task(shared=False, name="plain")
    def plain(order_id: str) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="observe", idempotent=Policy(mode="observe"))
    def observe(order_id: str) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="off", idempotent=Policy(mode="off"))
    def off(order_id: str) -> None: ...

    return app


class Sqs:
    """A queue with one notification, and a poll that a test can hold."""

    def __init__(self) -> None:
        self.bodies = ['{"order_id": "o-1"}']
        self.deleted: list[Any] = []

    def receive_message(self, **_: Any) -> Any:
        return (
            {"Messages": [{"MessageId": "m", "ReceiptHandle": "r", "Body": self.bodies.pop()}]} if self.bodies else {}
        )

    def delete_message_batch(self, QueueUrl: str, Entries: list[Any]) -> Any:  # noqa: N803
        self.deleted += Entries
        return {}


URL = "https://sqs.eu-west-1.amazonaws.com/1/orders"


def _step(app: Celery) -> Subscribers:
    subject = Subscribers(SimpleNamespace(app=app))
    subject.create(SimpleNamespace(app=app))
    return subject


@pytest.mark.parametrize("task", ["plain", "observe", "off", "celery.ping", "none"])
def test_worker_does_not_start_for_a_task_that_would_run_twice(app: Celery, task: str) -> None:
    """It says which one, and what to write."""
    consume(app, Route(queue="orders", task=task))

    with pytest.raises(click.ClickException, match=f"task='{task}': (it is not idempotent|the app has no such task)"):
        _step(app)


def test_route_takes_a_task_or_its_name(app: Celery) -> None:
    """Both are found when the worker starts."""
    consume(app, Route(queue="one", task="charge"), Route(queue="two", task=app.tasks["charge"]))

    _step(app)

    assert Subscribers in app.steps["worker"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"visibility": 0}, "visibility=0: must be a whole number from 1 to 43200"),
        ({"visibility": 60.0}, "visibility"),
        ({"wait": 21}, "wait=21"),
        ({"wait": True}, "wait=True"),
        ({"backlog": 0}, "backlog=0"),
    ],
)
def test_numbers_that_cannot_be_used_are_refused(app: Celery, options: Any, told: str) -> None:
    """Where they are written."""
    with pytest.raises(PolicyError, match=told):
        consume(app, Route(queue="orders", task="charge"), **options)


def test_consuming_nothing_is_refused(app: Celery) -> None:
    """Somebody forgot the route."""
    with pytest.raises(PolicyError, match="name a queue and a task"):
        consume(app)


def test_queue_is_consumed_once(app: Celery) -> None:
    """Of two consumers either would take what the other has routes for."""
    consume(app, Route(queue="orders", task="charge"))
    consume(app, Route(queue="returns", task="charge"))

    with pytest.raises(PolicyError, match="consumed already"):
        consume(app, Route(queue="orders", task="charge", when="subject"))


def test_consumers_begin_and_end_with_the_worker(app: Celery) -> None:
    """A thread for each queue, each with its routes, and one client for all."""
    sqs, made = Sqs(), list[Sqs]()

    def client() -> Any:
        made.append(sqs)
        return sqs

    routes = [Route(queue=url, task="charge", key="message.order_id") for url in (URL, URL, f"{URL}-2")]
    consume(app, *routes, wait=1, backlog=None, client=client)
    subject = _step(app)

    subject.start(SimpleNamespace(app=app))
    wait_until(lambda: sqs.deleted, "the notification was taken")
    assert sorted(each.name for each in subject._threads) == [
        f"celery-idempotent-sns-{URL}",
        f"celery-idempotent-sns-{URL}-2",
    ]
    subject.stop(SimpleNamespace(app=app))

    assert not any(each.is_alive() for each in subject._threads)
    assert len(made) == 1
    assert len(published(app)) == 1


def test_store_is_opened_before_forks_wait(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered later comes earlier before a fork: first the look ends, then the store lets go."""
    done: list[str] = []
    app.conf.idempotency_store = "memory://"
    monkeypatch.setattr(settings, "open_store", lambda url: done.append("store") or MemoryStore())  # type: ignore[func-returns-value]
    monkeypatch.setattr(step, "fork_between_looks", lambda: done.append("forks"))

    _step(app).start(SimpleNamespace(app=app))

    assert done == ["store", "forks"]


def test_stop_waits_for_the_longest_poll(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several consumers; what a poll brings is given back."""
    waited: list[float] = []
    thread: Any = lambda **_: SimpleNamespace(start=lambda: None, join=waited.append)  # noqa: E731
    monkeypatch.setattr(step, "threading", SimpleNamespace(Thread=thread, Event=threading.Event))
    client: Any = Sqs
    consume(app, Route(queue="orders", task="charge"), wait=20, client=client)
    consume(app, Route(queue="returns", task="charge"), wait=1, client=client)
    subject = _step(app)

    subject.start(SimpleNamespace(app=app))
    subject.stop(SimpleNamespace(app=app))

    assert len(waited) == 2
    assert min(waited) >= 20


def test_worker_that_is_terminated_waits_for_nothing(app: Celery) -> None:
    """What a poll brings then comes again."""
    subject = _step(app)
    subject.start(SimpleNamespace(app=app))
    subject._threads.append(threading.Thread())  # it cannot be joined

    subject.terminate(SimpleNamespace(app=app))

    assert subject._stopping.is_set()


def test_defaults_of_the_call_are_those_of_the_pace(app: Celery) -> None:
    """They are written twice, for readers of either."""
    consume(app, Route(queue="orders", task="charge"))

    assert step._consumed_by(app)[0].pace == Pace()


def test_client_is_boto3s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SQS, with the Region and credentials of the environment."""
    monkeypatch.setitem(sys.modules, "boto3", SimpleNamespace(client=lambda service: [service]))
    assert list(step._client()) == ["sqs"]  # type: ignore[call-overload]


def test_worker_that_lacks_the_extra_does_not_start(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the client is the author's own affair."""
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    consume(app, Route(queue="orders", task="charge"), client=Sqs)  # type: ignore[arg-type]
    _step(app)
    consume(app, Route(queue="returns", task="charge"))

    with pytest.raises(click.ClickException, match=r"celery-idempotent\[sns\]\"; see .*sns\.html#the-package"):
        _step(app)
