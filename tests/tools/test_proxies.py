"""The proxies between workers, campaigns and stores do to a request exactly what they are told."""

import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lab.proof.campaign import RequestFault
from lab.proof.line import Line
from lab.proof.wire import ORDER, wire
from lab.proxy import HOST
from tests.support.waiting import wait_until

CLAIM = f"swap app.charge {'1' * 32}".encode()
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


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    with serving(server):
        yield server


@pytest.fixture
def line(server: _Server) -> Iterator[Line]:
    with Line(HOST, server.server_address[1], r"app\.(\w+)") as line:
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


def test_lost_request_does_not_reach_the_server(line: Line, server: _Server) -> None:
    """The next write is cut, and nothing else: what names no task is not what the campaign is about."""
    line.lose("request lost")
    assert ask(line, b"hello", CLAIM) == [b"OK", b""]
    assert ask(line, CLAIM) == [b"OK"]
    assert (server.requests, line.by_task, line.healed) == ([b"hello", CLAIM], {"charge": 2}, {})


def test_lost_reply_was_applied_and_its_resend_counts_as_healed(line: Line, server: _Server) -> None:
    """The server has the write, its sender does not know; the same write again is recognised, another is not."""
    line.lose("reply lost")
    assert ask(line, CLAIM) == [b""]
    assert (ask(line, OTHER), line.healed) == ([b"OK"], {})
    assert (ask(line, CLAIM, CLAIM), line.healed) == ([b"OK", b"OK"], {"charge": 1})
    assert server.requests == [CLAIM, OTHER, CLAIM, CLAIM]


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


DEEDS: dict[str, tuple[int, int | type[Exception]]] = {
    "pass": (1, 200),
    RequestFault.REQUEST_LOST: (0, http.client.RemoteDisconnected),
    RequestFault.REPLY_LOST: (1, http.client.RemoteDisconnected),
    RequestFault.RESET: (1, ConnectionResetError),
    RequestFault.TORN: (1, http.client.IncompleteRead),
    RequestFault.DUPLICATED: (2, 200),
    RequestFault.DELAYED: (1, 200),
    RequestFault.HELD: (0, http.client.RemoteDisconnected),
    RequestFault.THROTTLED: (0, 400),
    RequestFault.UNAVAILABLE: (0, 503),
    RequestFault.FAILED: (1, 500),
}
"""By order: how often the server applied the request, and what its sender saw."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    applied: list[bytes]

    def do_POST(self) -> None:
        self.applied.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []
    monkeypatch.setattr(_Handler, "applied", found, raising=False)
    return found


@pytest.fixture
def port(applied: list[bytes]) -> Iterator[int]:
    server = ThreadingHTTPServer((HOST, 0), _Handler)
    with serving(server), wire(f"{HOST}:{server.server_port}") as port:
        yield port


def send(port: int, order: str, body: bytes = b"claim") -> int | type[Exception]:
    with closing(http.client.HTTPConnection(HOST, port)) as connection:
        connection.request("POST", "/", body, {ORDER: order})
        try:
            response = connection.getresponse()
            response.read()
        except (http.client.HTTPException, OSError) as error:
            return type(error)
        return response.status


@pytest.mark.parametrize("order", ["pass", *RequestFault])
def test_order_is_executed(applied: list[bytes], port: int, order: str) -> None:
    """The server applied the request as often as the order says, and the sender saw what the order says."""
    times, seen = DEEDS[order]
    assert send(port, f"{order} name" if order == RequestFault.HELD else str(order)) == seen
    assert applied == [b"claim"] * times


def test_held_request_lands_when_it_is_told(applied: list[bytes], port: int) -> None:
    """A held request reaches the server after the one that was sent later, unchanged and once."""
    send(port, "held first", b"first")
    send(port, "pass", b"second")
    assert send(port, "land first", b"") == 200
    assert applied == [b"second", b"first"]
