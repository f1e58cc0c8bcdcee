"""Whether a worker grows: the resident size of one process over a million tasks."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from lab import tether
from lab.benchmarks.own_code import Tracers
from lab.benchmarks.report import Goal, Grid, Section

__all__ = ["SAMPLES", "Forgetful", "growth", "measure", "resident_bytes", "run_tasks"]

SAMPLES = 10
_MOST = 1.05
_FIRST = 1
"""The sample that the last one is compared to: by then, allocators and caches have what they keep."""

_KEPT = 1_000
"""Records that the store keeps: the last ones."""


class Forgetful(MemoryStore):
    """A store that keeps the last thousand records, as a server would keep all of them somewhere else."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """As the store's, and forgets the oldest."""
        stored = super().swap(new, expected)
        while len(self._records) > _KEPT:
            del self._records[next(iter(self._records))]
        return stored


@dataclass(slots=True)
class _Messages:
    """What a week brings: mostly new orders, some duplicates, and what strangers put into headers."""

    tracers: Tracers = field(default_factory=lambda: Tracers(Forgetful()))

    def deliver(self, number: int) -> None:
        """Deliver message ``number``, and every tenth twice."""
        headers = {"headers": {f"x-stranger-{number}": number, "x-trace": f"trace-{number}"}}
        deliver = self.tracers.delivery("idempotent", number, headers)
        deliver()
        if number % 10 == 0:
            deliver()


def resident_bytes() -> int:
    """What this process holds in memory now."""
    return int(psutil.Process().memory_info().rss)


def run_tasks(count: int, tell: Callable[[int], None]) -> None:
    """Run ``count`` tasks in this process, telling the resident size :data:`SAMPLES` times."""
    messages = _Messages()
    for number in range(1, count + 1):
        messages.deliver(number)
        if number % (count // SAMPLES) == 0:
            tell(resident_bytes())


def growth(samples: Sequence[int]) -> float:
    """The last sample in terms of that which was taken after two tenths.

    Raises:
        ValueError: There are too few.
    """
    if len(samples) != SAMPLES:
        raise ValueError(f"{len(samples)} samples instead of {SAMPLES}")
    return samples[-1] / samples[_FIRST]


def measure(tasks: int, progress: Callable[[], None]) -> Section:
    """Run ``tasks`` in a process of their own, calling ``progress`` after each tenth."""
    samples = _sampled(tasks, progress)
    grown = growth(samples)
    step = tasks // SAMPLES
    columns = ("", *(f"{step * (index + 1):,}" for index in range(SAMPLES)))
    row = ("resident, MB", *(f"{each / 1e6:.1f}" for each in samples))
    return Section(
        "10. Memory of a worker",
        f"{tasks:,} tasks in one new process, through Celery's tracer as in section 8: a new key each, every tenth "
        "delivered twice, every message with a header of a name that never came before. At a task a second that is "
        f"{tasks / 86_400:.1f} days. The store keeps the last {_KEPT:,} records and forgets the others, as a server's "
        "records are not in the worker. The resident size is taken after every tenth; the first samples hold "
        "what is still filling: caches that are bounded, and the allocator.",
        [Grid("Resident size after so many tasks", columns, [row])],
        [
            Goal(
                f"{tasks:,} tasks, to the size after {step * (_FIRST + 1):,}",
                f"at most {_MOST}",
                f"{grown:.3f}",
                grown <= _MOST,
            )
        ],
        {"resident_bytes": {step * (index + 1): each for index, each in enumerate(samples)}},
    )


def _sampled(tasks: int, progress: Callable[[], None]) -> list[int]:
    process = tether.start("lab.benchmarks.memory", str(tasks), log=subprocess.PIPE)
    assert process.stdout is not None
    samples = []
    try:
        with process.stdout as lines:
            for line in lines:
                samples.append(int(line))
                progress()
    finally:
        tether.stop(process)
    return samples


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    warnings.simplefilter("ignore")  # that memory is for one process, which is what is measured
    run_tasks(int(sys.argv[1]), lambda size: print(size, flush=True))
