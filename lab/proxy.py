"""A TCP proxy between clients and a server: whoever drives it loses requests and replies, or counts round trips.

It knows no protocol. Clients write a request at once, or its head and then its body, and wait for the reply; what one
read brings is decided about before it is forwarded. Nothing happens by chance.
"""

import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Self
from urllib.parse import urlsplit

from celery_idempotent.testing.stores import Fault

HOST = "127.0.0.1"

_READ = 1 << 16

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
"""What a client of PostgreSQL asks before it speaks TLS; the answer is a letter."""


class Proxy:
    """Forwards bytes both ways, each connection to the upstream of its beginning, as long as the ``with`` block lasts.

    A round trip is what a client sends between two replies, however many commands or packets that are. With ``delay``,
    each part arrives so many seconds after it came, either way and in its order.
    """

    def __init__(
        self,
        upstream: int,
        *,
        host: str = HOST,
        listen_on: str = HOST,
        tls: ssl.SSLContext | None = None,
        keeps_trips: bool = False,
        delay: float | None = None,
    ) -> None:
        self.upstream = upstream
        #: Connections that were accepted.
        self.connections = 0
        #: Round trips that have begun.
        self.round_trips = 0
        self._delay = delay
        self._keeps_trips = keeps_trips
        self._trips: list[bytearray] = []
        self._upstream_host = host
        self._tls = tls
        self._is_down = False
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._listener = socket.create_server((listen_on, 0))
        #: Where clients connect.
        self.port: int = self._listener.getsockname()[1]
        self.host = listen_on
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def decide(self, request: bytes, before: bytes) -> Fault:
        """What becomes of a request; called by several threads, one at a time."""
        return "none"

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_down = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self.drop_connections()

    def on_the_way_to(self, url: str) -> str:
        address = urlsplit(url)
        user, at, _ = address.netloc.rpartition("@")
        return address._replace(netloc=f"{user}{at}{self.host}:{self.port}").geturl()

    @property
    def trips(self) -> list[bytes]:
        """What clients sent, by round trip, if it is kept."""
        with self._lock:
            return [bytes(each) for each in self._trips]

    def drop_connections(self) -> None:
        with self._lock:
            for each in self._open:
                each.cut()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Cut every connection, and every new one, inside the block."""
        self._is_down = True
        self.drop_connections()
        try:
            yield
        finally:
            self._is_down = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self.connections += 1
        with contextlib.suppress(OSError), contextlib.ExitStack() as sockets:
            client = self._meet(sockets.enter_context(client), sockets)
            server = sockets.enter_context(socket.create_connection((self._upstream_host, self.upstream)))
            connection = _Connection(self, client, server)
            with self._lock:
                self._open.add(connection)
            if self._is_down:
                connection.cut()
            connection.carry()
            with self._lock:
                self._open.discard(connection)

    def _meet(self, client: socket.socket, sockets: contextlib.ExitStack) -> socket.socket:
        if self._tls is None:
            return client
        if client.recv(len(_SSL_REQUEST), socket.MSG_PEEK) == _SSL_REQUEST:
            client.recv(len(_SSL_REQUEST))
            client.sendall(b"S")
        return sockets.enter_context(self._tls.wrap_socket(client, server_side=True))

    def _asked(self, request: bytes, trip: bytearray | None) -> tuple[Fault, bytearray]:
        """What becomes of a request, and the round trip that it is part of: a new one without ``trip``."""
        with self._lock:
            if trip is None:
                trip = bytearray()
                self.round_trips += 1
                if self._keeps_trips:
                    self._trips.append(trip)
            before = bytes(trip)
            trip += request
            return self.decide(request, before), trip


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._trip: bytearray | None = None
        self._loses_reply = False
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def carry(self) -> None:
        """Forward both ways until either end closes or the connection is cut."""
        replies = threading.Thread(target=self._carry_replies, daemon=True)
        replies.start()
        with contextlib.suppress(OSError):
            self._carry_requests()
        if not self._loses_reply:
            self.cut()
        replies.join()

    def cut(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _carry_requests(self) -> None:
        for request in _received(self._client, self._proxy._delay):
            fault, self._trip = self._proxy._asked(request, self._trip)
            if fault == "request lost":
                return
            self._loses_reply |= fault == "reply lost"
            self._server.sendall(request)

    def _carry_replies(self) -> None:
        with contextlib.suppress(OSError):
            for reply in _received(self._server, self._proxy._delay):
                if self._loses_reply:
                    break
                self._trip = None
                self._client.sendall(reply)
        self.cut()


def _received(end: socket.socket, delay: float | None) -> Iterator[bytes]:
    """What comes; with ``delay``, each part so many seconds after it came, to a tenth of a millisecond."""
    parts = iter(partial(end.recv, _READ), b"")
    if delay is None:
        yield from parts
        return
    with contextlib.suppress(OSError):  # only on Linux, which otherwise lets a sleep end 50 us late
        Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1")
    coming: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
    threading.Thread(target=_note, args=(parts, coming), daemon=True).start()
    for came, part in iter(coming.get, None):
        while (left := came + delay - time.perf_counter()) > 0:
            time.sleep(left / 2)  # the longer a sleep, the later it ends
        yield part


def _note(parts: Iterator[bytes], coming: "SimpleQueue[tuple[float, bytes] | None]") -> None:
    with contextlib.suppress(OSError):
        for part in parts:
            coming.put((time.perf_counter(), part))
    coming.put(None)


_TARGET = re.compile(rb"\r\nx-amz-target: *[^.\r]*\.(\w+)", re.IGNORECASE)


def aws_operations(trips: Sequence[bytes]) -> list[str]:
    """By trip, the operations of AWS's JSON protocol over HTTP."""
    return ["+".join(each.decode() for each in _TARGET.findall(trip)) for trip in trips]
