"""Bodies that return before they run are refused, at the earliest moment; wrappers that run them are not."""

import asyncio
import functools
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
from celery import Celery, states
from celery.result import AsyncResult
from kombu.exceptions import EncodeError

from celery_idempotent import IdempotentTask, Policy, PolicyError, Status
from celery_idempotent.integration.binding import body_signature, refuse_unfinished
from tests.support.deliveries import an_app, deliver


@pytest.fixture
def app() -> Celery:
    return an_app()


def _task(app: Celery, body: Any, **options: Any) -> Any:
    return app.task(base=IdempotentTask, shared=False, lazy=False, name="t", **options)(body)


async def charge(order_id: int) -> str:
    await asyncio.sleep(0)
    return f"charged {order_id}"


def lines(order_id: int) -> Iterator[int]:
    yield order_id


async def later_lines(order_id: int) -> Any:
    yield order_id


def run_by_asyncio(body: Callable[..., Any]) -> Callable[..., Any]:
    """A synchronous function of an ``async def``, in the way that many write it."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(body(*args, **kwargs))

    return run


def just_logged(body: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that forgets that what it wraps may be async."""

    @functools.wraps(body)
    def logged(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)

    return logged


def gathered(body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(body)
    def gather(order_id: int) -> list[Any]:
        return list(body(order_id))

    return gather


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}, {"pydantic": True}])
def test_a_synchronous_wrapper_of_an_async_body_is_a_body(app: Celery, options: dict[str, Any]) -> None:
    """It has run when it returns; its arguments are those of what it wraps."""
    task = _task(app, run_by_asyncio(charge), idempotent=Policy(key="order_id"), **options)

    assert deliver(task, 7).value == deliver(task, order_id=7).value == "charged 7"
    assert deliver(task, 8).value == "charged 8"


def test_a_synchronous_wrapper_of_a_generator_is_a_body(app: Celery) -> None:
    """So is one that makes a list of what a generator gives."""
    assert deliver(_task(app, gathered(lines)), 7).value == [7]


@contextmanager
def quietly() -> Iterator[None]:
    yield


class Tracing:
    """A decorator that is an object."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body
        functools.update_wrapper(self, body)

    async def __call__(self, order_id: int) -> Any:
        return await self.body(order_id)


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}, {"pydantic": True}, {"bind": True}])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (charge, r"^body=async def charge: .*test_bodies\.py, line \d+: an async body"),
        (later_lines, r"^body=async def later_lines: .*test_bodies\.py, line \d+: an async body"),
        (lines, r"^body=def lines: .*test_bodies\.py, line \d+: a generator"),
    ],
)
def test_a_body_that_returns_before_it_runs_is_refused_at_definition(
    app: Celery, body: Any, reason: str, options: dict[str, Any]
) -> None:
    """Under Celery's own wrappers, too."""
    with pytest.raises(PolicyError, match=f"{reason} runs only after its claim"):
        _task(app, body, **options)


@pytest.mark.parametrize("body", [Tracing(charge), contextmanager(lines), quietly()(charge)])
def test_what_hides_such_a_body_and_adds_nothing_is_refused_at_definition(app: Celery, body: Any) -> None:
    """An object that is called, and what contextlib puts around a function."""
    with pytest.raises(PolicyError, match="claim"):
        _task(app, body)


def return_a_helper(order_id: int) -> Any:
    return charge(order_id)


@pytest.mark.parametrize("body", [just_logged(charge), just_logged(lines), just_logged(later_lines), return_a_helper])
def test_a_body_that_returned_before_it_ran_is_not_completed(app: Celery, body: Any) -> None:
    """What looks like a plain function fails the delivery, and the claim is given back."""
    task = _task(app, body)

    ended = deliver(task, 7)

    assert ended.state == states.FAILURE
    assert isinstance(ended.value, PolicyError)
    assert "unfinished" in str(ended.value)
    assert app.conf.idempotency_store.get(task.idempotency_key_for(7)).status is Status.RELEASED


