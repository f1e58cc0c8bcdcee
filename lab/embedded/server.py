"""What all embedded servers share: a port, a folder, a process that cannot outlive this one."""

import contextlib
import importlib.util
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import psutil

from lab import tether
from lab.folders import OwnedFolder

HOST = "127.0.0.1"
START_TIMEOUT = 60.0
PORT_ATTEMPTS = 5


class Server(ABC):
    """A private server that lives as long as the `with` block, and never longer than this process.

    Its state is in a folder of its own, survives :meth:`restart`, and is deleted at the end of the block.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = port or 0
        self._wanted_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: OwnedFolder | None = None

    @staticmethod
    def missing() -> str | None:
        """What must be installed before this server can start; None where nothing is missing."""
        return None

    @property
    def pids(self) -> list[int]:
        if self._process is None:
            return []
        parent = psutil.Process(self._process.pid)
        return [each.pid for each in (parent, *parent.children(recursive=True))]

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = OwnedFolder()
        return self._folder.path

    def __enter__(self) -> Self:
        if missing := self.missing():
            raise RuntimeError(f"{type(self).__name__}: {missing}")
        if self._wanted_port and accepts(self._wanted_port):
            taken = f"port {self._wanted_port} is taken by {_listener(self._wanted_port)}"
            raise RuntimeError(f"{type(self).__name__}: {taken}; wait until that has ended, or end it")
        try:
            self.prepare()
            for _ in range(PORT_ATTEMPTS if self._wanted_port is None else 1):
                self.port = self._wanted_port or free_port()
                if self._starts():
                    return self
        except BaseException:
            self.stop()
            raise
        log = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        self.stop()
        raise RuntimeError(f"{type(self).__name__} did not start on port {self.port}; is it taken?\n{log}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and delete its folder; harmless when it is not running."""
        self.kill()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def kill(self) -> None:
        """End the server with all its processes now, so that only what it has written counts.

        When this returns none of them is left: one that was busy would go on writing to what the next start reads.
        """
        if self._process is not None:
            family = _family(self._process.pid)
            tether.kill(self._process)
            self._process = None
            _end(family)

    def restart(self) -> None:
        """Kill the server and start it again on the same port and folder."""
        self.kill()
        self.revive()

    def revive(self) -> None:
        if not self._starts():
            raise RuntimeError(f"{type(self).__name__} did not come back on port {self.port}")

    def prepare(self) -> None:  # noqa: B027 - most servers need nothing
        """Make what the first start needs."""

    @abstractmethod
    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process on `self.port`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves; asked while its process lives."""

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def start_program(self, *argv: str, user: str | None = None) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return tether.start_program(*argv, log=log, user=user)

    def _starts(self) -> bool:
        self._process = process = self.launch()
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and process.poll() is None:
            if self.is_ready():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        self.kill()
        return False


def _family(pid: int) -> list[psutil.Process]:
    """The process and all below it, in whatever group: a backend of PostgreSQL leads one of its own.

    Each parent is stopped before it is asked for its children, so there will be no further ones.
    """
    try:
        process = psutil.Process(pid)
        process.suspend()
        children = process.children()
    except psutil.NoSuchProcess:
        return []
    return [process, *(each for child in children for each in _family(child.pid))]


def _end(family: list[psutil.Process]) -> None:
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    while any(map(_is_alive, family)):
        time.sleep(0.005)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # A zombie is one that its parent has not looked at yet; while it has other threads, its sockets are open.
        return bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def package(module: str, distribution: str | None = None) -> str | None:
    """What brings `module`, if it is not installed; the distribution is called so, too, unless it is given."""
    return None if importlib.util.find_spec(module) else f"run: pip install {distribution or module}"


def _listener(port: int) -> str:
    with contextlib.suppress(psutil.Error):  # not everybody may ask, nor about everybody
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"process {each.pid} ({' '.join(psutil.Process(each.pid).cmdline())})"
    return "another process"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
