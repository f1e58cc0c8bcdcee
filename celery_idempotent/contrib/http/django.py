"""A decorator for Django's views, sync and async, and middleware for all of them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import wraps
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
    protected = _IdempotentView(HttpGuard(caller, store, celery, options))

    def decorated(view: View) -> View:
        if iscoroutinefunction(view):

            @wraps(view)
            async def awaited(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
                async def respond() -> HttpResponseBase:
                    try:
                        return await _rendered_on_loop(await view(request, *args, **kwargs))
                    except _RESPONSES as error:
                        return await sync_to_async(response_for_exception)(request, error)

                return await protected.answer_on_loop(request, respond, _route_of)

            return awaited

        @wraps(view)
        def called(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            def respond() -> HttpResponseBase:
                try:
                    return _rendered(view(request, *args, **kwargs))
                except _RESPONSES as error:
                    return response_for_exception(request, error)

            return protected.answer(request, respond, _route_of)

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
        self._view = _IdempotentView(HttpGuard(caller, store, celery, cast(HttpOptions, options)))
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        """Answer one request."""
        if self._only is not None and not self._only(request):
            return self._get_response(request)
        if self._is_async:
            return self._answer_on_loop(request)
        return self._view.answer(request, lambda: cast(HttpResponseBase, self._get_response(request)), _resolved)

    async def _answer_on_loop(self, request: HttpRequest) -> HttpResponseBase:
        async def respond() -> HttpResponseBase:
            return cast(HttpResponseBase, await self._get_response(request))

        return await self._view.answer_on_loop(request, respond, _resolved)

    def process_exception(self, request: HttpRequest, error: Exception) -> None:
        """Note what the view raised: the gate is to see it, and not only the page that Django makes of it."""
        request._idempotent_raised = error  # type: ignore[attr-defined]


class _IdempotentView:
    """What decorator and middleware share."""

    def __init__(self, guard: HttpGuard) -> None:
        self._guard = guard

    def answer(self, request: HttpRequest, respond: Callable[[], HttpResponseBase], route: Route) -> HttpResponseBase:
        """The response to a request."""
        asked = self._asked(request)
        told = self._told(request) if isinstance(asked, str) else None
        facts = self._facts(request, asked, told, route)
        if isinstance(facts, Problem) and self._guard.rules.refuses:
            return _response(self._guard.rules.refusal(facts))
        if not isinstance(facts, RequestFacts):
            with self._guard.unprotected():
                return respond()
        maker = _Maker(request, self._guard.rules.max_response)
        try:
            found = self._guard.call(facts, lambda: maker.of(respond()))
        except Exception as error:
            page = maker.page_of(error)
            if page is None:
                raise
            return page
        return _response(found) if isinstance(found, HttpAnswer) else found

    async def answer_on_loop(
        self, request: HttpRequest, respond: Callable[[], Awaitable[HttpResponseBase]], route: Route
    ) -> HttpResponseBase:
        """As :meth:`answer`, awaited."""
        asked = self._asked(request)
        told = self._told(request) if isinstance(asked, str) else None
        facts = self._facts(request, asked, await told if isawaitable(told) else told, route)
        if isinstance(facts, Problem) and self._guard.rules.refuses:
            return _response(self._guard.rules.refusal(facts))
        if not isinstance(facts, RequestFacts):
            with self._guard.unprotected():
                return await respond()
        maker = _Maker(request, self._guard.rules.max_response)

        async def make() -> Response[HttpResponseBase]:
            return await maker.of_on_loop(await respond())

        try:
            found = await self._guard.call_on_loop(facts, make)
        except Exception as error:
            page = maker.page_of(error)
            if page is None:
                raise
            return page
        return _response(found) if isinstance(found, HttpAnswer) else found

    def _asked(self, request: HttpRequest) -> str | Problem | None:
        """The key of a request, or why it is refused before its body is read; None where it runs unprotected."""
        rules = self._guard.rules
        line = request.headers.get("Idempotency-Key")
        key = rules.admitted(request.method or "", [] if line is None else [line])
        if isinstance(key, str) and rules.refuses:
            _refuse_transaction()
        return key

    def _body(self, request: HttpRequest) -> bytes | Problem | None:
        rules = self._guard.rules
        if problem := rules.sized(request.META.get("CONTENT_LENGTH")):
            return problem
        try:
            body = request.body
        except RawPostDataException:
            if rules.refuses:
                raise
            return None
        return Problem.BODY_TOO_LARGE if len(body) > rules.max_request else body

    def _told(self, request: HttpRequest) -> Any:
        """What the author says about who calls, or what has to be awaited for that."""
        return self._guard.caller(request, request.headers.get("Authorization"), request.headers.get("Cookie"))

    def _facts(
        self, request: HttpRequest, asked: str | Problem | None, told: Any, route: Route
    ) -> RequestFacts | Problem | None:
        """What a request is about, or why it is refused; None where it runs unprotected."""
        if not isinstance(asked, str):
            return asked
        caller = self._guard.known(told)
        if isinstance(caller, Problem):
            return caller
        body = self._body(request)
        if not isinstance(body, bytes):
            return body
        return RequestFacts(
            method=request.method or "",
            path=request.path,
            query=request.META.get("QUERY_STRING", ""),
            content_type=request.content_type or "",
            body=body,
            key=asked,
            caller=caller,
            route=route(request),
        )


class _Maker:
    """What becomes of the response to one request."""

    def __init__(self, request: HttpRequest, limit: int) -> None:
        self._request = request
        self._limit = limit
        self._page: HttpResponseBase | None = None

    def of(self, response: HttpResponseBase) -> Response[HttpResponseBase]:
        """The response, as a whole."""
        self._refuse_page(response)
        if not isinstance(response, StreamingHttpResponse):
            return _response_of(response, cast(HttpResponse, response).content)
        buffer = Buffer(self._limit).fill(cast(Iterator[bytes], response))
        _close_sources(response)
        response.streaming_content = buffer.chunks()
        return _response_of(response, buffer)

    async def of_on_loop(self, response: HttpResponseBase) -> Response[HttpResponseBase]:
        """As :meth:`of`, awaited."""
        self._refuse_page(response)
        if not isinstance(response, StreamingHttpResponse):
            return self.of(response)
        buffer = Buffer(self._limit)
        if response.is_async:
            async for chunk in cast(AsyncIterator[bytes], response.streaming_content):
                buffer.write(chunk)
        else:
            await sync_to_async(buffer.fill)(cast(Iterator[bytes], response.streaming_content))
        await sync_to_async(_close_sources)(response)
        response.streaming_content = _awaited(buffer.chunks())
        return _response_of(response, buffer)

    def page_of(self, error: Exception) -> HttpResponseBase | None:
        """The page that Django has made of what its view raised, if that is ``error``."""
        return self._page if error is getattr(self._request, _RAISED, None) else None

    def _refuse_page(self, response: HttpResponseBase) -> None:
        raised: Exception | None = getattr(self._request, _RAISED, None)
        if raised is not None and response.status_code >= 500:
            self._page = response
            raise raised


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


def _response_of(response: HttpResponseBase, body: bytes | Buffer) -> Response[HttpResponseBase]:
    return Response(response, response.status_code, response.items(), body)


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


def _response(answer: HttpAnswer) -> HttpResponse:
    response = HttpResponse(answer.body, status=answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        # Django has one line for each name; a list is the same in one.
        response.headers[name] = f"{response.headers[name]}, {value}" if name in response.headers else value
    return response