def test_a_direct_call_gives_what_the_body_returns(app: Celery) -> None:
    """It is a function call: whoever made it may await what it gives."""
    task = _task(app, return_a_helper)

    assert asyncio.run(task(7)) == "charged 7"


def _future() -> Any:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop.create_future()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: charge(7), "coroutine, .*asyncio.run"),
        (lambda: lines(7), "generator, .*return a list"),
        (lambda: (each for each in [7]), "generator, .*return a list"),
        (lambda: later_lines(7), "async_generator, .*return a list"),
        (_future, "Future, .*asyncio.run"),
    ],
)
def test_what_has_still_to_run_is_refused(value: Any, named: str) -> None:
    """The error names the task, what its body returned and what to write instead; nobody warns of it later."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(PolicyError, match=f"body=t: it returned an unfinished {named}"):
            refuse_unfinished(value(), "t")
        gc.collect()

    assert [str(each.message) for each in caught] == []


def test_what_had_begun_is_closed_whatever_it_does() -> None:
    """A generator that will not be closed is refused like any other."""

    def stubborn() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise ValueError("no")

    begun = stubborn()
    next(begun)

    with pytest.raises(PolicyError, match="generator"):
        refuse_unfinished(begun, "t")


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {"a": 1}, (1, 2), range(3), b"x", AsyncResult("id"), MagicMock(), charge, lines]
)
def test_what_is_a_result_passes(value: Any) -> None:
    """Nothing else is looked at, and nothing is called."""
    refuse_unfinished(value, "t")


def _bodies() -> dict[str, tuple[Any, str]]:
    def plain(order_id: int, cents: int = 1) -> None: ...

    def bound(self: Any, order_id: int) -> None: ...

    def injecting(order_id: int) -> None:
        plain(order_id, 5)

    def passing(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)

    def told(*args: Any, **kwargs: Any) -> None: ...

    def partly(self: Any, *args: Any, **kwargs: Any) -> None: ...

    told.__signature__ = inspect.signature(injecting)  # type: ignore[attr-defined]
    return {
        "plain": (plain, "(order_id: int, cents: int = 1) -> None"),
        "bound": (bound, "(order_id: int) -> None"),
        "passes on": (functools.wraps(plain)(passing), "(order_id: int, cents: int = 1) -> None"),
        "adds an argument": (functools.wraps(plain)(injecting), "(order_id: int) -> None"),
        "says what it takes": (functools.wraps(plain)(told), "(order_id: int) -> None"),
        "passes on, bound": (functools.wraps(bound)(partly), "(order_id: int) -> None"),
        "around one of C": (
            functools.wraps(functools.lru_cache(plain))(passing),
            "(order_id: int, cents: int = 1) -> None",
        ),
    }


@pytest.mark.parametrize("name", _bodies())
def test_signature_is_that_of_the_outermost_wrapper_that_names_its_arguments(app: Celery, name: str) -> None:
    """That is what a caller passes: a decorator may give the body arguments that no message has."""
    body, expected = _bodies()[name]
    bound = "bound" in name

    assert str(body_signature(type(_task(app, body, bind=bound)))) == expected


def test_a_decorator_that_adds_an_argument_does_not_shift_the_others(app: Celery) -> None:
    """A key read by the body's own names would take the amount for the order."""

    def with_session(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(order_id: int, cents: int = 100) -> Any:
            return body("session", order_id, cents)

        return run

    def book(session: str, order_id: int, cents: int = 100) -> str:
        return f"{order_id} {cents}"

    task = _task(app, with_session(book), idempotent=Policy(key="order_id"))

    assert [deliver(task, 7, 50).value, deliver(task, 8, 50).value] == ["7 50", "8 50"]


def test_observing_changes_nothing_of_what_a_body_returns(app: Celery) -> None:
    """A task that is only observed fails where plain Celery does, by what it cannot encode, and not by ours."""
    task = _task(app, just_logged(lines), idempotent=Policy(mode="observe"))
    plain = an_app().task(shared=False, lazy=False)(just_logged(lines))

    assert type(deliver(task, 7).value) is type(deliver(plain, 7).value) is EncodeError
