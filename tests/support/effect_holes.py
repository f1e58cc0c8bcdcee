"""Tasks with one hole each, at the line that says so, and sound ones: what ``effect_coverage`` has to tell apart."""
# ruff: noqa: RET504 - a line after each block is what they are about

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from itertools import count
from typing import Any

from celery_idempotent import AtMostOnce, IdempotentTask, Policy, current_attempt
from tests.support import effect_helpers as helpers
from tests.support.deliveries import an_app
from tests.support.effect_receiver import Booking, Charging, charge, charge_once, slowly

app = an_app()
lock = threading.Lock()
holes: dict[str, Any] = {}
sound: dict[str, Any] = {}
others: dict[str, Any] = {}


def _task(places: dict[str, Any], name: str = "", **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def make(body: Callable[..., Any]) -> Any:
        usual = {"base": IdempotentTask, "idempotent": Policy(key="order"), "shared": False}
        called = body.__name__ = name or body.__name__.lstrip("_")
        places[called] = app.task(**{**usual, "name": f"holes.{called}", **options})(body)
        return places[called]

    return make


Pay = Callable[[str, str], None]


def _both(body: Callable[[str, Pay], Any]) -> None:
    """A hole where the receiver looks at no key, and sound where it does."""
    name = body.__name__.lstrip("_")
    _task(holes, name)(lambda order: body(order, charge))
    _task(sound, f"sound_{name}")(lambda order: body(order, charge_once))


@_both
def _loop(order: str, pay: Pay) -> None:
    for number in range(3):
        pay(order, f"{order}:{number}")  # hole: loop


@_both
def _finally_block(order: str, pay: Pay) -> str:
    try:
        found = order
    finally:
        pay(order, order)  # hole: finally_block
    return found


@_both
def _handler(order: str, pay: Pay) -> str:
    try:
        raise KeyError(order)
    except KeyError:
        pay(order, order)  # hole: handler
    return order


@_both
def _gather(order: str, pay: Pay) -> int:
    async def call(number: int) -> None:
        await asyncio.sleep(0)
        pay(order, f"{order}:{number}")  # hole: gather
        await asyncio.sleep(0)

    async def main() -> Any:
        return await asyncio.gather(*(call(each) for each in range(3)))

    return len(asyncio.run(main()))


@_both
def _generator(order: str, pay: Pay) -> int:
    def payments() -> Iterator[int]:
        with lock:
            for number in range(2):
                yield number
                pay(order, f"{order}:{number}")  # hole: generator

    total = 0
    for each in payments():
        total += each
    return total


@_both
def _suspended(order: str, pay: Pay) -> str:
    async def main() -> str:
        await slowly(partial(pay, order, order))  # hole: suspended
        return order

    return asyncio.run(main())


@_both
def _match_case(order: str, pay: Pay) -> str:
    match order.partition("-"):
        case [_, "-", _]:
            pay(order, order)  # hole: match_case
    return order


@_both
def _condition(order: str, pay: Pay) -> str:
    if pay(order, order) is None:  # type: ignore[func-returns-value] # hole: condition
        found = order
    return found


@_task(holes)
def _before_a_step(order: str) -> None:
    charge(order)  # hole: before_a_step
    current_attempt().step("mail", lambda step: None)


@_task(holes)
def _in_a_step(order: str) -> None:
    def call(step: Any) -> None:
        charge(order)  # hole: in_a_step

    current_attempt().step("charge", call)


@_task(holes)
def _in_a_lambda(order: str) -> str:
    current_attempt().step("charge", lambda step: charge(order))  # hole: in_a_lambda
    return order


@_task(holes)
def _after_a_step(order: str) -> str:
    current_attempt().step("mail", lambda step: None)
    charge(order)  # hole: after_a_step
    return order


@_task(holes)
def _helper_module(order: str) -> str:
    return helpers.charge_twice_removed(order)


def _inside(places: dict[str, Any], name: str, manager: Callable[[str], AbstractContextManager[None]]) -> None:
    @_task(places, name)
    def _(order: str) -> str:
        with manager(order):
            found = order
        return found


_inside(holes, "own_manager_entry", helpers.charged_on_entry)
_inside(holes, "own_manager_exit", helpers.charged_on_exit)
_inside(sound, "sound_manager", helpers.charged_with_key)


@_task(holes)
def _their_manager_entry(order: str) -> str:
    with Charging(order):  # hole: their_manager_entry
        found = order
    return found


@_task(holes)
def _their_manager_exit(order: str) -> str:
    with Booking(order):  # hole: their_manager_exit
        found = order
    return found


@_task(holes)
def _transaction(order: str) -> str:
    with Booking(order), lock:  # hole: transaction
        found = order
        found += ""
    return found


@_task(holes)
def _second_pass(order: str) -> None:
    for number in range(3):
        number == 1 and charge(order)  # type: ignore[func-returns-value] # hole: second_pass


@_task(holes)
def _swallowed(order: str) -> str:
    try:
        charge(order)  # hole: swallowed
        found = order
    except BaseException:  # noqa: BLE001 - that is the point
        found = "swallowed"
    return found


@_task(holes)
def _several_lines(order: str) -> str:
    charge(  # hole: several_lines
        order,
    )
    return order


def _decorated(body: Callable[[str], Any]) -> Callable[[str], Any]:
    @wraps(body)
    def wrapper(order: str) -> Any:
        charge(order)  # hole: decorator
        return body(order)

    return wrapper


@_task(holes)
@_decorated
def _decorator(order: str) -> str:
    return order


@_task(holes, base=app.Task, idempotent=None)
def _plain(order: str) -> str:
    charge(order)  # hole: plain
    return order


@_task(sound)
def _two_steps(order: str) -> None:
    for name in ("charge", "fee"):
        current_attempt().step(name, lambda step: charge_once(order, step.key))


_lines: dict[str, Callable[[str], Any]] = {
    "keyed_step": lambda order: current_attempt().step("charge", lambda step: charge_once(order, step.key)),
    "effect_key": lambda order: charge_once(order, current_attempt().effect_key("charge")),
    "own_key": lambda order: charge_once(order, order),
    "sound_partial": lambda order: partial(charge_once, order)(order),
    "sound_comprehension": lambda order: [charge_once(order, f"{order}:{each}") for each in "ab"],  # type: ignore[func-returns-value]
    "sound_nested": lambda order: (lambda: charge_once(order, order))(),
}
for _name, _body in _lines.items():
    _task(sound, _name)(_body)


@_task(sound)
def _sound_swallowed(order: str) -> str:
    try:
        charge_once(order, order)
        found = order
    except BaseException:  # noqa: BLE001 - that is the point
        charge(order)
        found = "swallowed"
    return found


@_task(sound)
def _compensated(order: str) -> str:
    ends = False
    try:
        charge_once(order, order)
        ends = True
    finally:
        if not ends:
            charge(order)
    return order


@_task(sound, bind=True)
def _sound_retry(task: Any, order: str) -> str:
    charge_once(order, order)
    if not task.request.retries:
        raise task.retry(countdown=0)
    return order


@_task(sound, bind=True, max_retries=1)
def _sound_request(task: Any, order: str) -> str:
    charge_once(order, task.name + order)
    return order


@_task(sound, base=app.Task, idempotent=None)
def _sound_plain(order: str) -> str:
    charge_once(order, order)
    return order


@_task(others, idempotent=Policy(key="order", effects={"charge": AtMostOnce()}))
def _at_most_once(order: str) -> None:
    current_attempt().step("charge", lambda step: charge(order))


@_task(others, base=app.Task, idempotent=None, acks_late=False)
def _early(order: str) -> str:
    return order if charge(order) is None else ""  # type: ignore[func-returns-value]


ends = count()


@_task(others)
def _locked(order: str) -> str:
    ended = False
    try:
        with lock:
            charge_once(order, order)
        ended = True
    except BaseException:
        charge(order)
        raise
    finally:
        if not ended:
            charge(order)
    return order


@_task(others)
def _seldom(order: str) -> str:
    charge_once(order, order)
    if next(ends) == 1:
        order = order.upper()
    return order


@_task(others)
def _threaded(order: str) -> None:
    thread = threading.Thread(target=charge_once, args=(order, order))
    thread.start()
    thread.join()


@_task(others)
def _failing(order: str) -> None:
    raise KeyError(order)
