"""A server that is killed is gone with all its processes, and comes back with what it has acknowledged."""

import threading
from contextlib import closing, suppress

import psutil
import psycopg

from lab.embedded import EmbeddedPostgres
from tests.support.waiting import wait_until


def test_killed_server_leaves_no_process_that_could_still_write() -> None:
    """Not even a backend in the middle of a statement, which leads a process group of its own."""
    with EmbeddedPostgres() as server:
        address = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"
        with closing(psycopg.connect(address, autocommit=True)) as connection:
            connection.execute("CREATE TABLE numbers (number int)")
            connection.execute("INSERT INTO numbers VALUES (1)")
            backend = psutil.Process(connection.info.backend_pid)
            busy = threading.Thread(target=_insert, args=(connection,))
            busy.start()
            wait_until(lambda: backend.cpu_times().user > 0.1, "the backend is busy")

            server.kill()

            assert not _runs(backend)
            busy.join()
        server.restart()
        with closing(psycopg.connect(address)) as connection:
            assert connection.execute("SELECT number FROM numbers").fetchall() == [(1,)]


def _insert(connection: "psycopg.Connection[tuple[int]]") -> None:
    with suppress(psycopg.OperationalError):  # the server is killed meanwhile
        connection.execute("INSERT INTO numbers SELECT generate_series(1, 100000000)")


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
