"""Tasks with one hole each, at the line that says so, and sound ones: what ``effect_coverage`` has to tell apart."""
# ruff: noqa: RET504 - a line after each block is what they are about

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import count
from typing import Any

from celery_idempotent import AtMostOnce, IdempotentTask, Policy, current_attempt
from tests.support import effect_helpers as helpers
from tests.support.deliveries import an_app
from tests.support.effect_receiver import Charging, charge, charge_once

app = an_app()
holes: dict[str, Any] = {}
sound: dict[str, Any] = {}


def _task(places: dict[str, Any], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def make(body: Callable[..., Any]) -> Any:
        usual = {"base": IdempotentTask, "idempotent": Policy(key="order"), "shared": False}
        places[body.__name__] = app.task(**{**usual, "name": f"holes.{body.__name__}", **options})(body)
        return places[body.__name__]

    return make


def _step_key(order: str) -> Callable[[Any], None]:
    return lambda step: charge_once(order, step.key)


@_task(holes)
def before_a_step(order: str) -> None:
    """A hole before a step."""
    charge(order)  # hole: before_a_step
    current_attempt().step("mail", lambda step: None)


@_task(holes)
def in_a_step(order: str) -> None:
    """A hole in a step, which cannot know that its effect happened."""

    def call(step: Any) -> None:
        charge(order)  # hole: in_a_step

    current_attempt().step("charge", call)


@_task(holes)
def in_a_lambda(order: str) -> str:
    """A hole in the midst of a line."""
    current_attempt().step("charge", lambda step: charge(order))  # hole: in_a_lambda
    return order


@_task(holes)
def after_a_step(order: str) -> str:
    """A hole after a step, and nothing but a return behind it."""
    current_attempt().step("mail", lambda step: None)
    charge(order)  # hole: after_a_step
    return order


@_task(holes)
def helper_module(order: str) -> str:
    """A hole in another module."""
    return helpers.charge_twice_removed(order)


@_task(holes)
def own_manager_entry(order: str) -> str:
    """A hole in a context manager's first half."""
    with helpers.charged_on_entry(order):
        found = order
    return found


@_task(holes)
def own_manager_exit(order: str) -> str:
    """A hole in a context manager's second half."""
    with helpers.charged_on_exit(order):
        found = order
    return found


@_task(holes)
def their_manager_entry(order: str) -> str:
    """A hole in the entry of somebody else's context manager."""
    with Charging(order, "enter"):  # hole: their_manager_entry
        found = order
    return found


@_task(holes)
def their_manager_exit(order: str) -> str:
    """A hole in the exit of somebody else's context manager."""
    with Charging(order, "exit"):  # hole: their_manager_exit
        found = order
    return found


@_task(holes)
def loop(order: str) -> None:
    """A hole in each pass of a loop."""
    for _ in range(3):
        charge(order)  # hole: loop


@_task(holes)
def second_pass(order: str) -> None:
    """A hole in the second pass."""
    for number in range(3):
        if number == 1:
            charge(order)  # hole: second_pass


@_task(holes)
def finally_block(order: str) -> str:
    """A hole in ``finally``, which a dead process does not come to."""
    try:
        found = order
    finally:
        charge(order)  # hole: finally_block
    return found


@_task(holes)
def handler(order: str) -> str:
    """A hole in a handler."""
    try:
        raise KeyError(order)
    except KeyError:
        charge(order)  # hole: handler
    return order


@_task(holes)
def swallowed(order: str) -> str:
    """A hole in a body that swallows all there is to raise."""
    try:
        charge(order)  # hole: swallowed
        found = order
    except BaseException:  # noqa: BLE001 - that is the point
        found = "swallowed"
    return found


async def _pay(order: str) -> None:
    await asyncio.sleep(0)
    charge(order)  # hole: gather
    await asyncio.sleep(0)


@_task(holes)
def gather(order: str) -> int:
    """A hole in one of two coroutines."""

    async def main() -> Any:
        return await asyncio.gather(asyncio.sleep(0), _pay(order))

    return len(asyncio.run(main()))


def _payments(order: str) -> Iterator[int]:
    yield 1
    charge(order)  # hole: generator
    yield 2


@_task(holes)
def generator(order: str) -> int:
    """A hole between two yields."""
    return sum(_payments(order))


@_task(holes)
def several_lines(order: str) -> str:
    """A hole at a statement of several lines is told at its first."""
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
def decorator(order: str) -> str:
    """A hole in a decorator."""
    return order


@_task(holes)
def match_case(order: str) -> str:
    """A hole in a case."""
    match order.partition("-"):
        case [_, "-", _]:
            charge(order)  # hole: match_case
    return order


@_task(holes)
def condition(order: str) -> str:
    """A hole in the head of an ``if``."""
    if charge(order) is None:  # type: ignore[func-returns-value] # hole: condition
        found = order
    return found


@_task(holes, base=app.Task, idempotent=None)
def plain(order: str) -> str:
    """A hole in a task that knows nothing of this library."""
    charge(order)  # hole: plain
    return order


@_task(sound)
def keyed_step(order: str) -> None:
    """A step with its key."""
    current_attempt().step("charge", _step_key(order))


@_task(sound)
def effect_key(order: str) -> str:
    """An effect key without a step."""
    charge_once(order, current_attempt().effect_key("charge"))
    return order


@_task(sound)
def two_steps(order: str) -> None:
    """Two steps, each with its key."""
    for name in ("charge", "fee"):
        current_attempt().step(name, _step_key(order))


@_task(sound)
def own_key(order: str) -> str:
    """The order is the key."""
    charge_once(order, order)
    return order


@_task(sound)
def sound_manager(order: str) -> str:
    """A key in a context manager."""
    with helpers.charged_with_key(order, order):
        found = order
    return found


@_task(sound)
def sound_loop(order: str) -> None:
    """A key for each pass."""
    for number in range(3):
        charge_once(order, f"{order}:{number}")


@_task(sound)
def sound_finally(order: str) -> str:
    """A key in ``finally``."""
    try:
        found = order
    finally:
        charge_once(order, order)
    return found


@_task(sound)
def sound_handler(order: str) -> str:
    """A key in a handler."""
    try:
        raise KeyError(order)
    except KeyError:
        charge_once(order, order)
    return order


@_task(sound)
def sound_swallowed(order: str) -> str:
    """A key in a body that swallows all there is to raise."""
    try:
        charge_once(order, order)
        found = order
    except BaseException:  # noqa: BLE001 - that is the point
        charge(order)
        found = "swallowed"
    return found


@_task(sound)
def compensated(order: str) -> str:
    """A ``finally`` that would repeat the effect if a dead process came to it."""
    ends = False
    try:
        charge_once(order, order)
        ends = True
    finally:
        if not ends:
            charge(order)
    return order


async def _pay_with_key(order: str, number: int) -> None:
    await asyncio.sleep(0)
    charge_once(order, f"{order}:{number}")


@_task(sound)
def sound_gather(order: str) -> None:
    """Coroutines, each with its key."""

    async def main() -> None:
        await asyncio.gather(*(_pay_with_key(order, each) for each in range(3)))

    asyncio.run(main())


def _payments_with_keys(order: str) -> Iterator[int]:
    for number in range(2):
        charge_once(order, f"{order}:{number}")
        yield number


@_task(sound)
def sound_generator(order: str) -> int:
    """A key between two yields."""
    return sum(_payments_with_keys(order))


@_task(sound)
def sound_match(order: str) -> str:
    """A key in a case."""
    match order.partition("-"):
        case [_, "-", _]:
            charge_once(order, order)
    return order


@_task(sound)
def sound_condition(order: str) -> str:
    """A key in a condition."""
    return "yes" if charge_once(order, order) is None else "no"  # type: ignore[func-returns-value]


@_task(sound)
def sound_partial(order: str) -> None:
    """A key that a partial carries."""
    partial(charge_once, order)(order)


@_task(sound)
def sound_comprehension(order: str) -> int:
    """A key for each element."""
    return len([charge_once(order, f"{order}:{each}") for each in range(2)])  # type: ignore[func-returns-value]


@_task(sound)
def sound_nested(order: str) -> None:
    """A key in a nested function."""

    def pay() -> None:
        charge_once(order, order)

    pay()


@_task(sound, bind=True)
def sound_retry(task: Any, order: str) -> str:
    """A retry after the effect, which has a key."""
    charge_once(order, order)
    if not task.request.retries:
        raise task.retry(countdown=0)
    return order


@_task(sound, bind=True, max_retries=1)
def sound_request(task: Any, order: str) -> str:
    """The order as the key of a bound task."""
    charge_once(order, task.name + order)
    return order


@_task(sound, base=app.Task, idempotent=None)
def sound_plain(order: str) -> str:
    """A plain task with a key of its own."""
    charge_once(order, order)
    return order


@_task({}, idempotent=Policy(key="order", effects={"charge": AtMostOnce()}))
def at_most_once(order: str) -> None:
    """A step that is not made again."""
    current_attempt().step("charge", lambda step: charge(order))


@_task({}, base=app.Task, idempotent=None, acks_late=False)
def early(order: str) -> str:
    """A message that is acknowledged before its body."""
    return order if charge(order) is None else ""  # type: ignore[func-returns-value]


lock = threading.Lock()
ends = count()


@_task({})
def locked(order: str) -> str:
    """A body that holds a lock, and whose handlers have effects."""
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


@_task({})
def seldom(order: str) -> str:
    """A line that is come by once in a process, but not the first time."""
    charge_once(order, order)
    if next(ends) == 1:
        order = order.upper()
    return order


@_task({})
def threaded(order: str) -> None:
    """An effect in a thread."""
    thread = threading.Thread(target=charge_once, args=(order, order))
    thread.start()
    thread.join()


@_task({})
def failing(order: str) -> None:
    """No effect."""
    raise KeyError(order)
