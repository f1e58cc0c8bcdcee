"""What the soak and its workers agree on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BACKOFF", "BACKOFF_MAX", "LEASE", "skew_file"]

LEASE = 3.0
BACKOFF = 0.5
BACKOFF_MAX = 4.0


def skew_file(folder: Path, worker: str) -> Path:
    """Where a worker finds by how many milliseconds its clock is wrong."""
    return folder / f"skew-{worker}"
