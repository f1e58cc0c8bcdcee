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
from celery.result import AsyncResult
from kombu.exceptions import EncodeError

from celery_idempotent import Policy, PolicyError, Status
from celery_idempotent.integration.binding import body_signature, refuse_unfinished
from tests.support.deliveries import Ended, Shop, an_app, deliver

ORDER = Policy("order_id")


async def charge(order_id: int) -> str:
    await asyncio.sleep(0)
    return f"charged {order_id}"


def lines(order_id: int) -> Iterator[int]:
    yield order_id


async def later_lines(order_id: int) -> Any:
    yield order_id


def around(run: Callable[[Any], Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does something with what it has called."""

    @functools.wraps(body)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(body(*args, **kwargs))

    return wrapper


def just_logged(body: Callable[..., Any]) -> Callable[..., Any]:
    """One that forgets that what it wraps may be async."""
    return around(lambda called: called, body)


@contextmanager
def quietly() -> Iterator[None]:
    yield


class Tracing:
    async def __call__(self, order_id: int) -> str:
        return await charge(order_id)


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}, {"pydantic": True}])
@pytest.mark.parametrize(
    ("body", "result"),
    [(around(asyncio.run, charge), "charged 7"), (around(list, lines), [7])],
    ids=["of an async body", "of a generator"],
)
def test_a_synchronous_wrapper_is_a_body(shop: Shop, body: Any, result: Any, options: dict[str, Any]) -> None:
    """It has run when it returns; its arguments are those of what it wraps."""
    task = shop.task(ORDER, body, "t", **options)
    assert deliver(task, 7) == deliver(task, order_id=7) == Ended("SUCCESS", result)
    assert task.idempotency_key_for(7) == task.idempotency_key_for(order_id=7) != task.idempotency_key_for(8)


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}, {"pydantic": True}, {"bind": True}])
@pytest.mark.parametrize("body", [charge, later_lines, lines], ids=["async", "async generator", "generator"])
def test_body_returning_before_it_runs_is_refused_at_definition(shop: Shop, body: Any, options: dict[str, Any]) -> None:
    """Under Celery's own wrappers, too; the error says where the body was written."""
    with pytest.raises(PolicyError) as raised:
        shop.task(None, body, "t", **options)
    kind = f"{'def' if body is lines else 'async def'} {body.__name__}"
    assert (raised.value.option, raised.value.value) == ("body", kind)
    assert f"{__file__}, line {body.__code__.co_firstlineno}: " in raised.value.remedy


def test_what_hides_such_a_body_and_adds_nothing_is_refused_at_definition(shop: Shop) -> None:
    """An object that is called, and what contextlib puts around a function."""
    for body in (functools.update_wrapper(Tracing(), charge), contextmanager(lines), quietly()(charge)):
        with pytest.raises(PolicyError, match="body="):
            shop.task(None, body, "t")


@pytest.mark.parametrize("body", [just_logged(charge), just_logged(lines), just_logged(later_lines)])
def test_a_body_that_returned_before_it_ran_is_not_completed(shop: Shop, body: Any) -> None:
    """What looks like a plain function fails the delivery, and the claim is given back."""
    shop.charge = shop.task(body=body, name="t")
    ended = shop.deliver(7)
    assert (ended.state, ended.value.option, shop.record.status) == ("FAILURE", "body", Status.RELEASED)


def test_direct_calls_and_observing_change_nothing_of_what_a_body_returns(shop: Shop) -> None:
    """Whoever calls a function may await what it gives; an observed task fails where plain Celery does, and alike."""
    assert asyncio.run(shop.task(None, just_logged(charge), "t")(7)) == "charged 7"
    task = shop.task(Policy(mode="observe"), just_logged(lines), "observed")
    plain = an_app().task(shared=False, lazy=False)(just_logged(lines))
    assert type(deliver(task, 7).value) is type(deliver(plain, 7).value) is EncodeError


def _future() -> Any:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop.create_future()


def _stubborn() -> Iterator[int]:
    """A generator that will not be closed."""
    try:
        yield 1
    finally:
        raise ValueError("no")


def _begun() -> Iterator[int]:
    begun = _stubborn()
    next(begun)
    return begun


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: charge(7), "coroutine, .*asyncio.run"),
        (lambda: lines(7), "generator, .*return a list"),
        (lambda: later_lines(7), "async_generator, .*return a list"),
        (_future, "Future, .*asyncio.run"),
        (_begun, "generator, .*return a list"),
    ],
)
def test_what_has_still_to_run_is_refused(value: Any, named: str) -> None:
    """The error names the task, what its body returned and what to write instead; nobody warns of it later."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(PolicyError, match=f"body=t: .* unfinished {named}"):
            refuse_unfinished(value(), "t")
        gc.collect()
    assert caught == []


@pytest.mark.parametrize(
    "value", [None, 0, "", [], {"a": 1}, (1, 2), range(3), b"x", AsyncResult("id"), MagicMock(), charge, lines]
)
def test_what_is_a_result_passes(value: Any) -> None:
    """Nothing else is looked at, and nothing is called."""
    refuse_unfinished(value, "t")


def plain(order_id: int, cents: int = 1) -> None: ...
def bound(self: Any, order_id: int) -> None: ...
def passing(*args: Any, **kwargs: Any) -> None: ...
def partly(self: Any, *args: Any, **kwargs: Any) -> None: ...
def told(*args: Any, **kwargs: Any) -> None: ...
def injecting(order_id: int) -> None: ...


told.__signature__ = inspect.signature(injecting)  # type: ignore[attr-defined]
OF_PLAIN, OF_ORDER = "(order_id: int, cents: int = 1) -> None", "(order_id: int) -> None"


@pytest.mark.parametrize(
    ("body", "bind", "expected"),
    [
        (plain, False, OF_PLAIN),
        (bound, True, OF_ORDER),
        (functools.wraps(plain)(passing), False, OF_PLAIN),
        (functools.wraps(plain)(injecting), False, OF_ORDER),
        (functools.wraps(plain)(told), False, OF_ORDER),
        (functools.wraps(bound)(partly), True, OF_ORDER),
    ],
    ids=["plain", "bound", "passes on", "adds an argument", "says what it takes", "passes on, bound"],
)
def test_signature_is_that_of_the_outermost_wrapper_that_names_its_arguments(
    shop: Shop, body: Any, bind: bool, expected: str
) -> None:
    """That is what a caller passes: a decorator may give the body arguments that no message has."""
    assert str(body_signature(type(shop.task(body=body, name="t", bind=bind)))) == expected
    around_one_of_c = functools.wraps(functools.lru_cache(plain))(lambda *args, **kwargs: None)
    assert str(body_signature(type(shop.task(body=around_one_of_c, name="c")))) == OF_PLAIN
