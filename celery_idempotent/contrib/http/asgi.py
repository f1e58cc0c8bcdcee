"""Middleware for ASGI applications: Starlette, FastAPI, and any other."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Unpack

from celery import Celery

from celery_idempotent.contrib.http.guard import Buffer, HttpGuard, Response
from celery_idempotent.contrib.http.semantics import (
    Caller,
    HttpAnswer,
    HttpOptions,
    HttpRules,
    Problem,
    RequestFacts,
    require_function,
)
from celery_idempotent.protocol.store import Store

__all__ = ["IdempotencyMiddleware", "route_of"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def route_of(scope: Scope) -> str | None:
    """The path of a route of Starlette's or FastAPI's, such as ``/orders/{order_id}``; None where none is known."""
    for route in getattr(scope.get("app"), "routes", ()):
        match, _ = route.matches(scope)
        if match.name == "FULL":
            path: str | None = getattr(route, "path", None)
            return path
    return None


class IdempotencyMiddleware:
    """Have the effect of a request with an ``Idempotency-Key`` happen once, and answer its repetitions alike::

        app.add_middleware(IdempotencyMiddleware, store="redis://localhost/0", caller=lambda scope: scope["user"].id)

    The application's response is sent when it is recorded, as a whole, after the application has returned: Starlette's
    background tasks come before it. A client that hangs up does not stop the application; his repetition gets the
    response. In views :func:`celery_idempotent.current_attempt` has steps, commits and transactions.

    Args:
        app: The ASGI application.
        caller: Who calls, of the ASGI scope; see :class:`~celery_idempotent.contrib.http.semantics.HttpRules`, as for
            all options. It may be awaited.
        store: Where requests are recorded: a URL or a store.
        celery: The Celery app whose ``idempotency_*`` settings count; default, without ``store``: the current app.
        only: Of the scope, whether a request is any of our business, such as ``lambda scope:
            scope["path"].startswith("/api/")``. Default: all are.
        route: Of the scope, the route's path, by which people know a request. Default: Starlette's.
        options: See :class:`~celery_idempotent.contrib.http.semantics.HttpRules`.

    Raises:
        PolicyError: An option cannot work.
    """

    def __init__(
        self,
        app: App,
        *,
        caller: Caller | None = None,
        store: str | Store | None = None,
        celery: Celery | None = None,
        only: Callable[[Scope], bool] | None = None,
        route: Callable[[Scope], str | None] = route_of,
        **options: Unpack[HttpOptions],
    ) -> None:
        self._app = app
        self._guard = HttpGuard(caller, store, celery, options)
        require_function("only", only)
        self._only = only
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (self._only is not None and not self._only(scope)):
            await self._app(scope, receive, send)
            return
        answered = await self._guard.answer(_AsgiExchange(self._app, scope, receive, send, self._route))
        if isinstance(answered, HttpAnswer):
            headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answered.headers]
            if answered.status != 204:
                headers.append((b"content-length", str(len(answered.body)).encode()))
            await send({"type": "http.response.start", "status": answered.status, "headers": headers})
            await send({"type": "http.response.body", "body": answered.body, "more_body": False})
        elif answered is not None:
            await send(answered.start)
            for chunk in answered.buffer.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _AsgiExchange:
    """A request; who reads its body after it was read gets all of it."""

    is_async = True

    def __init__(
        self, app: App, scope: Scope, receive: Receive, send: Send, route: Callable[[Scope], str | None]
    ) -> None:
        self._app = app
        self.native = scope
        self.method = scope["method"]
        self._receive = receive
        self._send = send
        self._route = route
        self._body = bytearray()
        self._has_more = True
        self._is_given = True
        self._is_disconnected = False

    def lines(self, name: str) -> list[str]:
        wanted = name.lower().encode()
        return [value.decode("latin-1") for each, value in self.native["headers"] if each.lower() == wanted]

    async def read(self, rules: HttpRules) -> bytes | Problem | None:
        self._is_given = False
        while self._has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_disconnected = True
                return None
            self._body += message.get("body", b"")
            self._has_more = message.get("more_body", False)
            if len(self._body) > rules.max_request:
                return Problem.BODY_TOO_LARGE
        declared = next(iter(self.lines("Content-Length")), "")
        return Problem.BODY_MALFORMED if declared and int(declared) != len(self._body) else bytes(self._body)

    def facts(self, **known: Any) -> RequestFacts:
        return RequestFacts(
            path=self.native["path"],
            query=self.native.get("query_string", b"").decode("latin-1"),
            content_type=next(iter(self.lines("Content-Type")), ""),
            **known,
            route=self._route(self.native),
        )

    async def respond(self, limit: int) -> "Response[_Recorder | None]":
        recorder = _Recorder(bytes(self._body), limit)
        # Without extensions: by them a server would send what nobody has recorded.
        await self._app({**self.native, "extensions": {}}, recorder.receive, recorder.send)
        if not (recorder.start and recorder.is_complete.is_set()):
            raise RuntimeError("the application returned without a complete response")
        lines = recorder.start.get("headers", ())
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in lines)
        return Response(recorder, recorder.start["status"], headers, recorder.buffer)

    async def pass_on(self) -> None:
        if not self._is_disconnected:
            await self._app(self.native, self._give, self._send)

    async def _give(self) -> Message:
        """What was read, and then what comes."""
        if self._is_given:
            return await self._receive()
        self._is_given = True
        return {"type": "http.request", "body": bytes(self._body), "more_body": self._has_more}


class _Recorder:
    """What an application reads and sends in place of the server's."""

    def __init__(self, body: bytes, limit: int) -> None:
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self.start: Message = {}
        self.buffer = Buffer(limit)
        self.is_complete = asyncio.Event()

    async def receive(self) -> Message:
        """The whole request; then, once the response is complete, that the client is gone."""
        if self._request is not None:
            request, self._request = self._request, None
            return request
        await self.is_complete.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep a part of the response."""
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body" and not self.is_complete.is_set():
            self.buffer.write(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_complete.set()
