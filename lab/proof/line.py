"""A TCP line between workers and a store, which a campaign can cut. It knows no protocol.

What one read brings is taken for one request. Clients write a request at once, or its head and then its body,
and wait for the reply; a read that brings less only makes a cut hit in the middle.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Literal

__all__ = ["Line"]

_READ = 1 << 16
_NONCE = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""Revisions and owners. Two writes that name the same ones are the same write."""

_Verdict = Literal["pass", "before", "after"]


class Line:
    """Forwards to one server; every cut is asked for, none happens by chance.

    Args:
        upstream: Host and port of the server.
        writes: Finds, in a request that writes a record, the name of its task as the first group.
    """

    def __init__(self, upstream: tuple[str, int], writes: str) -> None:
        self.by_task: Counter[str] = Counter()
        """How many writes went through, or were lost, by task."""
        self.healed: Counter[str] = Counter()
        """How many writes whose reply was lost were sent again, by task."""
        self._upstream = upstream
        self._writes = re.compile(writes.encode())
        self._lock = threading.Lock()
        self._planned: list[_Verdict] = []
        self._unanswered: set[tuple[bytes, ...]] = set()
        self._is_down = False
        self._open: set[_Connection] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for the clients."""
        host, port = self._listener.getsockname()
        return host, port

    def lose_request(self) -> None:
        """Cut the next write's connection before the server gets it."""
        with self._lock:
            self._planned.append("before")

    def lose_reply(self) -> None:
        """Cut the next write's connection when the server has answered it."""
        with self._lock:
            self._planned.append("after")

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Cut all connections, and every new one, inside the block."""
        self._is_down = True
        self._cut_all()
        try:
            yield
        finally:
            self._is_down = False

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self._is_down = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._upstream)
        except OSError:
            client.close()
            return
        connection = _Connection(self, client, server)
        with self._lock:
            self._open.add(connection)
        if self._is_down:
            connection.cut()
        connection.carry()
        with self._lock:
            self._open.discard(connection)

    def _cut_all(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.cut()

    def verdict(self, request: bytes) -> _Verdict:
        """Count a request and decide what becomes of it."""
        found = self._writes.search(request)
        if found is None:
            return "pass"
        task, nonces = found[1].decode(), tuple(_NONCE.findall(request))
        with self._lock:
            self.by_task[task] += 1
            verdict = self._planned.pop(0) if self._planned else "pass"
            if verdict == "after":
                self._unanswered.add(nonces)
            elif verdict == "pass" and nonces in self._unanswered:
                self._unanswered.discard(nonces)
                self.healed[task] += 1
            return verdict


class _Connection:
    def __init__(self, line: Line, client: socket.socket, server: socket.socket) -> None:
        self._line = line
        self._client = client
        self._server = server
        self._is_last = False
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def carry(self) -> None:
        """Forward both ways until either end closes or the line is cut."""
        replies = threading.Thread(target=self._carry_replies, daemon=True)
        replies.start()
        self._carry_requests()
        replies.join()
        self._client.close()
        self._server.close()

    def cut(self) -> None:
        """Let both ends find the connection closed."""
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _carry_requests(self) -> None:
        with contextlib.suppress(OSError):
            while request := self._client.recv(_READ):
                verdict = self._line.verdict(request)
                if verdict == "before":
                    break
                self._is_last |= verdict == "after"
                self._server.sendall(request)
        if not self._is_last:
            self.cut()

    def _carry_replies(self) -> None:
        with contextlib.suppress(OSError):
            while (reply := self._server.recv(_READ)) and not self._is_last:
                self._client.sendall(reply)
        self.cut()
