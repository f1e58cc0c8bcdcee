"""A message as a worker received it, with what Celery's own request does not do for an idempotent task."""

import time
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from celery.worker.request import Request
from kombu.utils.functional import LRUCache

from celery_idempotent import clock
from celery_idempotent.errors import InFlight
from celery_idempotent.integration.broker.recovery import RecoversLease, mark
from celery_idempotent.integration.context import CONTENT_TYPE, whole_headers
from celery_idempotent.integration.headers import KEY_HEADER
from celery_idempotent.integration.messages.postpone import bounds
from celery_idempotent.integration.versions import has_quorum_queues

_APART, _CROWD = 0.03, 1.0
"""Seconds between the turns of equal messages that meet a running body, and after which more of them wait for it."""

_turns = LRUCache(limit=10_000)
"""When the next turn is, by the local clock."""


def _take_turn(crowd: int) -> float:
    """Seconds until it comes."""
    now = clock.monotonic()
    turn: float = max(now, _turns.get(crowd, now))
    _turns[crowd] = turn + _APART
    return turn - now


def _has_few_places(app: Celery) -> bool:
    """Whether what waits in a worker of ``app`` keeps all others out of it."""
    return has_quorum_queues(app) or bool(app.conf.get("worker_eta_task_limit"))


class IdempotentRequestMixin(RecoversLease):
    """Tells a pool process all headers and the content type of its message, which may wait until a crowd has passed."""

    is_received = True

    def __init__(self, message: Any, *args: Any, **options: Any) -> None:
        super().__init__(message, *args, **options)  # type: ignore[call-arg]  # of the class that this is mixed into
        mark(self.id, is_stopped=False)  # the same id may have been stopped before
        fields: dict[str, Any] = self._request_dict  # type: ignore[attr-defined]  # Celery's
        if "headers" in fields:
            fields["headers"] = whole_headers(fields)
        fields[CONTENT_TYPE] = message.content_type
        # Not by its key, which a function of the author's may tell: what looks alike by mistake is late, and no more.
        explicit = (fields.get("headers") or fields).get(KEY_HEADER)
        self._crowd = hash((fields["hostname"], self.task.name, message.body, str(explicit)))
        if self._is_crowded() and not _has_few_places(self.task.app):
            wait = min(_take_turn(self._crowd), *(each / 1000 for each in bounds(self.task)["bounds"]))
            turn = datetime.fromtimestamp(time.time() + wait, UTC)
            self._eta: datetime = max(turn, self._eta or turn)

    def _is_crowded(self) -> bool:
        return bool(_turns.get(self._crowd, 0.0) - clock.monotonic() > _CROWD)

    def on_retry(self, exc_info: Any) -> None:
        met = exc_info.exception.exc  # where there is no other process, billiard has wrapped Celery's exception
        if isinstance(getattr(met, "exc", met), InFlight) and not self._is_crowded():
            _take_turn(self._crowd)  # beyond that it does when it comes again
        super().on_retry(exc_info)  # type: ignore[misc]  # of the class that this is mixed into


class IdempotentRequest(IdempotentRequestMixin, Request):  # type: ignore[misc]  # Celery has no types
    """Celery's own, with what the mixin adds."""
