"""A TCP proxy in front of a server: it counts round trips, loses a request or a reply, adds TLS, changes servers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

HOST = "127.0.0.1"
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
"""What a client of PostgreSQL asks before it speaks TLS; the answer is a letter."""


@dataclass
class Cut:
    """Lose the next request that contains `marker` (`before` it reaches the server), or its reply (`after`)."""

    when: Literal["before", "after"]
    marker: bytes
    times: int
    struck: int = 0


class TcpProxy:
    """Forwards bytes both ways, each connection to the upstream of its beginning.

    Args:
        upstream: Port of the server on this machine; a test may change it.
        tls: Where the clients speak TLS; towards the server it is plain.
        host: The address of this machine that it listens on.
    """

    def __init__(self, upstream: int, tls: ssl.SSLContext | None = None, host: str = HOST) -> None:
        self.upstream = upstream
        #: Connections that were accepted.
        self.connections = 0
        #: How often a client spoke first, or after the server had: once per round trip.
        self.round_trips = 0
        self._tls = tls
        self._cuts: list[Cut] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.drop_connections()

    def cut_request(self, marker: bytes, times: int = 1) -> Cut:
        """Close the connection instead of forwarding the next requests that contain `marker`."""
        return self._add(Cut("before", marker, times))

    def cut_reply(self, marker: bytes, times: int = 1) -> Cut:
        """Close the connection once the server has replied to the next requests that contain `marker`."""
        return self._add(Cut("after", marker, times))

    def drop_connections(self) -> None:
        """Close every connection there is."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _hang_up(each)

    def _add(self, cut: Cut) -> Cut:
        with self._lock:
            self._cuts.append(cut)
        return cut

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self.connections += 1
        with contextlib.suppress(OSError), contextlib.ExitStack() as open_sockets:
            open_sockets.enter_context(client)
            if self._tls:
                if client.recv(len(_SSL_REQUEST), socket.MSG_PEEK) == _SSL_REQUEST:
                    client.recv(len(_SSL_REQUEST))
                    client.sendall(b"S")
                client = open_sockets.enter_context(self._tls.wrap_socket(client, server_side=True))
            server = open_sockets.enter_context(socket.create_connection((HOST, self.upstream)))
            with self._lock:
                self._sockets |= {client, server}
            _Conversation(self, client, server).run()
            with self._lock:
                self._sockets -= {client, server}

    def verdict(self, data: bytes) -> Literal["pass", "before", "after"]:
        """Decide what becomes of a request."""
        with self._lock:
            for cut in self._cuts:
                if cut.struck < cut.times and cut.marker in data:
                    cut.struck += 1
                    return cut.when
        return "pass"

    def count_round_trip(self) -> None:
        """Note that a client has spoken."""
        with self._lock:
            self.round_trips += 1


class _Conversation:
    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._is_clients_turn = True
        self._loses_reply = False

    def run(self) -> None:
        replies = threading.Thread(target=self._forward_replies, daemon=True)
        replies.start()
        with contextlib.suppress(OSError):
            self._forward_requests()
        self._end()
        replies.join()

    def _forward_requests(self) -> None:
        while data := self._client.recv(65536):
            if self._is_clients_turn:
                self._is_clients_turn = False
                self._proxy.count_round_trip()
            verdict = self._proxy.verdict(data)
            if verdict == "before":
                return
            self._loses_reply = self._loses_reply or verdict == "after"
            self._server.sendall(data)

    def _forward_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if self._loses_reply:
                    break
                self._is_clients_turn = True
                self._client.sendall(data)
        self._end()

    def _end(self) -> None:
        _hang_up(self._client)
        _hang_up(self._server)


def _hang_up(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
