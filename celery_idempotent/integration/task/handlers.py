"""The author's handlers belong to the body: Celery calls them for what a body did, not for what the library does.

::

    before_start                        with the body: after the claim, before its first line
    on_success                          the body's result was recorded
    on_failure                          the body failed, or the library refused to run it, as by KeyReused
    on_retry                            the body asked for a retry
    after_return                        after on_success and on_failure

A replay, a postponed delivery and a body whose outcome another attempt recorded tell none of them: who counts money in
``on_success`` counts it once. Celery's signals tell every delivery, as they serve monitoring.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from celery import Task
from celery.states import FAILURE

from celery_idempotent.integration.context import DeliveryContext, arrival_of


def _not_answered(arrival: DeliveryContext, *args: Any) -> bool:
    return not arrival.is_answered


def _failed(arrival: DeliveryContext, *args: Any) -> bool:
    # What Celery cannot encode as a result is a failure to Celery; the effect has happened, and is recorded.
    return not arrival.is_answered and not arrival.is_completed


_IS_TOLD: Mapping[str, Callable[..., bool]] = {
    "before_start": lambda arrival, *args: arrival.body_began,
    "on_success": _not_answered,
    "on_failure": _failed,
    "on_retry": _not_answered,
    "after_return": lambda arrival, status, *args: (_failed if status == FAILURE else _not_answered)(arrival),
}


def tell_of_bodies_only(cls: type) -> None:
    """Have the handlers of ``cls``, wherever they are defined, called for bodies only; safe to repeat."""
    for name, is_told in _IS_TOLD.items():
        handler = inspect.getattr_static(cls, name, None)
        if (
            handler is not None
            and handler is not vars(Task)[name]
            and getattr(handler, "_of_bodies", None) is not handler
        ):
            setattr(cls, name, _told_if(is_told, handler))


def _told_if(is_told: Callable[..., bool], handler: Any) -> Callable[..., Any]:
    @wraps(handler)
    def told(self: Task, *args: Any, **kwargs: Any) -> Any:
        arrival = arrival_of(self.request)
        if arrival is None or is_told(arrival, *args):
            return handler.__get__(self, type(self))(*args, **kwargs)
        return None

    told._of_bodies = told  # type: ignore[attr-defined]
    return told
