"""Where things are, and the Celery settings that matter.

Nothing needs to be set: `python -m lab.demo.worker` embeds what the names below stand for.

| variable              | meaning                                                                |
|-----------------------|------------------------------------------------------------------------|
| `EXAMPLE_STORE`       | the idempotency store by name: `dynamodb` (default), `redis`,          |
|                       | `redis-cluster`, `postgres`, `mariadb`, `sqlite`                       |
| `EXAMPLE_BROKER`      | the broker by name: `sqs` (default), `redis`                           |
| `EXAMPLE_STORE_URL`   | a store of yours instead: `dynamodb://key:secret@dynamodb:8000/table`  |
| `EXAMPLE_BROKER_URL`  | a broker of yours instead: `sqs://key:secret@elasticmq:9324//`         |
| `EXAMPLE_AWS=real`    | `dynamodb` and `sqs` are the real ones in `AWS_REGION`, with boto3's   |
|                       | usual credentials; it costs money, and queue and table stay until you  |
|                       | delete them                                                            |
| `EXAMPLE_RESULTS_URL` | another result backend: `redis://redis:6379/0`; empty for none         |
| `EXAMPLE_FOLDER`      | where ledger, bank and results are written                             |
| `EXAMPLE_QUEUE`       | name of the queue                                                      |
| `EXAMPLE_FAULTS=1`    | inject the faults of `faults.py`                                       |
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lab.embedded import REGION
from lab.servers import BROKERS, STORES, TABLE, Servers

# The relations matter, not the values. They are short to make a demonstration quick.
LEASE = 3.0  # how long a killed worker's claim holds others off; a living worker renews it
BACKOFF = 0.5  # how soon, about, a message that met another claim comes back
# Longer than Celery may take to notice a killed child (5 s): kombu cannot return a message it holds too long.
VISIBILITY_TIMEOUT = 10
SLOW_BODY = 13.0  # longer than both: the broker redelivers a body that is still running


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that differs between a demo, two terminals, docker-compose and AWS."""

    broker_url: str
    store_url: str
    results_url: str
    folder: Path
    queue: str = "orders"
    faults: bool = False
    embedded_store: str = ""  # name of the store that the worker embeds; empty if it is elsewhere
    embedded_broker: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the variables in this module's docstring.

        Raises:
            SystemExit: A name is none of those in the table.
        """
        store = _choice(environ, "EXAMPLE_STORE", STORES)
        broker = _choice(environ, "EXAMPLE_BROKER", BROKERS)
        folder = Path(environ.get("EXAMPLE_FOLDER") or Path(tempfile.gettempdir()) / TABLE)
        embedded = Servers(store, broker, folder, fixed_ports=True)
        store_url, broker_url = environ.get("EXAMPLE_STORE_URL"), environ.get("EXAMPLE_BROKER_URL")
        if environ.get("EXAMPLE_AWS") == "real":
            store_url = store_url or (f"dynamodb://@{_region(environ)}/{TABLE}" if store == "dynamodb" else None)
            broker_url = broker_url or ("sqs://" if broker == "sqs" else None)
        return cls(
            broker_url=broker_url or embedded.broker_url,
            store_url=store_url or embedded.store_url,
            results_url=environ.get("EXAMPLE_RESULTS_URL", f"file://{folder}/results"),
            folder=folder,
            queue=environ.get("EXAMPLE_QUEUE", "orders"),
            faults=environ.get("EXAMPLE_FAULTS") == "1",
            embedded_store="" if store_url else store,
            embedded_broker="" if broker_url else broker,
        )

    def environ(self) -> dict[str, str]:
        """The variables that make a child process read these settings back."""
        return {
            "EXAMPLE_BROKER_URL": self.broker_url,
            "EXAMPLE_STORE_URL": self.store_url,
            "EXAMPLE_RESULTS_URL": self.results_url,
            "EXAMPLE_FOLDER": str(self.folder),
            "EXAMPLE_QUEUE": self.queue,
            "EXAMPLE_FAULTS": "1" if self.faults else "0",
        }

    def celery(self) -> dict[str, Any]:
        """The Celery configuration."""
        if self.results_url.startswith("file://"):
            # The file-system backend checks that its folder exists, and does not create it.
            Path(self.results_url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        return {
            "broker_url": self.broker_url,
            "result_backend": self.results_url or None,
            "idempotency_store": self.store_url,
            "task_default_queue": self.queue,
            # Acknowledge after the body, not before: a message acknowledged early is lost with its worker.
            "task_acks_late": True,
            # Without it Celery acknowledges the message of a killed child too: late, but just as lost.
            "task_reject_on_worker_lost": True,
            # A prefetched message ages too. Waiting behind a slow one it can outlive its visibility timeout.
            "worker_prefetch_multiplier": 1,
            "broker_transport_options": self._transport_options(),
            # SQS has neither fanout nor remote control: there is nobody to answer.
            "worker_enable_remote_control": False,
        }

    def _transport_options(self) -> dict[str, Any]:
        if self.broker_url.startswith("sqs:"):
            real = self.broker_url == "sqs://"
            return {
                "region": _region(os.environ) if real else REGION,
                "is_secure": real,
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
        return {}


def _choice(environ: Mapping[str, str], variable: str, choices: Sequence[str]) -> str:
    name = environ.get(variable) or choices[0]
    if name not in choices:
        raise SystemExit(f"{variable}={name}: there is no such choice; choose one of {', '.join(choices)}")
    return name


def _region(environ: Mapping[str, str]) -> str:
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or REGION
