"""Real workers that stand still except while they are measured, so that many can wait for their turn."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from lab.benchmarks.worker_app import FINISHED, QUEUE, STAMP, TASK, Setup, make_app
from lab.fleet import Fleet
from lab.folders import temporary_folder

CONCURRENCY = 2
_NAME = "worker"
_PATIENCE = 60.0
_WARM_UP_TASKS = 100
"""Enough that each process of the pool has connected and has prepared whatever its driver prepares."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Tasks per second, and microseconds of user and system time per task of the processes that did it."""

    per_second: float
    cpu_us: float


class Worker:
    """A worker with prefork and :data:`CONCURRENCY` processes on a queue of its own; it gets some tasks to warm up."""

    def __init__(self, setup: Setup, running: ExitStack) -> None:
        folder = running.enter_context(temporary_folder())
        self._finished = folder / "finished"
        self._finished.touch()
        self._queue, self._kind, self._published = f"benchmark-{uuid4().hex[:8]}", setup.kind, 0
        environ = {**setup.environ(), FINISHED: str(self._finished), QUEUE: self._queue}
        fleet = Fleet("lab.benchmarks.worker_app", [_NAME], children=CONCURRENCY, environ=environ, folder=folder)
        self._fleet = running.enter_context(fleet)
        self._task = make_app(setup).tasks[TASK]
        running.callback(self._task.app.close)
        self._publish(_WARM_UP_TASKS)

    def stand_by(self) -> None:
        self.wait()
        self._signal(signal.SIGSTOP)

    def publish(self, tasks: int) -> Rate:
        """Publish ``tasks`` to the worker while it stands still."""
        begin, cpu = time.monotonic(), time.process_time()
        self._publish(tasks)
        return Rate(tasks / (time.monotonic() - begin), (time.process_time() - cpu) * 1e6 / tasks)

    def execute(self) -> Rate:
        """Execute what was published. The rate is that between the first end and the last: without waking up."""
        cpu = self._cpu_ns()
        with self._going():
            ends = self.wait()
        return Rate((len(ends) - 1) / ((ends[-1] - ends[0]) / 1e9), (self._cpu_ns() - cpu) / 1000 / len(ends))

    def publish_and_execute(self, tasks: int) -> float:
        """Publish to the running worker; how many per second, from the first publication to the last end."""
        with self._going():
            begin = time.monotonic_ns()
            self._publish(tasks)
            return tasks / ((self.wait()[-1] - begin) / 1e9)

    def wait(self) -> list[int]:
        """When each of the tasks published last ended, in nanoseconds of the monotonic clock, in order."""
        begin, end = (count * STAMP.size for count in (self._due_from, self._published))
        self._fleet.until(
            lambda: self._finished.stat().st_size >= end, f"the tasks of {self._kind}", _PATIENCE, poll=0.01
        )
        stamps: Any = STAMP.iter_unpack(self._finished.read_bytes()[begin:end])
        return sorted(stamp for (stamp,) in stamps)

    @contextmanager
    def _going(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        os.killpg(self._fleet.group(_NAME), what)

    def _publish(self, tasks: int) -> None:
        first = time.time_ns()  # no earlier run on a lasting server can have used that number
        self._due_from, self._published = self._published, self._published + tasks
        with self._task.app.producer_or_acquire() as producer:
            for number in range(tasks):
                self._task.apply_async((first + number,), queue=self._queue, producer=producer)

    def _cpu_ns(self) -> int:
        """User and system time that all processes of the worker have used."""
        main = self._fleet.group(_NAME)
        children = map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())
        # What clock_getcpuclockid(3) gives for another process on Linux: its complement, and what kind of clock.
        return sum(time.clock_gettime_ns(~each << 3 | 2) for each in (main, *children))


@contextmanager
def standing_by(setups: Mapping[str, Setup]) -> Iterator[dict[str, Worker]]:
    """A warm worker for each of ``setups``, all of them stopped."""
    with ExitStack() as stack:
        workers = {name: Worker(setup, stack) for name, setup in setups.items()}
        for each in workers.values():
            each.stand_by()
        yield workers
