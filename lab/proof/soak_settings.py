"""What the soak and its programs agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.demo.settings import Settings

LEASE = 3.0
BACKOFF = 0.5
LONGEST_DELAY = 4.0

VISIBILITY_TIMEOUT = 4
"""Seconds. Most messages would come again that wait behind others, if nobody held them."""

TICK = 5
"""Seconds between two ticks of the schedule."""


def celery(settings: Settings) -> dict[str, Any]:
    """The Celery configuration, for everybody who may be the first to make a queue."""
    configuration = settings.celery() | {"idempotency_hold_messages": True}
    if "visibility_timeout" in configuration["broker_transport_options"]:
        configuration["broker_transport_options"]["visibility_timeout"] = VISIBILITY_TIMEOUT
    return configuration


def skew_file(folder: Path, worker: str) -> Path:
    """Where a worker finds by how many milliseconds its clock is wrong."""
    return folder / f"skew-{worker}"


def doom_file(folder: Path) -> Path:
    """While this file exists, the publisher dies when it is about to send a message."""
    return folder / "doom"
