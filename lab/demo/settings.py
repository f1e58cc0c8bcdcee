"""Where things are, and the Celery settings that matter, for every process of a column."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lab.embedded import REGION

# The relations matter, not the values. They are short to make a demonstration quick.
LEASE = 3.0  # how long a killed worker's claim holds others off; a living worker renews it
BACKOFF = 0.5  # how soon, about, a message that met another claim comes back
# Longer than Celery may take to notice a killed child (5 s): kombu cannot return a message it holds too long.
VISIBILITY_TIMEOUT = 10
SLOW_BODY = 13.0  # longer than both: the broker redelivers a body that is still running

_VARIABLES = {each: f"LAB_{each.upper()}" for each in ("broker_url", "store_url", "folder", "queue", "lease")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What its processes need to know of a column."""

    broker_url: str
    store_url: str
    folder: Path
    queue: str = "orders"
    lease: float = LEASE

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        found: Any = {name: environ[variable] for name, variable in _VARIABLES.items()}
        return cls(**{**found, "folder": Path(found["folder"]), "lease": float(found["lease"])})

    def environ(self) -> dict[str, str]:
        """The variables that make a child process read these settings back."""
        return {variable: str(getattr(self, name)) for name, variable in _VARIABLES.items()}

    def celery(self) -> dict[str, Any]:
        return {
            "broker_url": self.broker_url,
            "result_backend": None,  # the ledger knows more
            "idempotency_store": self.store_url,
            "task_default_queue": self.queue,
            # Acknowledge after the body, not before: a message acknowledged early is lost with its worker.
            "task_acks_late": True,
            # Without it Celery acknowledges the message of a killed child too: late, but just as lost.
            "task_reject_on_worker_lost": True,
            # A prefetched message ages too. Waiting behind a slow one it can outlive its visibility timeout.
            "worker_prefetch_multiplier": 1,
            # What becomes of a message that comes again is what is shown here: so a body that outlives the visibility
            # timeout does not have its message held.
            "idempotency_hold_messages": False,
            "broker_transport_options": self._transport_options(),
            # SQS has neither fanout nor remote control: there is nobody to answer.
            "worker_enable_remote_control": False,
            # Celery ends a worker otherwise whose channel RabbitMQ has closed, as it does after half an hour's work.
            "broker_channel_error_retry": True,
        }

    def _transport_options(self) -> dict[str, Any]:
        if self.broker_url.startswith("sqs:"):
            return {
                "region": REGION,
                "is_secure": False,
                # SQS redelivers what is not acknowledged by then. In production: longer than any body.
                "visibility_timeout": VISIBILITY_TIMEOUT,
                # Long polling; also the delay after which a rejected message comes back.
                "wait_time_seconds": 1,
                # The pause before kombu asks again after its prefetch window was full. The default of 1 s
                # limits a worker to concurrency x prefetch_multiplier tasks per second.
                "polling_interval": 0,
            }
        if self.broker_url.startswith("redis"):
            return {
                # Redis itself redelivers nothing: workers look for messages unacknowledged for so long.
                "visibility_timeout": VISIBILITY_TIMEOUT,
                # A worker looks every so many seconds, and every so many times it really does. By default: 10 x 10.
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
                # One looks at a time; how long the others wait for one that died over it. By default 300 s.
                "unacked_mutex_expire": 5,
            }
        # RabbitMQ drops a publish silently otherwise, if it cannot take it or dies.
        return {"confirm_publish": True}
