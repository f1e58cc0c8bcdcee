"""A proxy in front of DynamoDB that does to each request what the request's own header asks for.

It keeps no plan: whoever sends a request says by :data:`ORDER` what is to become of it, so that a campaign
decides everything, by its seed, and two of them can share one proxy. One process, ``python -m lab.proof.wire
<upstream host:port>``, which prints its port and ends when its standard input does.
"""

import asyncio
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ORDER", "Wire"]

ORDER = "X-Proof-Order"
"""Name of the header. Its value is a word; after ``held``, ``stalled`` and ``land`` comes a name of the request."""

_DELAY = 0.003
"""Seconds; long enough for any other request to overtake, since a whole one takes two milliseconds."""

_IDLE = 1.0
"""Seconds after which an idle connection is not used again: the server may be about to close it."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LAST = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_ORDER = re.compile(rb"\r\n" + ORDER.encode() + rb": ([^\r]*)")

_THROTTLED = (
    "400 Bad Request",
    b'{"__type":"com.amazonaws.dynamodb.v20120810#ProvisionedThroughputExceededException","message":"slow down"}',
)
_UNAVAILABLE = ("503 Service Unavailable", b"<html>try later</html>")
_FAILED = (
    "500 Internal Server Error",
    b'{"__type":"com.amazonaws.dynamodb.v20120810#InternalServerError","message":"who knows"}',
)


class Wire:
    """The proxy, as a process that lives as long as the ``with`` block and never longer than this process.

    Args:
        upstream: ``host:port`` of the server behind.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.proof.wire", self._upstream],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


class _Upstream(asyncio.Protocol):
    """One connection to the server; carries one request at a time."""

    def __init__(self, idle: "list[_Upstream]") -> None:
        self._idle = idle
        self._received = b""
        self._answer: Callable[[bytes], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_fresh(self) -> bool:
        """Whether the server will surely answer here."""
        return asyncio.get_running_loop().time() < self._idle_since + _IDLE

    def close(self) -> None:
        """Use it no more."""
        assert self._transport is not None
        self._transport.close()

    def ask(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        """Send; ``answer`` gets the whole reply, or nothing if there is none."""
        assert self._transport is not None
        self._answer = answer
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        reply, self._received = _message(self._received)
        if reply:
            self._settle(reply)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self._settle(b"")

    def _settle(self, reply: bytes) -> None:
        answer, self._answer = self._answer, None
        if reply and not _LAST.search(reply, 0, reply.find(b"\r\n\r\n") + 2):
            self._idle_since = asyncio.get_running_loop().time()
            self._idle.append(self)
        if answer:
            answer(reply)


class _Switchboard:
    """What all connections of clients share: connections to the server, and the requests that are held."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._idle: list[_Upstream] = []
        self._begun: set[asyncio.Task[None]] = set()
        self.held: dict[str, bytes] = {}

    def ask(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        while self._idle:
            upstream = self._idle.pop()
            if upstream.is_fresh:
                upstream.ask(request, answer)
                return
            upstream.close()
        task = asyncio.get_running_loop().create_task(self._connect(request, answer))
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    async def _connect(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: _Upstream(self._idle), *self._address)
        upstream.ask(request, answer)


class _Client(asyncio.Protocol):
    """One connection of a client: executes the order of each of its requests."""

    def __init__(self, switchboard: _Switchboard) -> None:
        self._board = switchboard
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        request, self._received = _message(self._received)
        if request:
            found = _ORDER.search(request)
            word, _, name = found[1].decode().partition(" ") if found else ("pass", "", "")
            self._execute(word, name, request)

    def _execute(self, word: str, name: str, request: bytes) -> None:
        match word:
            case "pass":
                self._board.ask(request, self._reply)
            case "request-lost":
                self._close()
            case "reply-lost":
                self._board.ask(request, lambda reply: self._close())
            case "reset":
                self._board.ask(request, lambda reply: self._reset())
            case "torn":
                self._board.ask(request, self._tear)
            case "duplicated":
                self._board.ask(request, lambda reply: self._board.ask(request, self._reply))
            case "delayed":
                asyncio.get_running_loop().call_later(_DELAY, self._board.ask, request, self._reply)
            case "held":
                self._board.held[name] = request
                self._close()
            case "stalled":
                self._board.held[name] = request
            case "land":
                self._board.ask(self._board.held.pop(name), self._reply)
            case "throttled":
                self._reply(_response(*_THROTTLED))
            case "unavailable":
                self._reply(_response(*_UNAVAILABLE))
            case "failed":
                self._board.ask(request, lambda reply: self._reply(_response(*_FAILED)))
            case _:
                raise ValueError(word)

    def _reply(self, reply: bytes) -> None:
        assert self._transport is not None
        self._transport.write(reply)
        if not reply:
            self._close()

    def _tear(self, reply: bytes) -> None:
        self._reply(reply[: len(reply) - 2])
        self._close()

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _reset(self) -> None:
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _message(received: bytes) -> tuple[bytes, bytes]:
    """The whole message at the beginning, if it is there, and the rest."""
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return b"", received
    length = _LENGTH.search(received, 0, head + 2)
    end = head + 4 + (int(length[1]) if length else 0)
    return (received[:end], received[end:]) if len(received) >= end else (b"", received)


def _response(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _serve(upstream: str) -> None:
    host, _, port = upstream.partition(":")
    switchboard = _Switchboard(host, int(port))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(switchboard), "127.0.0.1", 0, backlog=1000)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    parent_gone = asyncio.Event()
    loop.add_reader(0, parent_gone.set)
    await parent_gone.wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
