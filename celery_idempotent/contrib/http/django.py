"""A decorator for Django's views, sync and async, and middleware for all of them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from inspect import isawaitable
from typing import Any, Unpack, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from celery import Celery
from django.conf import settings
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.exception import response_for_exception
from django.db import connections
from django.http import Http404, HttpRequest, HttpResponse, RawPostDataException, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve
from django.utils.module_loading import import_string

from celery_idempotent.contrib.http.guard import Buffer, HttpGuard, Response
from celery_idempotent.contrib.http.semantics import (
    Caller,
    HttpAnswer,
    HttpOptions,
    Problem,
    RequestFacts,
    caller_of,
    require_function,
)
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.store import Store

__all__ = ["IdempotentViewMiddleware", "idempotent_view"]

View = Callable[..., Any]
Route = Callable[[HttpRequest], str | None]

_RESPONSES = (Http404, PermissionDenied, BadRequest, SuspiciousOperation)
"""What a view raises in place of returning a response."""


def idempotent_view(
    *,
    caller: Caller | None = None,
    store: str | Store | None = None,
    celery: Celery | None = None,
    **options: Unpack[HttpOptions],
) -> Callable[[View], View]:
    """Have the effect of a request with an ``Idempotency-Key`` happen once, and answer its repetitions alike::

        @idempotent_view(store="django://default", caller=lambda request: request.user.pk)
        def charge(request): ...

    The view's response is sent when it is recorded, streams included. With ``ATOMIC_REQUESTS`` mark the view by
    ``transaction.non_atomic_requests``, above this.

    Args:
        caller: Who calls, of Django's request; see :class:`~celery_idempotent.contrib.http.semantics.HttpRules`. Of an
            async view it may be awaited.
        store: Where requests are recorded: a URL or a store.
        celery: The Celery app whose ``idempotency_*`` settings count; default, without ``store``: the current app.
        options: See :class:`~celery_idempotent.contrib.http.semantics.HttpRules`.

    Raises:
        PolicyError: An option cannot work.
    """
    guard = _ViewGuard(caller, store, celery, options)

    def decorated(view: View) -> View:
        if iscoroutinefunction(view):

            @wraps(view)
            async def awaited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
                async def respond() -> HttpResponseBase:
                    try:
                        return await _rendered_on_loop(await view(request, *args, **kwargs))
                    except _RESPONSES as error:
                        return await sync_to_async(response_for_exception)(request, error)

                return await guard.answer_on_loop(request, respond, _route_of)

            return awaited

        @wraps(view)
        def called(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            def respond() -> HttpResponseBase:
                try:
                    return _rendered(view(request, *args, **kwargs))
                except _RESPONSES as error:
                    return response_for_exception(request, error)

            return guard.answer(request, respond, _route_of)

        return called

    return decorated


class IdempotentViewMiddleware:
    """As :func:`idempotent_view`, for all views; its options are the setting ``IDEMPOTENT_REQUESTS``::

        MIDDLEWARE = [..., "celery_idempotent.contrib.http.django.IdempotentViewMiddleware"]
        IDEMPOTENT_REQUESTS = {"store": "django://default", "caller": "shop.accounts.tenant_of"}

    Put it below what authenticates. Functions may be given by their dotted names; ``only`` is one of the request, and
    says whether it is any of our business. Responses that Django makes of exceptions are responses like any other; with
    ``ATOMIC_REQUESTS`` a response is recorded after its transaction, so let the view commit by the attempt instead.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        options = dict(getattr(settings, "IDEMPOTENT_REQUESTS", {}))
        for name in ("caller", "outcomes", "only"):
            if isinstance(options.get(name), str) and "." in options[name]:
                options[name] = import_string(options[name])
        self._only = options.pop("only", None)
        require_function("only", self._only)
        caller, store, celery = (options.pop(name, None) for name in ("caller", "store", "celery"))
        self._guard = _ViewGuard(caller, store, celery, cast(HttpOptions, options))
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Answer one request."""
        if self._only is not None and not self._only(request):
            return self._get_response(request)
        answer = self._guard.answer_on_loop if self._is_async else self._guard.answer
        return answer(request, partial(self._get_response, request), _resolved)

    def process_exception(self, request: HttpRequest, error: Exception) -> None:
        """Note what the view raised: the gate is to see it, and not only the page that Django makes of it."""
        request._idempotent_raised = error  # type: ignore[attr-defined]


class _ViewGuard(HttpGuard):
    """What decorator and middleware share."""

    def answer(self, request: HttpRequest, respond: Callable[[], HttpResponseBase], route: Route) -> HttpResponseBase:
        """The response to a request."""
        key = self._key_of(request)
        facts = self._facts(request, key, self._caller_of(request, key), route)
        if isinstance(facts, Problem) and self.rules.refuses:
            return _response(self.rules.refusal(facts))
        if not isinstance(facts, RequestFacts):
            with self.unprotected():
                return respond()
        answered = self.call(facts, lambda: self._whole(request, respond()))
        return _response(answered)

    async def answer_on_loop(
        self, request: HttpRequest, respond: Callable[[], Awaitable[HttpResponseBase]], route: Route
    ) -> HttpResponseBase:
        """As :meth:`answer`, awaited."""
        key = self._key_of(request)
        caller = self._caller_of(request, key)
        facts = self._facts(request, key, await caller if isawaitable(caller) else caller, route)
        if isinstance(facts, Problem) and self.rules.refuses:
            return _response(self.rules.refusal(facts))
        if not isinstance(facts, RequestFacts):
            with self.unprotected():
                return await respond()

        async def make() -> Response[HttpResponseBase]:
            return await self._whole_on_loop(request, await respond())

        answered = await self.call_on_loop(facts, make)
        return _response(answered)

    def _key_of(self, request: HttpRequest) -> str | Problem | None:
        """The key, or why the request is refused before its body is read; None where it runs unprotected."""
        line = request.headers.get("Idempotency-Key")
        key = self.rules.key_of(request.method or "", [] if line is None else [line])
        if isinstance(key, str) and self.rules.refuses:
            _refuse_transaction()
        return key

    def _caller_of(self, request: HttpRequest, key: str | Problem | None) -> Any:
        """What the author says about who calls, or what has to be awaited for that; None where nobody asks."""
        if not isinstance(key, str):
            return None
        return self.caller(request, request.headers.get("Authorization"), request.headers.get("Cookie"))

    def _facts(
        self, request: HttpRequest, key: str | Problem | None, named: Any, route: Route
    ) -> RequestFacts | Problem | None:
        """What a request is about, or why it is refused; None where it runs unprotected."""
        if not isinstance(key, str):
            return key
        caller = caller_of(named)
        if isinstance(caller, Problem):
            return caller
        if problem := self.rules.problem_of_length(request.META.get("CONTENT_LENGTH")):
            return problem
        try:
            body = request.body
        except RawPostDataException:
            if self.rules.refuses:
                raise
            return None
        if len(body) > self.rules.max_request:
            return Problem.BODY_TOO_LARGE
        return RequestFacts(
            method=request.method or "",
            path=request.path,
            query=request.META.get("QUERY_STRING", ""),
            content_type=request.content_type or "",
            body=body,
            key=key,
            caller=caller,
            route=route(request),
        )

    def _whole(self, request: HttpRequest, response: HttpResponseBase) -> Response[HttpResponseBase]:
        """The response with all of its body."""
        if not isinstance(response, StreamingHttpResponse):
            return _response_to(request, response, cast(HttpResponse, response).content)
        buffer = Buffer(self.rules.max_response).fill(cast(Iterator[bytes], response))
        _close_sources(response)
        response.streaming_content = buffer.chunks()
        return _response_to(request, response, buffer)

    async def _whole_on_loop(self, request: HttpRequest, response: HttpResponseBase) -> Response[HttpResponseBase]:
        """As :meth:`_whole`, awaited."""
        if not isinstance(response, StreamingHttpResponse):
            return self._whole(request, response)
        buffer = Buffer(self.rules.max_response)
        if response.is_async:
            async for chunk in cast(AsyncIterator[bytes], response.streaming_content):
                buffer.write(chunk)
        else:
            await sync_to_async(buffer.fill)(cast(Iterator[bytes], response.streaming_content))
        await sync_to_async(_close_sources)(response)
        response.streaming_content = _awaited(buffer.chunks())
        return _response_to(request, response, buffer)


def _response_to(request: HttpRequest, response: HttpResponseBase, body: bytes | Buffer) -> Response[HttpResponseBase]:
    raised = getattr(request, _RAISED, None) if response.status_code >= 500 else None
    return Response(response, response.status_code, response.items(), body, raised)


def _close_sources(response: HttpResponseBase) -> None:
    """Close what the view has opened to stream from it; ``response.close()`` would tell that the request is over."""
    sources: list[Callable[[], object]] = response._resource_closers  # type: ignore[attr-defined]  # of Django's own
    while sources:
        with suppress(Exception):  # as Django does
            sources.pop(0)()


_RAISED = "_idempotent_raised"


async def _awaited(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for each in chunks:
        yield each


def _rendered(response: Any) -> HttpResponseBase:
    """What a view returned; a response of a template is rendered, as later is too late."""
    if not isinstance(response, HttpResponseBase):
        raise TypeError(f"a view returned {type(response).__name__}, which is no response")
    render = getattr(response, "render", None)
    return render() if callable(render) else response


async def _rendered_on_loop(response: Any) -> HttpResponseBase:
    return await sync_to_async(_rendered)(response) if hasattr(response, "render") else _rendered(response)


def _refuse_transaction() -> None:
    """Refuse a request inside ``atomic()``: its effect could be rolled back when its record says that it happened."""
    for connection in connections.all(initialized_only=True):
        blocks = connection.atomic_blocks
        if blocks and not blocks[-1]._from_testcase:  # type: ignore[attr-defined]  # as in Django's own check
            raise PolicyError(
                "ATOMIC_REQUESTS",
                repr(connection.alias),
                "the view's effect could be rolled back after it was recorded; write @transaction.non_atomic_requests "
                "above @idempotent_view, and a transaction into the view",
            )


def _route_of(request: HttpRequest) -> str | None:
    match = request.resolver_match
    return None if match is None else f"/{match.route}"


def _resolved(request: HttpRequest) -> str | None:
    """The route before Django has looked for it."""
    try:
        return f"/{resolve(request.path_info, getattr(request, 'urlconf', None)).route}"
    except Resolver404:
        return None


def _response(answer: HttpResponseBase | HttpAnswer) -> HttpResponseBase:
    if isinstance(answer, HttpResponseBase):
        return answer
    response = HttpResponse(answer.body, status=answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        # Django has one line for each name; a list is the same in one.
        response.headers[name] = f"{response.headers[name]}, {value}" if name in response.headers else value
    return response
