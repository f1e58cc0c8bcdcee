"""In eager mode, too, a canvas of idempotent tasks does what one of Celery's tasks does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Retry
from celery.result import EagerResult

from celery_idempotent import Policy
from tests.support.celeries import since_celery

TASK_CLASS = {"plain": "celery.app.task:Task", "idempotent": "celery_idempotent:IdempotentTask"}


class Tasks:
    """The tasks of an eager app of one kind, and what their bodies wrote down."""

    def __init__(tasks, kind: str) -> None:  # noqa: N805 - the bodies' own self is the task
        tasks.app = app = Celery("eager", task_cls=TASK_CLASS[kind], set_as_current=False, broker="memory://")
        app.conf.update(
            task_always_eager=True,
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            idempotency_store="memory://",
            result_backend="cache+memory://",  # before 5.6, a chord needs one in eager mode, too
        )
        tasks.ran: list[Any] = []
        task = partial(app.task, shared=False)
        by_key = {} if kind == "plain" else {"idempotent": Policy(key="of")}

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

        @task(name="walk", bind=True, max_retries=5)
        def walk(self: Any, page: int, last: int = 3) -> int:
            tasks.ran.append(("walk", page, self.request.retries))
            if page < last:
                raise self.retry(args=(page + 1,), kwargs={"last": last}, countdown=0)
            return page

        @task(name="walk_by_key", bind=True, max_retries=5, **by_key)
        def walk_by_key(self: Any, of: str, page: int) -> int:
            tasks.ran.append(("walk", page, self.request.retries))
            if page < 3:
                raise self.retry(kwargs={"page": page + 1}, countdown=0)
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


@pytest.fixture(params=TASK_CLASS)
def tasks(request: pytest.FixtureRequest) -> Tasks:
    """Tasks of each kind."""
    return Tasks(request.param)


def test_chains_groups_and_chords_give_their_results(tasks: Tasks) -> None:
    """Alone and one in the other, each body once."""
    steps = chain(tasks.add.s(1, 2), tasks.add.s(3), group(tasks.add.s(4), tasks.add.s(5)), tasks.total.s())
    assert steps.delay().get() == 21
    assert chord([steps, tasks.add.s(9, 9)], tasks.total.s()).delay().get() == 39
    ran = [("add", 1, 2), ("add", 3, 3), ("add", 6, 4), ("add", 6, 5), ("total", 10, 11)]
    assert set(tasks.ran) == {*ran, ("add", 9, 9), ("total", 21, 18)}


def test_empty_canvases_end(tasks: Tasks) -> None:
    """No member is no failure."""
    assert group([], app=tasks.app).apply_async().get() == []
    assert chord([], tasks.total.s()).apply_async().get() == 0


def test_links_run_after_their_task(tasks: Tasks) -> None:
    """With its result, or with its failure."""
    assert tasks.add.apply_async((1, 1), link=tasks.add.s(2)).get() == 2
    failed = tasks.fail.apply_async(link_error=tasks.mourn.s())
    assert isinstance(failed.result, ValueError)
    assert tasks.ran == [("add", 1, 1), ("add", 2, 2), "fail", ("mourn", "as asked")]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("walk", (1,)), pytest.param("walk_by_key", ("o", 1), marks=since_celery("5.7", "a retry with one keyword"))],
)
def test_each_retry_with_other_arguments_runs_the_body(tasks: Tasks, name: str, arguments: tuple[Any, ...]) -> None:
    """And the last result is the task's."""
    assert getattr(tasks, name).delay(*arguments).get() == 3
    assert tasks.ran == [("walk", 1, 0), ("walk", 2, 1), ("walk", 3, 2)]


def test_an_automatic_retry_repeats_a_body_that_changed_its_argument(tasks: Tasks) -> None:
    """With the argument as the body left it."""
    assert tasks.amend.delay({"id": 7}).get() == {"id": 7, "tries": 3}
    assert tasks.ran == [("amend", {"id": 7}), ("amend", {"id": 7, "tries": 1}), ("amend", {"id": 7, "tries": 2})]


def test_a_task_that_uses_up_its_retries_fails_with_its_error(tasks: Tasks) -> None:
    """As `max_retries` says."""
    result: EagerResult = tasks.never.delay()
    assert isinstance(result.result, (KeyError, Retry))
    assert tasks.ran == [("never", 0), ("never", 1), ("never", 2)]


@pytest.mark.parametrize("how", ["map", "starmap", "chunks"])
def test_maps_run_every_item(tasks: Tasks, how: str) -> None:
    """In order, with one result."""
    if how == "map":
        assert tasks.total.map([[1, 2], [3, 4]]).apply_async().get() == [3, 7]
    elif how == "starmap":
        assert tasks.add.starmap([(1, 2), (3, 4)]).apply_async().get() == [3, 7]
    else:
        assert tasks.add.chunks([(1, 2), (3, 4)], 1).apply_async().get() == [[3], [7]]
