"""One set of tasks, two kinds of apps and workers for them: with IdempotentTask, and with those published once."""
# mypy: allow-untyped-decorators

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, current_task, signature
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun
from celery.states import SUCCESS
from redis import Redis

from celery_idempotent import IdempotentTask, Policy
from lab import tether
from lab.short_delays import ShortDelays
from tests.support.ledger import Ledger, record, wait_at
from tests.support.waiting import wait_until

KINDS = {"idempotent": (2, 3), "once": (4, 5)}
"""By kind the databases of its broker and of its store."""
HELD, OTHER = "held", "other"
idempotent_only = pytest.mark.parametrize("canvas", ["idempotent"], indirect=True)
AS_ROOT = {"C_FORCE_ROOT": "1"}  # workers that take pickles refuse to be root, which tests often are
TASKS: list[tuple[Callable[..., Any], Policy | None, dict[str, Any]]] = []
"""Each with the policy that it has where its kind is idempotent, if not the app's, and with its other options."""

QUICK: dict[str, Any] = {"lease": 10, "backoff": 0.2}


def task(policy: Policy | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a body, to be written to the ledger under the name of its test (`of`)."""

    def collect(body: Callable[..., Any]) -> Callable[..., Any]:
        TASKS.append((body, policy, options))
        return body

    return collect


def note(of: str, **details: Any) -> None:
    """Write down that the current task's body ran."""
    record("ran", of, **{"task": current_task.name, **details})


@task()
def add(self: Any, x: int, y: int, of: str) -> int:
    note(of, retries=self.request.retries)
    return x + y


@task()
def total(self: Any, numbers: list[int], of: str) -> int:
    note(of)
    return sum(numbers)


@task()
def say(self: Any, what: Any, of: str) -> Any:
    note(of, said=what)
    return what


@task()
def hold(self: Any, what: Any, of: str, gate: str) -> Any:
    """As `say`, and wait at a gate before the end."""
    note(of, said=what)
    wait_at(gate)
    return what


@task(ShortDelays(key="what", on_conflict="skip", **QUICK))
def hold_or_skip(self: Any, what: str, of: str, gate: str) -> str:
    """As `hold`, with a policy that drops a conflict that nothing waits for."""
    note(of)
    wait_at(gate)
    return what


@task()
def fail(self: Any, of: str) -> None:
    note(of)
    raise ValueError("as asked")


@task()
def mourn(self: Any, task_id: str, of: str) -> None:
    note(of, failed=task_id)


@task(bind=False)
def mourn_at_once(request: Any, error: BaseException, traceback: Any, of: str) -> None:
    note(of, task="mourn_at_once", failed=request.id)


@task()
def see(self: Any, of: str, name: str = "") -> dict[str, Any]:
    seen = what_is_seen(self.request)
    note(of, name=name, **seen)
    return seen


@task()
def see_after(self: Any, result: Any, of: str, name: str = "") -> dict[str, Any]:
    """As `see`, for a callback: with the result of the task before it."""
    seen = what_is_seen(self.request)
    note(of, name=name, result=result, **seen)
    return seen


def what_is_seen(request: Any) -> dict[str, Any]:
    names = ("id", "root_id", "parent_id", "retries", "shadow", "stamps")
    return {
        **{name: getattr(request, name) for name in names},
        "expires": bool(request.expires),
        "eta": bool(request.eta),
        "limits": list(request.timelimit or ()),
        "queue": request.delivery_info["routing_key"],
        "priority": request.delivery_info["priority"],
        "trace": (request.headers or {}).get("trace"),
    }


@task()
def become(self: Any, what: Mapping[str, Any], of: str) -> Any:
    """Let another signature take this task's place."""
    note(of, nesting=self.request.replaced_task_nesting)
    return self.replace(signature(dict(what), app=self.app))


@task()
def become_itself(self: Any, times: int, of: str) -> Any:
    note(of, times=times)
    if times:
        return self.replace(self.s(times - 1, of))
    return "done"


@task(max_retries=5)
def walk(self: Any, page: int, of: str, last: int = 3, seen: Any = ()) -> list[int]:
    """Go on with the next page by a retry with other arguments, and return all pages."""
    note(of, page=page, retries=self.request.retries)
    pages = [*seen, page]
    if page < last:
        raise self.retry(args=(page + 1, of), kwargs={"last": last, "seen": pages}, countdown=0)
    return pages


@task(ShortDelays(key="of", **QUICK), max_retries=5)
def walk_by_key(self: Any, page: int, of: str, last: int = 3) -> list[int]:
    """As `walk`, with other keywords only, and with a key that all pages share."""
    note(of, page=page, retries=self.request.retries)
    if page < last:
        raise self.retry(kwargs={"page": page + 1}, countdown=0)
    return [page]


@task(autoretry_for=(ConnectionError,), retry_backoff=False, default_retry_delay=0, max_retries=3)
def amend(self: Any, order: dict[str, Any], of: str) -> dict[str, Any]:
    """Write into its own argument, and fail twice after that."""
    note(of, order=dict(order), retries=self.request.retries)
    order["tries"] = order.get("tries", 0) + 1
    if self.request.retries < 2:
        raise ConnectionError("away")
    return order


@task(max_retries=1)
def retry_with(self: Any, of: str, options: dict[str, Any], eta_in: float | None = None) -> dict[str, Any]:
    """Retry once with these options; the result is what the second body sees."""
    seen = what_is_seen(self.request)
    note(of, **seen)
    if self.request.retries:
        return seen
    eta = None if eta_in is None else datetime.now(UTC) + timedelta(seconds=eta_in)
    raise self.retry(eta=eta, **options)


@task(max_retries=3)
def retry_on_the_side(self: Any, of: str) -> str:
    """Publish a retry and go on, in place of raising it."""
    note(of, retries=self.request.retries)
    if self.request.retries < 1:
        self.retry(countdown=0, throw=False)
        return "went on"
    return "came back"


@task(max_retries=1)
def recall(self: Any, what: dict[Any, Any], of: str) -> list[str]:
    """Retry once, and return the types of what came the second time."""
    note(of, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return sorted(f"{type(name).__name__}: {type(value).__name__}" for name, value in what.items())


@task()
def end_with(self: Any, error: str, of: str) -> None:
    note(of, error=error, redelivered=bool(self.request.delivery_info.get("redelivered")))
    if error == "Ignore":
        raise Ignore
    if error == "Reject":
        raise Reject("as asked", requeue=False)
    if error == "requeue" and not self.request.delivery_info.get("redelivered"):
        raise Reject("as asked", requeue=True)


def app_of(kind: str, server: str) -> Celery:
    """The app of one kind; `server` is the URL of a Redis without its database."""
    url, store = (f"{server}/{number}" for number in KINDS[kind])
    publish: Any = "once" if kind == "once" else "always"
    app = Celery("canvas", broker=url, backend=url, task_cls=IdempotentTask, set_as_current=False)
    app.conf.update(
        idempotency_store=store,
        idempotency_policy=ShortDelays(**QUICK, publish=publish),
        idempotency_grace=0.2,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        accept_content=["json", "pickle"],
    )
    for body, policy, options in TASKS:
        own = {} if policy is None else {"idempotent": replace(policy, publish=publish)}
        app.task(name=body.__name__, lazy=False, shared=False, **{"bind": True, **own, **options})(body)
    return app


class Canvas:
    """An app of one kind, seen from its publisher, with a worker that runs its tasks."""

    def __init__(self, kind: str, server: str) -> None:
        self.app = app_of(kind, server)
        self.ledger = Ledger(self.app.conf.result_backend)
        self._broker: Any = Redis.from_url(self.app.conf.broker_url, decode_responses=True)

    def __getattr__(self, name: str) -> Task:
        return self.app.tasks[name]

    def bodies(self, of: str) -> list[dict[str, Any]]:
        """What the bodies recorded that ran for `of`, oldest first."""
        return [row.details for row in self.ledger.rows("ran", of)]

    def wait_for_bodies(self, of: str, count: int) -> list[dict[str, Any]]:
        """As `bodies`, as soon as there are `count` of them."""
        return [row.details for row in self.ledger.wait_for("ran", count, of)]

    def held(self) -> dict[str, Any]:
        """The message that was published to the queue `held`, which no worker consumes."""
        message: dict[str, Any] = json.loads(wait_until(lambda: self._broker.lpop(HELD), "a message is held"))
        return message

    def deliver(self, message: dict[str, Any], copies: int = 1) -> None:
        """Deliver a message that was held, that many times."""
        queue = self.app.conf.task_default_queue
        for _ in range(copies):
            message["properties"]["delivery_tag"] = uuid4().hex
            # A retry goes where its message came from.
            message["properties"]["delivery_info"]["routing_key"] = queue
            self._broker.lpush(queue, json.dumps(message))

    def wait_for_ends(self, task_id: str, count: int) -> None:
        """Wait until so many deliveries of a task have ended with a result; those that were postponed do not count."""
        self.ledger.wait_for("succeeded", count, task_id)

    def close(self) -> None:
        """Close the connections."""
        # Results that nobody got would otherwise unsubscribe when they are collected, from a server that is gone.
        self.app.backend.result_consumer.subscribed_to.clear()
        self.ledger.close()
        self._broker.close()
        self.app.close()


def ran(canvas: Canvas, of: str) -> list[str]:
    """The names of the tasks whose bodies ran, in alphabetical order."""
    return sorted(body["task"] for body in canvas.bodies(of))


def got(result: Any) -> Any:
    """The result, waited for."""
    return result.get(timeout=60)


@contextmanager
def canvas_of(kind: str, server: str, folder: Path) -> Iterator[Canvas]:
    """A canvas with its worker running."""
    canvas, log = Canvas(kind, server), folder / "log"
    with closing(canvas), log.open("wb") as output:
        process = tether.start("tests.integration.canvas", kind, server, log=output, env=AS_ROOT)
        try:
            wait_until(lambda: b"ready." in log.read_bytes() or process.poll() is not None, "the worker is ready")
            assert process.poll() is None, log.read_text()
            yield canvas
        finally:
            tether.stop(process)


def witness_end(task_id: str, state: str, **other: Any) -> None:
    """Write down that a delivery ended with a result."""
    if state == SUCCESS:
        record("succeeded", task_id)


def work(kind: str, server: str) -> None:
    """Be the worker."""
    app = app_of(kind, server)
    app.set_default()
    task_postrun.connect(witness_end)
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    app.worker_main(
        ["worker", "-c", "2", "-Q", f"{app.conf.task_default_queue},{OTHER}", "-n", f"{kind}@%h", "-l", "INFO", *quiet]
    )


if __name__ == "__main__":
    work(*sys.argv[1:])
