"""The line between workers and a store does to a request exactly what it is told."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lab.proof.soak import Line
from lab.proxy import HOST
from tests.support.waiting import wait_until

CLAIM = f"swap soak.charge {'1' * 32}".encode()
OTHER = CLAIM.replace(b"1", b"2")


class _Echo(socketserver.BaseRequestHandler):
    """Answers every request with OK, and remembers it."""

    def handle(self) -> None:
        with suppress(OSError):
            while request := self.request.recv(1 << 16):
                self.server.requests.append(request)  # type: ignore[attr-defined]
                self.request.sendall(b"OK")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Echo)
        self.requests: list[bytes] = []


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def line(server: _Server) -> Iterator[Line]:
    with Line(HOST, server.server_address[1]) as line:
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


def test_what_is_lost_is_the_next_write_before_or_after_the_server_had_it(line: Line, server: _Server) -> None:
    """And nothing else: a request that names no task is not what the campaign is about."""
    line.lose("request lost")
    assert ask(line, b"hello", CLAIM) == [b"OK", b""]
    line.lose("reply lost")
    assert [*ask(line, OTHER), *ask(line, CLAIM)] == [b"", b"OK"]
    assert server.requests == [b"hello", OTHER, CLAIM]


def test_line_that_is_down_cuts_old_and_new_connections(line: Line, server: _Server) -> None:
    """Inside the block nothing gets through, afterwards all does."""
    with socket.create_connection((line.host, line.port), timeout=10) as connection:
        assert _answer(connection, b"hello") == b"OK"
        with line.down():
            assert (_answer(connection, CLAIM), ask(line, CLAIM)) == (b"", [b""])
    assert (ask(line, CLAIM), server.requests) == ([b"OK"], [b"hello", CLAIM])


def test_either_end_is_cut_off_with_the_other(line: Line, server: _Server) -> None:
    """A killed worker's connection does not stay open, nor one to a server that has gone."""
    ask(line, b"hello")
    wait_until(lambda: not line._open, "the connection is gone")
    server.shutdown()
    server.server_close()
    assert ask(line, CLAIM) == [b""]
