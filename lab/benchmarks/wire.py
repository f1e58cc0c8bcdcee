"""Round trips, counted on the wire: a proxy between a client and its server that keeps what the client sends.

A round trip is what the client sends between two replies, however many commands or packets that are: a
pipeline is one, a transaction of three statements that waits for each is three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from lab.proxy import Proxy

__all__ = ["Protocol", "Tap", "aws", "mysql", "postgresql", "redis", "redis_commands", "trips_during"]

Protocol = Callable[[Sequence[bytes]], list[str]]
"""Names the commands of each round trip, given all that came since the client connected."""


class Tap(Proxy):
    """A proxy on this machine that keeps the round trips; see :class:`lab.proxy.Proxy`.

    Args:
        upstream: The port of the server behind, on this machine.
        protocol: How to name what is sent.
    """

    def __init__(self, upstream: int, protocol: Protocol) -> None:
        super().__init__(upstream, keeps_trips=True)
        self._protocol = protocol

    def named(self) -> list[str]:
        """All round trips so far, by name."""
        return self._protocol(self.trips)


def trips_during(taps: Sequence[Tap], act: Callable[[], object]) -> list[str]:
    """The round trips that ``act`` makes through ``taps``, by name."""
    before = [tap.round_trips for tap in taps]
    act()
    return [name for tap, count in zip(taps, before, strict=True) for name in tap.named()[count:] if name != _PART]


def redis(trips: Sequence[bytes]) -> list[str]:
    """Commands of RESP (redis.io, "Redis serialization protocol specification")."""
    names, begun = [], b""
    for trip in trips:
        begun += trip
        try:
            names.append("+".join(arguments[0].decode() for arguments in redis_commands(begun)))
            begun = b""
        except ValueError:
            names.append(_PART)
    return names


_PART = "part of a trip"
"""What ends in the middle of a command, as the server answers a long pipeline while it comes; the next one goes on."""


def redis_commands(trip: bytes) -> Iterator[list[bytes]]:
    """The commands in a round trip, with their arguments; ``ValueError`` if it ends in the middle of one."""
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
        if at > len(trip):
            raise ValueError("the trip ends in the middle of a command")
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
