"""Round trips, counted on the wire: a proxy between a client and its server that keeps what the client sends.

A round trip is what the client sends between two replies, however many commands or packets that are: a
pipeline is one, a transaction of three statements that waits for each is three.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

__all__ = ["Protocol", "Tap", "aws", "mysql", "postgresql", "redis", "redis_commands", "trips_during"]

_HOST = "127.0.0.1"
_CHUNK = 65536

Protocol = Callable[[Sequence[bytes]], list[str]]
"""Names the commands of each round trip, given all that came since the client connected."""


class Tap:
    """A proxy on this machine that lives as long as the ``with`` block.

    Args:
        upstream: The port of the server behind, on this machine.
        protocol: How to name what is sent.
    """

    def __init__(self, upstream: int, protocol: Protocol) -> None:
        self.upstream = upstream
        self.trips: list[bytearray] = []
        self._protocol = protocol
        self._server = _Server((_HOST, 0), _Connection)
        self._server.tap = self

    @property
    def port(self) -> int:
        """Where clients connect."""
        port: int = self._server.server_address[1]
        return port

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self) -> list[str]:
        """All round trips so far, by name."""
        return self._protocol([bytes(each) for each in self.trips])


def trips_during(taps: Sequence[Tap], act: Callable[[], object]) -> list[str]:
    """The round trips that ``act`` makes through ``taps``, by name."""
    before = [len(tap.trips) for tap in taps]
    act()
    return [name for tap, count in zip(taps, before, strict=True) for name in tap.named()[count:]]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    tap: Tap


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self._trip: bytearray | None = None
        with socket.create_connection((_HOST, self.server.tap.upstream)) as upstream:
            for each in (self.request, upstream):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(upstream, self.request, self._answered), daemon=True).start()
            self._pump(self.request, upstream, self._asked)

    def _asked(self, data: bytes) -> None:
        if self._trip is None:
            self._trip = bytearray()
            self.server.tap.trips.append(self._trip)
        self._trip += data

    def _answered(self, data: bytes) -> None:
        self._trip = None

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, note: Callable[[bytes], None]) -> None:
        try:
            while data := source.recv(_CHUNK):
                note(data)  # before it goes on: the other side answers at once
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # one side has hung up, as clients do when they are done


def redis(trips: Sequence[bytes]) -> list[str]:
    """Commands of RESP (redis.io, "Redis serialization protocol specification")."""
    return ["+".join(arguments[0].decode() for arguments in redis_commands(trip)) for trip in trips]


def redis_commands(trip: bytes) -> Iterator[list[bytes]]:
    """The commands in a round trip, with their arguments."""
    at = 0

    def number() -> int:
        nonlocal at
        end = trip.index(b"\r\n", at)
        found, at = int(trip[at + 1 : end]), end + 2
        return found

    def text() -> bytes:
        nonlocal at
        length = number()
        found, at = trip[at : at + length], at + length + 2
        return found

    while at < len(trip):
        yield [text() for _ in range(number())]


def postgresql(trips: Sequence[bytes]) -> list[str]:
    """Statements of the frontend protocol 3 (PostgreSQL manual, "Message Formats"); a prepared one by its text."""
    prepared: dict[bytes, str] = {}
    return ["+".join(_postgresql_statements(trip, prepared)) for trip in trips]


def _postgresql_statements(trip: bytes, prepared: dict[bytes, str]) -> Iterator[str]:
    if trip[:1] == b"\0":  # the one kind of message without a type
        yield "connect"
        return
    at = 0
    while at < len(trip):
        kind, end = trip[at : at + 1], at + 1 + int.from_bytes(trip[at + 1 : at + 5])
        body = trip[at + 5 : end]
        match kind:
            case b"Q":
                yield _verb(body)
            case b"P":
                name, text = body.split(b"\0")[:2]
                prepared[name] = _verb(text)
                if name:
                    yield f"PREPARE {prepared[name]}"
            case b"B":
                yield prepared[body.split(b"\0")[1]]
        at = end


def mysql(trips: Sequence[bytes]) -> list[str]:
    """Statements of the client/server protocol (MySQL Internals, "Command Phase")."""
    return ["+".join(_mysql_commands(trip)) for trip in trips]


_MYSQL_COMMANDS = {0x01: "quit", 0x0E: "ping"}
_MYSQL_QUERY = 0x03


def _mysql_commands(trip: bytes) -> Iterator[str]:
    at = 0
    while at < len(trip):
        end = at + 4 + int.from_bytes(trip[at : at + 3], "little")
        sequence, command, body = trip[at + 3], trip[at + 4], trip[at + 5 : end]
        if sequence:
            yield "connect"
        elif command == _MYSQL_QUERY:
            yield _verb(body)
        else:
            yield _MYSQL_COMMANDS.get(command, f"command {command}")
        at = end


_TARGET = re.compile(rb"\r\nx-amz-target: *[^.\r]*\.(\w+)", re.IGNORECASE)


def aws(trips: Sequence[bytes]) -> list[str]:
    """Operations of AWS's JSON protocol over HTTP."""
    return ["+".join(each.decode() for each in _TARGET.findall(trip)) for trip in trips]


def _verb(statement: bytes) -> str:
    return statement.split(maxsplit=1)[0].strip(b";\0").decode().upper()
