"""The proxy between the campaigns and their store does to a request exactly what it is told."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lab.proof.fault_campaign import Fault
from lab.proof.wire import ORDER, Wire

# By order: how often the server applied the request, and what its sender saw.
DEEDS: dict[str, tuple[int, int | type[Exception]]] = {
    "pass": (1, 200),
    Fault.REQUEST_LOST: (0, http.client.RemoteDisconnected),
    Fault.REPLY_LOST: (1, http.client.RemoteDisconnected),
    Fault.RESET: (1, ConnectionResetError),
    Fault.TORN: (1, http.client.IncompleteRead),
    Fault.DUPLICATED: (2, 200),
    Fault.DELAYED: (1, 200),
    Fault.HELD: (0, http.client.RemoteDisconnected),
    Fault.THROTTLED: (0, 400),
    Fault.UNAVAILABLE: (0, 503),
    Fault.FAILED: (1, 500),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.applied: list[bytes] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        self.server.applied.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def wire(server: _Server) -> Iterator[Wire]:
    with Wire(f"127.0.0.1:{server.server_port}") as wire:
        yield wire


def send(wire: Wire, order: str, body: bytes = b"claim") -> int | type[Exception]:
    with closing(http.client.HTTPConnection("127.0.0.1", wire.port)) as connection:
        connection.request("POST", "/", body, {ORDER: order})
        try:
            response = connection.getresponse()
            response.read()
        except (http.client.HTTPException, OSError) as error:
            return type(error)
        return response.status


def test_every_fault_is_described_here() -> None:
    """No fault of the campaign is taken on trust."""
    assert set(DEEDS) == {"pass", *Fault}


@pytest.mark.parametrize("order", DEEDS)
def test_order_is_executed(server: _Server, wire: Wire, order: str) -> None:
    """The server applied the request as often as the order says, and the sender saw what the order says."""
    applied, seen = DEEDS[order]

    assert send(wire, f"{order} name" if order == Fault.HELD else str(order)) == seen
    assert server.applied == [b"claim"] * applied


def test_held_request_lands_when_it_is_told(server: _Server, wire: Wire) -> None:
    """A held request reaches the server after the one that was sent later, unchanged and once."""
    send(wire, "held first", b"first")
    send(wire, "pass", b"second")

    assert send(wire, "land first", b"") == 200
    assert server.applied == [b"second", b"first"]
