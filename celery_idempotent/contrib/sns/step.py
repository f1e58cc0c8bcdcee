"""The consumers of an app's queues, as a step of its workers."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
from celery import Celery, bootsteps

from celery_idempotent.contrib.sns.consumer import Pace, Subscriber
from celery_idempotent.contrib.sns.routing import Route
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import is_enforced
from celery_idempotent.integration.periodic import fork_between_looks
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.startup import StoreCheck
from celery_idempotent.stores.forks import PerProcess
from celery_idempotent.troubleshooting import with_link

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

_CONSUMED = "_celery_idempotent_sns"
"""Attribute of an app."""


@dataclass(frozen=True, slots=True)
class _Consumed:
    routes: Sequence[Route]
    pace: Pace
    client: "Callable[[], SQSClient]"


def consume(
    app: Celery,
    *routes: Route,
    visibility: int = 60,
    wait: int = 10,
    backlog: int | None = 1000,
    client: "Callable[[], SQSClient] | None" = None,
) -> None:
    """Have every worker of ``app`` make calls of the notifications in the routes' queues.

    Args:
        app: The Celery app.
        routes: At least one. The first that fits a notification has it.
        visibility: Seconds for which a worker has what it took from a queue.
        wait: Seconds for which SQS waits for messages, 1 to 20. A worker that stops waits for the end of that.
        backlog: While so many tasks wait at the broker, nothing is taken; None for no limit.
        client: Makes a boto3 client of SQS; it is called once in each worker. Default: ``boto3.client("sqs")``.

    Raises:
        PolicyError: No route, or a number that cannot be used. What is wrong with a task, a worker says when it starts.
    """
    if not routes:
        raise PolicyError(
            "routes",
            "()",
            "name a queue and a task: consume(app, Route(queue=..., task=...))",
            see="sns#a-route-cannot-be-used",
        )
    _check("visibility", visibility, 1, 43_200)
    _check("wait", wait, 1, 20)
    if backlog is not None:
        _check("backlog", backlog, 1, 10**9)
    for each in {each.queue for each in routes} & {each.queue for known in _consumed_by(app) for each in known.routes}:
        raise PolicyError(
            "queue",
            repr(each),
            "it is consumed already; give all its routes to one consume(...)",
            see="sns#a-route-cannot-be-used",
        )
    pace = Pace(visibility=visibility, wait=wait, backlog=backlog)
    vars(app).setdefault(_CONSUMED, []).append(_Consumed(routes, pace, client or _client))
    app.steps["worker"].add(Subscribers)


def _check(option: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise PolicyError(
            option, repr(value), f"must be a whole number from {least} to {most}", see="sns#a-number-cannot-be-used"
        )


def _client() -> "SQSClient":
    import boto3

    return boto3.client("sqs")


class Subscribers(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A thread of the worker's main process for each queue."""

    # What can be wrong with the store and the settings, StoreCheck has reported by then.
    requires = ("celery.worker.components:Pool", StoreCheck)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._patience = 0
        super().__init__(parent, **kwargs)

    def create(self, parent: Any) -> None:
        """Refuse to start a worker for a task that would run more than once, or one that cannot ask SQS."""
        try:
            for each in _consumed_by(parent.app):
                check_routes(parent.app, each.routes)
                if each.client is _client and find_spec("boto3") is None:
                    raise click.ClickException(
                        with_link(
                            'boto3 is not installed; run: pip install "celery-idempotent[sns]"',
                            see="sns#the-package-for-sns-is-missing",
                        )
                    )
        except PolicyError as error:
            raise click.ClickException(f"celery-idempotent: {error}") from error

    def start(self, parent: Any) -> None:
        """Begin to consume."""
        _ = runtime_of(parent.app).store  # what is registered later comes earlier before a fork
        fork_between_looks()
        for each in _consumed_by(parent.app):
            sqs = PerProcess(each.client)
            self._patience = max(self._patience, each.pace.wait)
            for queue, routes in _by_queue(each.routes).items():
                subscriber = Subscriber(parent.app, routes, sqs, each.pace, self._stopping)
                thread = threading.Thread(target=subscriber.run, name=f"celery-idempotent-sns-{queue}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, parent: Any) -> None:
        """Stop after the call at hand. What a request brings now is given back, so its answer is waited for."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(self._patience + 5)

    def terminate(self, parent: Any) -> None:
        """Wait for nothing: what a request brings now comes again."""
        self._stopping.set()


def _consumed_by(app: Celery) -> list[_Consumed]:
    found: list[_Consumed] = getattr(app, _CONSUMED, [])
    return found


def _by_queue(routes: Sequence[Route]) -> Mapping[str, list[Route]]:
    queues: dict[str, list[Route]] = defaultdict(list)
    for each in routes:
        queues[each.queue].append(each)
    return queues


def check_routes(app: Celery, routes: Sequence[Route]) -> None:
    """Refuse a route to a task that is not idempotent: SNS and SQS deliver at least once.

    Raises:
        PolicyError: There is no such task, or it is not protected.
    """
    for each in routes:
        task = app.tasks.get(each.task_name)
        if task is None:
            raise PolicyError(
                "task",
                repr(each.task_name),
                "the app has no such task; import it, or name another",
                see="sns#the-task-cannot-take-notifications",
            )
        if not is_enforced(task):
            raise PolicyError(
                "task",
                repr(each.task_name),
                "it is not idempotent, and a notification can come more than once; write base=IdempotentTask, "
                'without mode="off" or "observe"',
                see="sns#the-task-cannot-take-notifications",
            )
