"""The line between workers and a store does to a request exactly what it is told."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from lab.proof.soak import Line
from lab.proxy import HOST
from tests.support.waiting import wait_until

CLAIM = f"swap soak.charge {'1' * 32}".encode()
OTHER = CLAIM.replace(b"1", b"2")


class Server(ThreadingTCPServer):
    """Answers every request with OK, and remembers it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), Answering)
        self.requests: list[bytes] = []


class Answering(BaseRequestHandler):
    server: Server

    def handle(self) -> None:
        with suppress(OSError):
            while request := self.request.recv(1 << 16):
                self.server.requests.append(request)
                self.request.sendall(b"OK")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def line(server: Server) -> Iterator[Line]:
    with Line(HOST, server.server_address[1]) as line:
        yield line


def connected(line: Line) -> socket.socket:
    return socket.create_connection((line.host, line.port), timeout=10)


def ask(line: Line, *requests: bytes, on: socket.socket | None = None) -> list[bytes]:
    """What one connection is answered; empty where it was cut."""
    answers = []
    with on or connected(line) as connection:
        for request in requests:
            try:
                connection.sendall(request)
                answers.append(connection.recv(1 << 16))
            except (BrokenPipeError, ConnectionResetError):
                answers.append(b"")
    return answers


def test_what_is_lost_is_the_next_write_before_or_after_the_server_had_it(line: Line, server: Server) -> None:
    """And nothing else: a request that names no task is not what the campaign is about."""
    line.lose("request lost")
    assert ask(line, b"hello", CLAIM) == [b"OK", b""]
    line.lose("reply lost")
    assert [*ask(line, OTHER), *ask(line, CLAIM)] == [b"", b"OK"]
    assert server.requests == [b"hello", OTHER, CLAIM]


def test_line_that_is_down_cuts_old_and_new_connections(line: Line, server: Server) -> None:
    """Inside the block nothing gets through, afterwards all does."""
    old = connected(line)
    wait_until(lambda: line._open, "the connection is open")
    with line.down():
        assert (ask(line, CLAIM, on=old), ask(line, CLAIM)) == ([b""], [b""])
    assert (ask(line, CLAIM), server.requests) == ([b"OK"], [CLAIM])
