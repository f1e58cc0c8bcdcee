"""An HTTP proxy in front of DynamoDB that loses requests and replies when a test says so."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass
class Cut:
    """Lose one request (`before` it reaches the store) or one reply (`after` the store has applied it).

    Without `nth`, lose every matching one.
    """

    when: Literal["before", "after"]
    operation: str
    body: str
    nth: int | None
    seen: int = 0

    def strikes(self, operation: str, body: str) -> bool:
        """Count a matching request and tell whether it is lost."""
        if self.operation not in ("", operation) or self.body not in body:
            return False
        self.seen += 1
        return self.nth in (None, self.seen)

    def has_struck(self) -> bool:
        """Whether the cut has happened."""
        return self.seen >= (self.nth or 1)


class FaultProxy:
    """Forwards to one upstream; every fault is asked for by the test, none happens by chance."""

    def __init__(self, upstream: str, listen_on: str = "127.0.0.1") -> None:
        self.upstream = upstream
        self.requests: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._cuts: list[Cut] = []
        self._server = _Server((listen_on, 0), _Handler)
        self._server.proxy = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` for the clients."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def cut_reply(self, operation: str, body: str = "", nth: int = 1) -> Cut:
        """Close the connection after the store has applied the n-th matching request."""
        return self._add(Cut("after", operation, body, nth))

    def cut_request(self, operation: str, body: str = "", nth: int = 1) -> Cut:
        """Close the connection before the n-th matching request reaches the store."""
        return self._add(Cut("before", operation, body, nth))

    @contextlib.contextmanager
    def down(self, operation: str = "", body: str = "") -> Iterator[Cut]:
        """Let no request, or no matching request, reach the store inside the block."""
        cut = self._add(Cut("before", operation, body, None))
        try:
            yield cut
        finally:
            with self._lock:
                self._cuts.remove(cut)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def verdict(self, operation: str, body: str) -> Literal["pass", "before", "after"]:
        """Count a request and decide what becomes of it."""
        with self._lock:
            self.requests[operation] += 1
            struck = [cut for cut in self._cuts if cut.strikes(operation, body)]
            return struck[0].when if struck else "pass"

    def _add(self, cut: Cut) -> Cut:
        with self._lock:
            self._cuts.append(cut)
        return cut


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle of a request is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
        verdict = self.server.proxy.verdict(operation, body.decode(errors="replace"))
        if verdict != "before":
            status, headers, reply = self._forward(body)
        if verdict != "pass":
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream = http.client.HTTPConnection(self.server.proxy.upstream, timeout=30)
        with contextlib.closing(upstream):
            upstream.request("POST", self.path, body, headers)
            response = upstream.getresponse()
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
            return response.status, kept, response.read()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing: a failing test shows the logs of the workers."""
