"""Workers that are started again when they die, as a supervisor does it."""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import click

from lab import tether
from lab.ledger import LEDGERS, Ledger, Row

POLL = 0.2
WORKER_NAME = "PROOF_WORKER"  # the environment variable in which a worker finds its name


class Timeout(click.ClickException):
    """Something took far too long."""


def until(condition: Callable[[], bool], what: str, timeout: float) -> None:
    """Wait for a condition; raises Timeout if it does not come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise Timeout(f"waited {timeout:g} s for {what}")
        time.sleep(POLL)


class Fleet:
    """Prefork workers of one Celery app, for the time of a ``with`` block."""

    def __init__(
        self, app: str, names: Sequence[str], *, children: int, environ: Mapping[str, str], folder: Path
    ) -> None:
        self.names = tuple(names)
        self.folder = folder
        self._app, self._children, self._environ = app, children, environ
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name in self.names:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            tether.kill(process)
        self._processes.clear()

    def until_ready(self, timeout: float) -> None:
        """Wait until every one of them has noted in its folder that it is; raises Timeout."""
        rows = Ledger(self.folder / "ledger.jsonl").rows
        self.until(lambda: [row.what for row in rows()].count("ready") == len(self.names), "the workers", timeout)

    def until(self, condition: Callable[[], bool], what: str, timeout: float, poll: float = POLL) -> None:
        """Wait for a condition while all of them live; raises Timeout, with the ends of their logs."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.dead() or time.monotonic() > deadline:
                logs = (path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))
                raise Timeout("\n".join((f"waited for {what}; ended early: {self.dead()}", *logs)))
            time.sleep(poll)

    def dead(self) -> list[str]:
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def restart_dead(self) -> list[str]:
        dead = self.dead()
        for name in dead:
            tether.kill(self._processes[name])  # what is left of its group
            self._start(name)
        return dead

    def group(self, name: str) -> int:
        """The process group of a program and its children; its number is that of the program's process."""
        return self._processes[name].pid

    def owns(self, pid: int) -> bool:
        """Whether the process is alive and one of these: the number may be somebody else's by now."""
        try:
            return os.getpgid(pid) in {process.pid for process in self._processes.values()}
        except ProcessLookupError:
            return False

    def _start(self, name: str) -> None:
        environ = {**self._environ, WORKER_NAME: name, "TMPDIR": str(self.folder)}
        arguments = (
            f"-A {self._app} worker --pool prefork --concurrency {self._children} --hostname {name}@%h"
            " --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = tether.start("celery", *arguments.split(), log=log, env=environ)


Hear = Callable[[Sequence[Row]], None]
"""Takes what is new in a ledger."""


class Watch:
    """What the workers of a fleet note in its folder: kept, and handed to `hear` as it comes."""

    def __init__(self, fleet: Fleet, hear: Hear = lambda news: None) -> None:
        self.rows: list[Row] = []
        self._fleet, self._hear = fleet, hear
        self._read = dict.fromkeys(LEDGERS, 0)

    def look(self) -> None:
        news: list[Row] = []
        for name, position in self._read.items():
            rows, self._read[name] = Ledger(self._fleet.folder / f"{name}.jsonl").since(position)
            news += rows
        news.sort(key=lambda row: row.time)
        self.rows += news
        self._hear(news)

    def until(self, done: Callable[[], bool], what: str, timeout: float, *, looks: int = 1) -> None:
        """Wait until so many looks in a row find it done."""
        found = deque[bool](maxlen=looks)

        def is_done() -> bool:
            self.look()
            found.append(done())
            return sum(found) == looks

        self._fleet.until(is_done, what, timeout)


class Freezer:
    """Stops processes and lets them go on later, whatever becomes of this process meanwhile."""

    def __init__(self) -> None:
        self._guards: list[tuple[subprocess.Popen[bytes], tuple[int, ...]]] = []

    def freeze(self, seconds: float, *targets: int) -> None:
        """Stop processes, or groups ``-target``, for some seconds."""
        # A process of its own holds the timer: if this one is killed meanwhile, the targets still wake up, find
        # the end of file in their tethers, and end.
        guard = subprocess.Popen(
            ["sh", "-c", 'sleep "$0"; kill -s CONT -- "$@"', str(seconds), *map(str, targets)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _signal(targets, signal.SIGSTOP)
        self._guards.append((guard, targets))

    def thaw(self) -> None:
        """Let everything go on that is still stopped."""
        for guard, targets in self._guards:
            if guard.poll() is None:
                os.killpg(guard.pid, signal.SIGKILL)
                _signal(targets, signal.SIGCONT)
            guard.wait()
        self._guards.clear()


def _signal(targets: Iterable[int], what: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, what)
