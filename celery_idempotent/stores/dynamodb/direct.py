"""The direct path: the first try of a PutItem, without what boto3 does around each.

It sends what botocore would send, on the connections of botocore's own HTTP session: name resolution, TLS,
certificates, proxies and tunnels are the session's. It reads the two answers that nearly every write gets, a success
and a lost condition. Whatever else comes, or does not come, is left to the client, which sends the same once more: so
errors, retries and their quota are botocore's, and a write that arrives twice is recognised by its revision.

What botocore would send is asked once, and later requests differ in their date and body alone. Endpoint, Region, user
agent, target and what is signed are botocore's: by parameters, environment, profile, partition, FIPS, dual stack,
account, and whatever it comes to know later. What is left for each request is hashing.
"""

import hmac
import re
import time
from base64 import b64decode, b64encode
from binascii import crc32
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from http.client import HTTPException, HTTPResponse, IncompleteRead
from json import JSONEncoder, loads
from queue import Empty, Full
from typing import Any
from uuid import uuid4

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import ChecksumError, HTTPClientError
from botocore.parsers import ResponseParserError
from urllib3.util.connection import is_connection_dropped

from celery_idempotent.stores.dynamodb.items import LOST

_OWN = frozenset(
    {
        "accept-encoding",
        "authorization",
        "content-length",
        "host",
        "x-amz-date",
        "x-amz-security-token",
        "amz-sdk-invocation-id",
        "x-amzn-trace-id",
    }
)
"""Headers that each request has of its own, that HTTP gives it, or, the last one, that a Lambda invocation gives."""

_SCHEME = "AWS4-HMAC-SHA256 Credential="
_CONTENT = "application/x-amz-json-1.0"
_DATE = "the-date-of-the-request"
_DIGEST = 64
"""Characters of a SHA-256 in hexadecimal, with which a canonical request ends."""


class Unfit(Exception):
    """The direct path would not send what botocore sends, or somebody would miss it; the reason for people."""


class _Created(Exception):
    """botocore has made the request; it stops here."""

    def __init__(self, request: Any) -> None:
        self.request = request


_asks_for_request: ContextVar[bool] = ContextVar("asks_for_request", default=False)


class Signature:
    """Signature Version 4 of requests to ``url`` by POST, in the form that botocore gives it.

    ``headers`` are those that are signed, without date and token.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], credentials: ReadOnlyCredentials, region: str, service: str
    ) -> None:
        #: The header with the token of temporary credentials, if they are.
        self.token = {"X-Amz-Security-Token": credentials.token} if credentials.token else {}
        botocores = SigV4Auth(credentials, service, region)
        request = AWSRequest("POST", url, {**headers, **self.token, "X-Amz-Date": _DATE})
        canonical = botocores.canonical_request(request)
        self._before, self._between = canonical[:-_DIGEST].split(_DATE)
        #: The ``Host`` header that is signed.
        self.host = next(line for line in canonical.splitlines() if line.startswith("host:")).removeprefix("host:")
        self._scope = f"{region}/{service}/aws4_request"
        self._credential = f"{_SCHEME}{credentials.access_key}"
        self._headers = botocores.signed_headers(botocores.headers_to_sign(request))
        self._secret = f"AWS4{credentials.secret_key}"
        self._key_of_a_day = "", b""

    def headers(self, body: bytes) -> dict[str, str]:
        """``X-Amz-Date`` and ``Authorization`` of a request that leaves now."""
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        day = date[:8]
        known, key = self._key_of_a_day
        if known != day:
            key = self._secret.encode()
            for each in (day, *self._scope.split("/")):
                key = hmac.digest(key, each.encode(), "sha256")
            self._key_of_a_day = day, key
        canonical = f"{self._before}{date}{self._between}{sha256(body).hexdigest()}"
        text = f"AWS4-HMAC-SHA256\n{date}\n{day}/{self._scope}\n{sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        signed = f"{self._credential}/{day}/{self._scope}, SignedHeaders={self._headers}, Signature={signature}"
        return {"X-Amz-Date": date, "Authorization": signed}


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What all PutItem requests with some credentials have in common."""

    url: str
    #: Not shown, as the token among the headers is not: traces of errors show what variables hold.
    credentials: ReadOnlyCredentials = field(repr=False)
    lasting: Mapping[str, str] = field(repr=False)
    signature: Signature

    def headers(self, body: bytes) -> dict[str, str]:
        """The headers of a request that leaves now."""
        return {**self.lasting, **self.signature.headers(body), "amz-sdk-invocation-id": str(uuid4())}


def template_of(client: Any, parameters: Mapping[str, Any], credentials: ReadOnlyCredentials | None) -> RequestTemplate:
    """Learn how ``client`` would send a PutItem, without sending it; ``Unfit`` where that cannot be repeated.

    ``parameters`` must do no harm: whoever answers requests in the server's place may get to see them.
    """
    if (client.meta.config.retries or {}).get("mode") == "adaptive":
        raise Unfit("adaptive retries learn from every answer")
    request = _request_of(client, parameters)
    headers = {name: value.decode() if isinstance(value, bytes) else value for name, value in request.headers.items()}
    if client.meta.events.emit("before-send.dynamodb.PutItem", request=request.prepare()):
        raise Unfit("a hook answers in the server's place, as moto does, or sees all requests")
    authorization = headers.get("Authorization", "")
    if credentials is None or not authorization.startswith(_SCHEME) or headers.get("Content-Type") != _CONTENT:
        raise Unfit("the client does not sign JSON by Signature Version 4")
    scope, signed_headers = authorization.removeprefix(_SCHEME).split(", ")[:2]
    _, _, region, service, _ = scope.rsplit("/", 4)
    lasting = {name: value for name, value in headers.items() if name.lower() not in _OWN}
    signed = signed_headers.removeprefix("SignedHeaders=").split(";")
    signature = Signature(
        request.url,
        {name: value for name, value in lasting.items() if name.lower() in signed},
        credentials,
        region,
        service,
    )
    return RequestTemplate(request.url, credentials, {**lasting, **signature.token}, signature)


