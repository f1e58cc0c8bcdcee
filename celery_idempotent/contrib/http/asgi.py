"""Middleware for ASGI applications: Starlette, FastAPI, and any other."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from inspect import isawaitable
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
    caller_of,
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
        """Answer one connection."""
        if scope["type"] != "http" or (self._only is not None and not self._only(scope)):
            await self._app(scope, receive, send)
            return
        rules = self._guard.rules
        request_body = _RequestBody(receive, rules)
        facts = await self._facts(scope, request_body)
        if isinstance(facts, Problem) and rules.refuses:
            await _send_answer(rules.refusal(facts), send)
        elif isinstance(facts, RequestFacts):
            await self._answer(facts, scope, send)
        elif not request_body.is_disconnected:
            with self._guard.unprotected():
                await self._app(scope, request_body.receive, send)

    async def _facts(self, scope: Scope, request_body: "_RequestBody") -> RequestFacts | Problem | None:
        """What a request is about, or why it is refused; None where it runs unprotected, or its client is gone."""
        guard = self._guard
        key = guard.rules.key_of(scope["method"], _lines(scope, b"idempotency-key"))
        if not isinstance(key, str):
            return key
        found = guard.caller(scope, _line(scope, b"authorization"), _line(scope, b"cookie"))
        caller = caller_of(await found if isawaitable(found) else found)
        if isinstance(caller, Problem):
            return caller
        # Not before: whoever may not come must not have a body kept here.
        body = await request_body.read(_line(scope, b"content-length"))
        if not isinstance(body, bytes):
            return body
        return RequestFacts(
            method=scope["method"],
            path=scope["path"],
            query=scope.get("query_string", b"").decode("latin-1"),
            content_type=_line(scope, b"content-type") or "",
            body=body,
            key=key,
            caller=caller,
            route=self._route(scope),
        )

    async def _answer(self, facts: RequestFacts, scope: Scope, send: Send) -> None:
        guard = self._guard

        async def make() -> Response[_Recorder]:
            recorder = _Recorder(facts.body, guard.rules.max_response)
            # Without extensions: by them a server would send what nobody has recorded.
            await self._app({**scope, "extensions": {}}, recorder.receive, recorder.send)
            return recorder.response()

        response = await guard.call_on_loop(facts, make)
        if isinstance(response, HttpAnswer):
            await _send_answer(response, send)
        else:
            await response.send_to(send)


class _RequestBody:
    """The body of a request, read in advance; who reads it afterwards gets all of it."""

    def __init__(self, receive: Receive, rules: HttpRules) -> None:
        self._receive = receive
        self._rules = rules
        self._body = bytearray()
        self._has_more = True
        self._is_given = True
        self.is_disconnected = False

    async def read(self, declared: str | None) -> bytes | Problem | None:
        """All of it, or what is wrong with it; None where the client is gone."""
        if problem := self._rules.problem_of_length(declared):
            return problem
        self._is_given = False
        while self._has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
                return None
            self._body += message.get("body", b"")
            self._has_more = message.get("more_body", False)
            if len(self._body) > self._rules.max_request:
                return Problem.BODY_TOO_LARGE
        return Problem.BODY_MALFORMED if declared and int(declared) != len(self._body) else bytes(self._body)

    async def receive(self) -> Message:
        """What was read, and then what comes."""
        if self._is_given:
            return await self._receive()
        self._is_given = True
        return {"type": "http.request", "body": bytes(self._body), "more_body": self._has_more}


class _Recorder:
    """What an application reads and sends in place of the server's."""

    def __init__(self, body: bytes, limit: int) -> None:
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._start: Message | None = None
        self._buffer = Buffer(limit)
        self._is_complete = asyncio.Event()

    async def receive(self) -> Message:
        """The whole request; then, once the response is complete, that the client is gone."""
        if self._request is not None:
            request, self._request = self._request, None
            return request
        await self._is_complete.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep a part of the response."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and not self._is_complete.is_set():
            self._buffer.write(message.get("body", b""))
            if not message.get("more_body", False):
                self._is_complete.set()

    def response(self) -> "Response[_Recorder]":
        """The response."""
        if self._start is None or not self._is_complete.is_set():
            raise RuntimeError("the application returned without a complete response")
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in self._start.get("headers", ()))
        return Response(self, self._start["status"], headers, self._buffer)

    async def send_to(self, send: Send) -> None:
        """Send it."""
        assert self._start is not None
        await send(self._start)
        for chunk in self._buffer.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_answer(answer: HttpAnswer, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    if answer.status != 204:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


def _line(scope: Scope, name: bytes) -> str | None:
    return next(iter(_lines(scope, name)), None)


def _lines(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for each, value in scope["headers"] if each.lower() == name]
