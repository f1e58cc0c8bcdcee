"""A proxy in front of DynamoDB that does to each request what the request's own header asks for.

It keeps no plan: whoever sends a request says by :data:`ORDER` what is to become of it, so that a campaign decides
everything, by its seed, and several senders can share one proxy.
"""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

ORDER = "X-Proof-Order"
"""Name of the header. Its value is a word; after ``held``, ``stalled`` and ``land`` comes a name of the request."""

_DELAY = 0.003
"""Seconds; long enough for any other request to overtake, since a whole one takes two milliseconds."""

_Reply = tuple[int, bytes, dict[str, str]]


def _error(status: int, name: str) -> _Reply:
    body = f'{{"__type":"com.amazonaws.dynamodb.v20120810#{name}","message":"by order"}}'
    return status, body.encode(), {}


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one of its own to the server behind."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    upstream: ClassVar[str]
    held: ClassVar[dict[str, tuple[dict[str, str], bytes]]]

    def setup(self) -> None:
        super().setup()
        self._server = http.client.HTTPConnection(self.upstream)

    def finish(self) -> None:
        self._server.close()
        super().finish()

    def do_POST(self) -> None:
        word, _, name = self.headers.get(ORDER, "pass").partition(" ")
        request = dict(self.headers), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if word in ("held", "stalled"):
            self.held[name] = request
        elif word == "land":
            request = self.held.pop(name)
        elif word == "delayed":
            time.sleep(_DELAY)
        if word in ("request-lost", "held"):
            self.close_connection = True
        elif word == "throttled":
            self._reply(_error(400, "ProvisionedThroughputExceededException"))
        elif word == "unavailable":
            self._reply((503, b"<html>try later</html>", {}))
        elif word == "stalled":
            threading.Event().wait()
        else:
            self._answer(word, *request)

    def _answer(self, word: str, headers: dict[str, str], body: bytes) -> None:
        reply = self._asked(headers, body)
        match word:
            case "pass" | "land" | "delayed":
                self._reply(reply)
            case "duplicated":
                self._reply(self._asked(headers, body))
            case "failed":
                self._reply(_error(500, "InternalServerError"))
            case "torn":
                self._reply(reply, torn=True)
            case "reply-lost":
                self.close_connection = True
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
            case _:
                raise ValueError(word)

    def _asked(self, headers: dict[str, str], body: bytes) -> _Reply:
        try:
            self._server.request(self.command, self.path, body, headers)
            reply = self._server.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):  # it was idle for too long
            self._server.close()
            self._server.request(self.command, self.path, body, headers)
            reply = self._server.getresponse()
        return reply.status, reply.read(), dict(reply.headers)

    def _reply(self, reply: _Reply, *, torn: bool = False) -> None:
        status, body, headers = reply
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - 2 * torn])
        self.wfile.flush()
        self.close_connection |= torn

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1000

    def shutdown_request(self, request: Any) -> None:
        """Close at once: a reset must not be announced by the end of the stream."""
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave when they like."""


@contextmanager
def wire(upstream: str) -> Iterator[int]:
    """The port of a proxy before ``host:port``, for as long as the ``with`` block lasts."""
    handler = type("Handler", (_Handler,), {"upstream": upstream, "held": {}})
    with _Proxy(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
