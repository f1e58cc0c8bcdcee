"""A message as a worker received it, with what Celery's own request does not do for an idempotent task."""

from typing import Any

from celery.worker.request import Request

from celery_idempotent.integration.broker.recovery import RecoversLease, mark
from celery_idempotent.integration.context import CONTENT_TYPE, whole_headers


class IdempotentRequestMixin(RecoversLease):
    """Tells a pool process all headers of the message, and its content type, so that it can be published again."""

    is_received = True

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        super().__init__(message, *args, **options)  # type: ignore[call-arg]  # of the class that this is mixed into
        mark(self.id, is_stopped=False)  # the same id may have been stopped before
        fields: dict[str, Any] = self._request_dict  # type: ignore[attr-defined]  # Celery's
        if "headers" in fields:
            fields["headers"] = whole_headers(fields)
        fields[CONTENT_TYPE] = message.content_type


class IdempotentRequest(IdempotentRequestMixin, Request):  # type: ignore[misc]  # Celery has no types
    """Celery's own, with what the mixin adds."""
