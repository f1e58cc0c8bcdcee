"""In eager mode, too, a canvas of idempotent tasks does what one of Celery's tasks does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_idempotent import Policy
from tests.support.celeries import since_celery


class Tasks:
    """The tasks of an eager app of one kind, and what their bodies wrote down."""

    def __init__(tasks, task_cls: str) -> None:  # noqa: N805 - the bodies' own self is the task
        tasks.app = Celery("eager", task_cls=task_cls, set_as_current=False, broker="memory://")
        # Before 5.6, a chord needs a backend in eager mode, too.
        tasks.app.conf.update(task_always_eager=True, result_backend="cache+memory://", idempotency_store="memory://")
        tasks.app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
        tasks.ran: list[Any] = []
        task = partial(tasks.app.task, shared=False)
        by_key = {"idempotent": Policy(key="of")} if "idempotent" in task_cls else {}

        @task(name="add")
        def add(x: int, y: int) -> int:
            tasks.ran.append(("add", x, y))
            return x + y

        @task(name="total")
        def total(numbers: list[int]) -> int:
            tasks.ran.append(("total", *numbers))
            return sum(numbers)

        @task(name="fail")
        def fail() -> None:
            tasks.ran.append("fail")
            raise ValueError("as asked")

        @task(name="mourn")
        def mourn(request: Any, error: BaseException, traceback: Any) -> None:
            tasks.ran.append(("mourn", str(error)))

        @task(name="walk", bind=True, max_retries=5, **by_key)
        def walk(self: Any, of: str, page: int) -> int:
            tasks.ran.append(("walk", page, self.request.retries))
            if page < 3:
                args = () if of == "by name" else (of, page + 1)
                raise self.retry(args=args or None, kwargs={} if args else {"page": page + 1}, countdown=0)
            return page

        @task(name="amend", bind=True, autoretry_for=(ConnectionError,), default_retry_delay=0)
        def amend(self: Any, order: dict[str, int]) -> dict[str, int]:
            tasks.ran.append(("amend", dict(order)))
            order["tries"] = order.get("tries", 0) + 1
            if self.request.retries < 2:
                raise ConnectionError("away")
            return order

        @task(name="never", bind=True, max_retries=2)
        def never(self: Any) -> None:
            tasks.ran.append(("never", self.request.retries))
            raise self.retry(exc=KeyError("in vain"), countdown=0)

    def __getattr__(self, name: str) -> Any:
        return self.app.tasks[name]

    def steps(self) -> Any:
        """A chain with a group in it."""
        return chain(self.add.s(1, 2), self.add.s(3), group(self.add.s(4), self.add.s(5)), self.total.s())


CANVASES: dict[str, tuple[Callable[[Tasks], Any], int]] = {
    "chain": (lambda tasks: tasks.steps().delay().get(), 5),
    "chord": (lambda tasks: chord([tasks.steps(), tasks.add.s(9, 9)], tasks.total.s()).delay().get(), 7),
    "empty group": (lambda tasks: group([], app=tasks.app).apply_async().get(), 0),
    "empty chord": (lambda tasks: chord([], tasks.total.s()).apply_async().get(), 1),
    "link": (lambda tasks: tasks.add.apply_async((1, 1), link=tasks.add.s(2)).get(), 2),
    "link_error": (lambda tasks: tasks.fail.apply_async(link_error=tasks.mourn.s()).result, 2),
    "retry with other arguments": (lambda tasks: tasks.walk.delay("by place", 1).get(), 3),
    "retry with one argument": (lambda tasks: tasks.walk.delay("by name", 1).get(), 3),
    "retry of a body that changed its argument": (lambda tasks: tasks.amend.delay({"id": 7}).get(), 3),
    "retries that are used up": (lambda tasks: type(tasks.never.delay().result), 3),
    "map": (lambda tasks: tasks.total.map([[1, 2], [3, 4]]).apply_async().get(), 2),
    "starmap": (lambda tasks: tasks.add.starmap([(1, 2), (3, 4)]).apply_async().get(), 2),
    "chunks": (lambda tasks: tasks.add.chunks([(1, 2), (3, 4)], 1).apply_async().get(), 2),
}
SINCE = {"retry with one argument": since_celery("5.7", "a retry with one keyword")}


@pytest.mark.parametrize("name", [pytest.param(each, marks=SINCE.get(each, ())) for each in CANVASES])
def test_canvas_does_what_it_does_with_plain_tasks(name: str) -> None:
    """The same result, and each body as often, with the same arguments."""
    canvas, count = CANVASES[name]
    plain, idempotent = Tasks("celery.app.task:Task"), Tasks("celery_idempotent:IdempotentTask")
    assert repr(canvas(plain)) == repr(canvas(idempotent))
    assert (plain.ran, len(plain.ran)) == (idempotent.ran, count)
