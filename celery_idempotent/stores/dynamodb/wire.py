"""One HTTP exchange with DynamoDB, on the connections of botocore's own HTTP session.

botocore connects: name resolution, TLS, certificates, proxies and tunnels are its session's, and so are the errors of
all that. On a connection that it has made and used, a request is written, and its reply read by the standard library,
without what botocore and urllib3 do around that: four fifths of the CPU time of an exchange.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from queue import Empty, Full
from typing import Any

from botocore.awsrequest import AWSRequest
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from urllib3.util.connection import is_connection_dropped

_PLAIN = re.compile(r"/[A-Za-z0-9/._~-]*")
"""What urllib3 sends as it is. To a proxy that is no tunnel, requests name the server, too."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply, as botocore's retries and parsers take it."""

    status_code: int
    headers: Any
    content: bytes


class _Idle:
    """Idle connections, in the place of urllib3's queue, without its lock.

    Where a signal, such as that of a soft time limit, raises while Python code takes a lock, nobody gives it back, and
    every later request waits for ever. A list needs no lock for what is left, as nobody waits here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._connections: list[Any] = []

    def get(self, block: bool = False, timeout: float | None = None) -> Any:
        """The connection that was put here last."""
        try:
            return self._connections.pop()
        except IndexError:
            raise Empty from None

    def put(self, connection: Any, block: bool = False) -> None:
        """Keep a connection, unless there are enough."""
        if len(self._connections) >= self._most:
            raise Full
        self._connections.append(connection)

    def qsize(self) -> int:
        """How many there are."""
        return len(self._connections)


class Wire:
    """The way to one URL.

    Args:
        session: botocore's HTTP session.
        url: Where requests go, by POST.
        host: The ``Host`` header that they have.
    """

    def __init__(self, session: Any, url: str, host: str) -> None:
        self._session = session
        self._url = url
        self._pool, target = _pool(session, url)
        self._head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"

    def exchange(self, headers: Mapping[str, str], body: bytes) -> HttpReply:
        """Send a request and read its reply.

        Raises:
            HTTPClientError: botocore's, of whichever kind.
        """
        return self._at_once(headers, body) or self._by_session(headers, body)

    def _by_session(self, headers: Mapping[str, str], body: bytes) -> HttpReply:
        request = AWSRequest("POST", self._url, headers, body)
        reply = self._session.send(request.prepare())
        return HttpReply(reply.status_code, reply.headers, reply.content)

    def _at_once(self, headers: Mapping[str, str], body: bytes) -> HttpReply | None:
        """The same; None if no connection is open and idle, or if the session must refuse these headers."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            return None
        connection = self._idle()
        if connection is None:
            return None
        stays_open = False
        try:
            connection.sock.sendall(f"{self._head}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            with HTTPResponse(connection.sock, method="POST") as response:
                response.begin()
                content = response.read()
                # After an interim reply another follows, and would be the next request's.
                stays_open = not response.will_close and response.status >= 200
            return HttpReply(response.status, response.headers, content)
        except TimeoutError as error:
            raise ReadTimeoutError(endpoint_url=self._url, error=error) from error
        except (OSError, HTTPException) as error:
            raise ConnectionClosedError(endpoint_url=self._url, error=error) from error
        finally:
            if not stays_open:
                connection.close()
            self._pool._put_conn(connection)

    def _idle(self) -> Any:
        """A connection that the session has made and left; to make one is its part, with all that it checks."""
        try:
            connection = self._pool.pool.get(block=False)
        except (AttributeError, Empty):  # closed, or never open; or every connection is in use
            return None
        if connection is not None and not is_connection_dropped(connection):
            return connection
        if connection is not None:
            connection.close()
        self._pool._put_conn(None)
        return None


def _pool(session: Any, url: str) -> tuple[Any, str]:
    """The pool of the session's connections to ``url``, and what a request on them asks for.

    None if urllib3 changes what they ask for, or a proxy needs to know more, or botocore or urllib3 are other ones.
    """
    try:
        proxy = session._proxy_config.proxy_url_for(url)
        target = session._get_request_target(url, proxy)
        manager = session._get_connection_manager(url, proxy)
        for scheme, kind in manager.pool_classes_by_scheme.items():
            if kind.QueueCls is not _Idle:
                manager.pool_classes_by_scheme[scheme] = type(kind.__name__, (kind,), {"QueueCls": _Idle})
        pool = manager.connection_from_url(url)
        _ = pool.pool.get, pool._put_conn
    except AttributeError:
        return None, ""
    return (pool if _PLAIN.fullmatch(target) else None), target