def _request_of(client: Any, parameters: Mapping[str, Any]) -> Any:
    token = _asks_for_request.set(True)
    try:
        client.put_item(**parameters)
    except _Created as created:
        return created.request
    finally:
        _asks_for_request.reset(token)
    raise Unfit("calls of the client are intercepted")


def _stop(request: Any, operation_name: str, **_: Any) -> None:
    if not _asks_for_request.get():
        return
    # Before it, botocore asks for an endpoint: that request, repeated, would succeed and write nothing.
    if operation_name != "PutItem" or "discovery" in request.context:
        raise Unfit("endpoints are discovered, and change")
    raise _Created(request)


_PLAIN = re.compile(r"/[A-Za-z0-9/._~-]*")
"""What urllib3 sends as it is. To a proxy that is no tunnel, requests name the server, too."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply of the server."""

    status_code: int
    headers: Any
    content: bytes


class DirectPath:
    """The direct path of one process, by the client's HTTP session; ``harmless`` is a PutItem that changes nothing."""

    def __init__(self, client: Any, credentials: Credentials | None, harmless: Mapping[str, Any]) -> None:
        self._client = client
        self._credentials = credentials
        self._harmless = harmless
        self._known: tuple[RequestTemplate, Wire] | None = None
        client.meta.events.register_last("request-created", _stop)

    def put(self, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """The reply, as far as the store looks at it; None: the client must ask. ``Unfit``: it must for all writes."""
        template, wire = self._way()
        body = _ENCODER.encode(parameters).encode()
        try:
            return _read(wire.exchange(template.headers(body), body))
        except (HTTPClientError, HTTPException, OSError):
            return None

    def _way(self) -> "tuple[RequestTemplate, Wire]":
        credentials = self._credentials.get_frozen_credentials() if self._credentials else None
        known = self._known
        if known is None or known[0].credentials != credentials:
            session = getattr(getattr(self._client, "_endpoint", None), "http_session", None)
            if session is None:
                raise Unfit("this botocore keeps its connections elsewhere")
            template = template_of(self._client, self._harmless, credentials)
            known = self._known = template, Wire(session, template.url, template.signature.host)
        return known


_ENCODER = JSONEncoder(default=lambda value: b64encode(value).decode())


def _read(reply: HttpReply) -> dict[str, Any] | None:
    """A success, or a lost condition; None if it is something else."""
    is_lost = reply.status_code == 400 and LOST.encode() in reply.content
    if reply.status_code >= 300 and not is_lost:
        return None
    promised, actual = reply.headers.get("x-amz-crc32"), str(crc32(reply.content))
    if promised not in {None, actual}:
        raise ChecksumError(checksum_type="crc32", expected_checksum=promised, actual_checksum=actual)
    try:
        body = loads(reply.content)
    except ValueError as error:
        raise ResponseParserError(f"no JSON: {reply.content[:200]!r}") from error
    if not isinstance(body, dict):
        raise ResponseParserError(f"no object: {reply.content[:200]!r}")
    metadata = {"HTTPStatusCode": reply.status_code, "HTTPHeaders": {"date": reply.headers.get("date", "")}}
    if not is_lost:
        # DynamoDB has one way to say it; who answers in its place may have taken a request, or an error, for done.
        if reply.status_code != 200 or "__type" in body:
            raise ResponseParserError(f"no success: {reply.status_code} {reply.content[:200]!r}")
        return {"ResponseMetadata": metadata}
    if str(body.get("__type")).rpartition("#")[2] != LOST:
        return None
    parsed = {"Error": {"Code": LOST, "Message": body.get("message", "")}, "ResponseMetadata": metadata}
    if body.get("Item"):
        parsed["Item"] = {name: _decoded(value) for name, value in body["Item"].items()}
    return parsed


def _decoded(value: dict[str, Any]) -> dict[str, Any]:
    return {"B": b64decode(value["B"])} if "B" in value else value


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
        return len(self._connections)


class Wire:
    """The way to one URL, by POST over connections of botocore's session; ``host`` is the header of that name."""

    def __init__(self, session: Any, url: str, host: str) -> None:
        self._session = session
        self._url = url
        self._pool, target = _pool(session, url)
        self._head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n"

    def exchange(self, headers: Mapping[str, str], body: bytes) -> HttpReply:
        """Send a request and read its reply: by the session, if no connection is idle or it must refuse the headers.

        On a connection that the session has made, without what botocore and urllib3 do around that: four fifths of the
        CPU time of an exchange.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        is_clean = lines.count("\n") == lines.count("\r") == len(headers)
        connection = self._idle() if is_clean else None
        if connection is None:
            sent = self._session.send(AWSRequest("POST", self._url, headers, body).prepare())
            return HttpReply(sent.status_code, sent.headers, sent.content)
        stays_open = False
        try:
            connection.sock.sendall(f"{self._head}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            with HTTPResponse(connection.sock, method="POST") as response:
                response.begin()
                try:
                    content = response.read()
                    # After an interim reply another follows, and would be the next request's.
                    stays_open = not response.will_close and response.status >= 200
                except IncompleteRead as torn:
                    content = torn.partial  # boto3 would take it for a whole one
            return HttpReply(response.status, response.headers, content)
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
