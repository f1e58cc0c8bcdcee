"""The author's handlers are told of bodies: once for each, and never of a replay or a postponed delivery."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Task
from celery.signals import task_retry, task_success

from celery_idempotent import IdempotentMixin, IdempotentTask, Policy
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import ended
from celery_idempotent.protocol.record import Status
from tests.support.deliveries import Shop
from tests.support.scene import raising


def _telling(name: str, is_about: Callable[[Any], Any] = lambda given: type(given).__name__) -> Any:
    """A handler that notes its call, and what it is about."""
    return lambda self, given, *_: self.told.append(f"{name} {is_about(given)}".strip())


class Telling:
    """Notes which of its handlers are called."""

    told: list[str]
    before_start, on_success = (_telling(name, lambda given: "") for name in ("before_start", "on_success"))
    on_failure, on_retry, after_return = _telling("on_failure"), _telling("on_retry"), _telling("after_return", str)


class Above(Telling, IdempotentTask):
    """Handlers before the library's class."""


class Below(IdempotentMixin, Telling, Task):
    """And after it."""


START = ["before_start"]
SUCCESS = [*START, "on_success", "after_return SUCCESS"]
FAILURE = [*START, "on_failure LookupError", "after_return FAILURE"]
RETRY = [*START, "on_retry ConnectionError"]


def _told(shop: Shop, policy: Policy = Policy("order_id"), base: type[Task] = Above) -> list[str]:  # noqa: B008
    """What the handlers of the shop's task are told."""
    told: list[str] = []
    shop.charge = shop.task(policy, name="t", base=base, told=told)
    return told


def _complete_elsewhere(shop: Shop) -> None:
    shop.change(owner="other")
    value = Encoded("1", "application/json")
    done = ended(shop.record, Status.COMPLETED, 1, 10**15, "r", value)
    assert shop.memory.swap(done, "changed")


@pytest.mark.parametrize("base", [Above, Below])
@pytest.mark.parametrize(
    ("policy", "does", "told"),
    [
        (Policy("order_id"), lambda shop: "charged", SUCCESS),
        (Policy("order_id", remember=(LookupError,)), raising(LookupError()), FAILURE),
        (Policy("order_id", mode="observe"), lambda shop: "charged", SUCCESS * 3),
        (Policy("order_id", mode="off"), lambda shop: "charged", SUCCESS * 3),
        # The other's handlers are told of it.
        (Policy("order_id"), _complete_elsewhere, START),
        # Celery reports a failure; the effect has happened, so nobody is told to make up for it.
        (Policy("order_id"), lambda shop: object(), START),
    ],
    ids=["success", "failure", "observe", "off", "another's outcome", "not encodable"],
)
def test_duplicates_tell_nobody(base: type[Task], policy: Policy, does: Any, told: list[str]) -> None:
    """Three deliveries and one body: who counts money in ``on_success`` counts it once; unprotected, each is one."""
    shop = Shop()
    heard = _told(shop, policy, base)
    shop.does = lambda *_: does(shop)
    for _ in range(3):
        shop.deliver("o-1")
    assert heard == told


def test_refusals_of_the_library_and_ends_in_the_workers_main_process_are_told() -> None:
    """Nothing else tells the author that this call did not happen, or that a limit or a lost process ended it."""
    shop = Shop()
    told = _told(shop)
    shop.deliver("o-1", 500)
    told.clear()
    shop.deliver("o-1", 999)
    shop.charge.on_failure(TimeoutError(), "id", (), {}, None)
    assert told == ["on_failure KeyReused", "after_return FAILURE", "on_failure TimeoutError"]


def test_postponed_deliveries_tell_nobody_and_retries_of_the_body_are_told() -> None:
    """Celery's signals tell of a postponed one, with the reason, and of every delivery, which serves monitoring."""
    shop, reasons, results = Shop(), list[str](), list[Any]()
    told = _told(shop)

    def retried(reason: Any, **_: Any) -> None:
        reasons.append(type(reason.exc).__name__)

    def succeeded(result: Any, **_: Any) -> None:
        results.append(result)

    def charge(*_: Any) -> None:
        if len(shop.runs) == 1:
            raise shop.charge.retry(exc=ConnectionError(), countdown=0)

    shop.does = charge
    task_retry.connect(retried, sender=shop.charge)
    task_success.connect(succeeded, sender=shop.charge)
    shop.store.faults.extend(["request lost"] * 2)
    shop.deliver("o-1")
    task_retry.disconnect(retried, sender=shop.charge)
    assert (told, reasons) == ([], ["StoreUnavailable"])
    for _ in range(2):
        shop.redeliver()
    shop.deliver("o-1")
    task_success.disconnect(succeeded, sender=shop.charge)
    assert (told, results) == (RETRY + SUCCESS, [None, None])


def test_handlers_that_annotations_or_options_bring_are_told_of_bodies_only() -> None:
    """And those that are static, as any method may be, or no function and never get the task."""
    told: list[str] = []

    class Static(IdempotentTask):
        @staticmethod
        def before_start(*args: Any) -> None:
            told.append("static")

    shop = Shop(task_annotations={"t": {"on_success": lambda self, *args: told.append("annotated")}})
    shop.charge = shop.task(
        name="t", base=Static, after_return=partial(lambda note, state, *_: told.append(note + state), "option ")
    )
    for _ in range(3):
        shop.deliver("o-1")
    assert told == ["static", "annotated", "option SUCCESS"]
