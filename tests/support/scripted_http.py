"""An HTTP server that answers by a script, and keeps what it was asked."""

import json
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Self
from zlib import crc32

_DATE = "Sun, 22 Nov 2026 08:00:00 GMT"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came over the wire."""

    method: str
    target: str
    #: The names of its headers, in their order.
    names: tuple[str, ...]
    headers: Mapping[str, str]
    body: bytes
    #: Which connection it came on, counted from 0.
    connection: int

    @property
    def json(self) -> Any:
        """Its body."""
        return json.loads(self.body)


def answer(status: int = 200, body: bytes = b"{}", **headers: str) -> bytes:
    """A reply with a length, a date and a right checksum, unless ``headers`` say otherwise; ``_`` stands for ``-``."""
    lines = {"content_length": f"{len(body)}", "date": _DATE, "x_amz_crc32": f"{crc32(body)}", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items() if value)
    return f"HTTP/1.1 {status} OK\r\n{head}\r\n".encode() + body


def refusal(code: str, message: str = "why", status: int = 400, **more: Any) -> bytes:
    """An error of DynamoDB's."""
    kind = f"com.amazonaws.dynamodb.v20120810#{code}"
    return answer(status, json.dumps({"__type": kind, "message": message, **more}).encode())


CLOSE = b"close"
"""Instead of an answer: the connection is closed."""

SILENCE = b"silence"
"""Instead of an answer: nothing."""


@dataclass
class ScriptedServer:
    """Gives each request the next answer; when there is none left, a success."""

    #: The answers; after one with ``connection: close`` in small letters the connection is closed.
    script: list[bytes] = field(default_factory=list)
    #: For a server that speaks TLS; with it, ``CONNECT`` is answered as a proxy does, by this server itself.
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = field(default_factory=list)
    #: The targets that a proxy was asked to connect to.
    tunnels: list[str] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Only this wakes whoever waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections, as a server does with idle ones."""
        for each in self.connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                number = len(self.connections) - 1
                threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError), connection:
            if self.tls is not None:
                first = connection.recv(7, socket.MSG_PEEK)
                if first == b"CONNECT":
                    with connection.makefile("rb") as stream:
                        self.tunnels.append(_head(stream)[0].split()[1])
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                connection = self.tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as stream:
                while self._answer(connection, stream, number):
                    pass

    def _answer(self, connection: socket.socket, stream: BinaryIO, number: int) -> bool:
        line, fields = _head(stream)
        if not line:
            return False
        headers = dict(fields)
        method, target, _ = line.split()
        body = stream.read(int(headers.get("content-length", 0)))
        self.asked.append(Asked(method, target, tuple(name for name, _ in fields), headers, body, number))
        reply = self.script.pop(0) if self.script else answer()
        if reply == SILENCE:
            stream.read()
        elif reply != CLOSE:
            connection.sendall(reply)
            return b"connection: close" not in reply
        return False


def _head(stream: BinaryIO) -> tuple[str, list[tuple[str, str]]]:
    line = stream.readline().decode().strip()
    fields = []
    while field := stream.readline().decode().strip():
        name, value = re.split(": *", field, maxsplit=1)
        fields.append((name.lower(), value))
    return line, fields
