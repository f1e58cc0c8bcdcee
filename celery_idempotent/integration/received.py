"""A message as a worker received it, with what Celery's own request does not do for an idempotent task."""

from typing import Any

from celery.worker.request import Request

from celery_idempotent.integration.arrivals import CONTENT_TYPE
from celery_idempotent.integration.recovery import RecoversLease


class ReceivedMixin(RecoversLease):
    """Tells a pool process the message's content type, so that it can be published again in it."""

    is_received = True

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        super().__init__(message, *args, **options)  # type: ignore[call-arg]  # of the class that this is mixed into
        told: dict[str, Any] = self._request_dict  # type: ignore[attr-defined]  # Celery's
        told[CONTENT_TYPE] = message.content_type


class Received(ReceivedMixin, Request):  # type: ignore[misc]  # Celery has no types
    """Celery's own, with what the mixin adds."""
