"""The line between workers and store is cut exactly where a campaign asks for it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lab.proof.line import Line
from lab.proxy import HOST
from tests.support.waiting import wait_until

REVISION, OTHER = "1" * 32, "2" * 32
CLAIM = f"swap app.charge {REVISION}".encode()


class _Server:
    """Answers every request with OK, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while request := connection.recv(1 << 16):
                self.requests.append(request)
                connection.sendall(b"OK")


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    yield server
    server.listener.close()


@pytest.fixture
def line(server: _Server) -> Iterator[Line]:
    with Line(HOST, server.listener.getsockname()[1], r"app\.(\w+)") as line:
        yield line


def ask(line: Line, *requests: bytes) -> list[bytes]:
    """What one connection is answered; empty where it was cut."""
    with socket.create_connection((line.host, line.port), timeout=10) as connection:
        return [_answer(connection, request) for request in requests]


def _answer(connection: socket.socket, request: bytes) -> bytes:
    try:
        connection.sendall(request)
        return connection.recv(1 << 16)
    except (BrokenPipeError, ConnectionResetError):
        return b""


def test_carries_everything_both_ways(line: Line, server: _Server) -> None:
    """Where nothing is asked for, nothing happens."""
    assert ask(line, b"hello", CLAIM) == [b"OK", b"OK"]
    assert server.requests == [b"hello", CLAIM]
    assert (line.by_task, line.healed) == ({"charge": 1}, {})


def test_lost_request_does_not_reach_the_server(line: Line, server: _Server) -> None:
    """The next write is cut, and nothing else: what names no task is not what the campaign is about."""
    line.lose_request()

    assert ask(line, b"hello", CLAIM) == [b"OK", b""]
    assert server.requests == [b"hello"]
    assert ask(line, CLAIM) == [b"OK"]
    assert line.healed == {}


def test_lost_reply_was_applied_and_its_resend_counts_as_healed(line: Line, server: _Server) -> None:
    """The server has the write, its sender does not know; the same write again is recognised, another is not."""
    line.lose_reply()

    assert ask(line, CLAIM) == [b""]
    assert server.requests == [CLAIM]
    assert ask(line, CLAIM.replace(REVISION.encode(), OTHER.encode())) == [b"OK"]
    assert line.healed == {}
    assert ask(line, CLAIM, CLAIM) == [b"OK", b"OK"]
    assert line.healed == {"charge": 1}


def test_line_that_is_down_cuts_old_and_new_connections(line: Line, server: _Server) -> None:
    """Inside the block nothing gets through, afterwards all does."""
    with socket.create_connection((line.host, line.port), timeout=10) as connection:
        assert _answer(connection, b"hello") == b"OK"
        with line.down():
            assert _answer(connection, CLAIM) == b""
            assert ask(line, CLAIM) == [b""]
    assert ask(line, CLAIM) == [b"OK"]
    assert server.requests == [b"hello", CLAIM]


def test_client_is_cut_off_with_its_server(line: Line, server: _Server) -> None:
    """A connection to a server that has gone does not stay open."""
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()

    assert ask(line, CLAIM) == [b""]


def test_server_is_cut_off_with_its_client(line: Line, server: _Server) -> None:
    """A killed worker's connection does not stay open on the other side."""
    ask(line, b"hello")

    wait_until(lambda: not line._open, "the connection is gone")
