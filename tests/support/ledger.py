"""What the tasks really did, written where a test can read it whatever happened to the worker.

The worker gets this file as a copy beside its tasks.
The ledger has no unique constraint: an effect that happened twice stands there twice.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

from celery import current_app, current_task
from redis import Redis

from tests.support.waiting import wait_until

ROWS = "ledger"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that a task did."""

    kind: str
    key: str
    task_id: str
    worker: str
    pid: int
    at: float
    token: int = 0
    attempt: int = 0
    details: dict[str, Any]


class Ledger:
    """The ledger and the gates of one test, in its result backend."""

    def __init__(self, url: str) -> None:
        self._redis = cast(Any, Redis.from_url(url, decode_responses=True))

    def append(self, row: Row) -> None:
        """Add a row."""
        self._redis.rpush(ROWS, json.dumps(asdict(row)))

    def rows(self, kind: str, key: str | None = None) -> list[Row]:
        """The rows of one kind, oldest first."""
        rows = [Row(**json.loads(line)) for line in self._redis.lrange(ROWS, 0, -1)]
        return [row for row in rows if row.kind == kind and key in (None, row.key)]

    def wait_for(self, kind: str, count: int = 1, key: str | None = None) -> list[Row]:
        """The rows of one kind, as soon as there are `count` of them."""

        def enough() -> list[Row]:
            rows = self.rows(kind, key)
            return rows if len(rows) >= count else []

        return wait_until(enough, f"{count} x {kind} of {key or 'any key'}")

    def open(self, gate: str) -> None:
        """Let every task pass that waits or will wait at the gate."""
        self._redis.set(f"gate:{gate}", "open")

    def pass_through(self, gate: str) -> None:
        """Wait until the test opens the gate."""
        wait_until(lambda: self._redis.exists(f"gate:{gate}"), f"gate {gate} opens", timeout=100)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def current_ledger() -> Ledger:
    """The ledger of the worker that calls."""
    return Ledger(current_app.conf.result_backend)


def record(kind: str, key: str, *, token: int = 0, attempt: int = 0, **details: Any) -> None:
    """Write down that the running task did something."""
    request = current_task.request
    row = Row(
        kind=kind,
        key=key,
        task_id=request.id,
        worker=request.hostname,
        pid=os.getpid(),
        at=time.monotonic(),
        token=token,
        attempt=attempt,
        details=details,
    )
    current_ledger().append(row)


def wait_at(gate: str) -> None:
    """Hold the running task until the test opens the gate."""
    current_ledger().pass_through(gate)
