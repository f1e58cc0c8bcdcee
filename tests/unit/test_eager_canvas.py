"""In eager mode, too, a canvas of idempotent tasks does what one of Celery's tasks does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_idempotent import Policy
from tests.support.celeries import since_celery


def tasks_of(task_cls: str) -> Any:
    """The tasks of an eager app of one kind, and in ``ran`` what their bodies wrote down."""
    app = Celery("eager", task_cls=task_cls, set_as_current=False, broker="memory://")
    # Before 5.6, a chord needs a backend in eager mode, too.
    app.conf.update(task_always_eager=True, result_backend="cache+memory://", idempotency_store="memory://")
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
    ran: list[Any] = []

    def add(x: int, y: int) -> int:
        ran.append(("add", x, y))
        return x + y

    def total(numbers: list[int]) -> int:
        ran.append(("total", *numbers))
        return sum(numbers)

    def fail() -> None:
        ran.append("fail")
        raise ValueError("as asked")

    def mourn(request: Any, error: BaseException, traceback: Any) -> None:
        ran.append(("mourn", str(error)))

    def walk(self: Any, of: str, page: int) -> int:
        ran.append(("walk", page, self.request.retries))
        if page < 3:
            args = () if of == "by name" else (of, page + 1)
            raise self.retry(args=args or None, kwargs={} if args else {"page": page + 1}, countdown=0)
        return page

    def amend(self: Any, order: dict[str, int]) -> dict[str, int]:
        ran.append(("amend", dict(order)))
        order["tries"] = order.get("tries", 0) + 1
        if self.request.retries < 2:
            raise ConnectionError("away")
        return order

    def never(self: Any) -> None:
        ran.append(("never", self.request.retries))
        raise self.retry(exc=KeyError("in vain"), countdown=0)

    options: dict[Callable[..., Any], dict[str, Any]] = {each: {} for each in (add, total, fail, mourn)}
    options[walk] = {"bind": True, "max_retries": 5}
    options[walk] |= {"idempotent": Policy(key="of")} if "idempotent" in task_cls else {}
    options[amend] = {"bind": True, "autoretry_for": (ConnectionError,), "default_retry_delay": 0}
    options[never] = {"bind": True, "max_retries": 2}
    made = {body.__name__: app.task(name=body.__name__, shared=False, **each)(body) for body, each in options.items()}
    return SimpleNamespace(app=app, ran=ran, **made)


def steps(tasks: Any) -> Any:
    """A chain with a group in it."""
    return chain(tasks.add.s(1, 2), tasks.add.s(3), group(tasks.add.s(4), tasks.add.s(5)), tasks.total.s())


CANVASES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "chain": (lambda tasks: steps(tasks).delay().get(), 5),
    "chord": (lambda tasks: chord([steps(tasks), tasks.add.s(9, 9)], tasks.total.s()).delay().get(), 7),
    "empty group": (lambda tasks: group([], app=tasks.app).apply_async().get(), 0),
    "empty chord": (lambda tasks: chord([], tasks.total.s()).apply_async().get(), 1),
    "link": (lambda tasks: tasks.add.apply_async((1, 1), link=tasks.add.s(2)).get(), 2),
    "link_error": (lambda tasks: tasks.fail.apply_async(link_error=tasks.mourn.s()).result, 2),
    "retry with other arguments": (lambda tasks: tasks.walk.delay("by place", 1).get(), 3),
    "retry with one argument": (lambda tasks: tasks.walk.delay("by name", 1).get(), 3),
    "retry of a body that changed its argument": (lambda tasks: tasks.amend.delay({"id": 7}).get(), 3),
    "retries that are used up": (lambda tasks: type(tasks.never.delay().result), 3),
    "map": (lambda tasks: tasks.total.map([[1, 2], [3, 4]]).apply_async().get(), 2),
    "chunks": (lambda tasks: tasks.add.chunks([(1, 2), (3, 4)], 1).apply_async().get(), 2),
}
SINCE = {"retry with one argument": since_celery("5.7", "a retry with one keyword")}


@pytest.mark.parametrize("name", [pytest.param(each, marks=SINCE.get(each, ())) for each in CANVASES])
def test_canvas_does_what_it_does_with_plain_tasks(name: str) -> None:
    """The same result, and each body as often, with the same arguments."""
    canvas, count = CANVASES[name]
    plain, idempotent = map(tasks_of, ("celery.app.task:Task", "celery_idempotent:IdempotentTask"))
    assert repr(canvas(plain)) == repr(canvas(idempotent))
    assert (plain.ran, len(plain.ran)) == (idempotent.ran, count)
