"""A decorator for Django's views, sync and async, and middleware for all of them."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
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

from celery_idempotent.contrib.http.guard import Buffer, HttpGuard, Response, finish
from celery_idempotent.contrib.http.semantics import Caller, HttpOptions, HttpRules, RequestFacts, require_function
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.store import Store

__all__ = ["IdempotentViewMiddleware", "idempotent_view"]

View = Callable[..., Any]

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
    guard = HttpGuard(caller, store, celery, options)

    def decorated(view: View) -> View:
        is_async = iscoroutinefunction(view)

        async def respond(request: HttpRequest, args: Any, kwargs: Any) -> HttpResponseBase:
            try:
                found = view(request, *args, **kwargs)
                response: HttpResponseBase = await found if is_async else found
                if not isinstance(response, HttpResponseBase):
                    raise TypeError(f"a view returned {type(response).__name__}, which is no response")
                render = getattr(response, "render", None)  # of a template; later is too late
                return await _run(is_async, render) if callable(render) else response
            except _RESPONSES as error:
                answer: HttpResponseBase = await _run(is_async, response_for_exception, request, error)
                return answer

        @wraps(view)
        def protected(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            answering = _answer(guard, _DjangoExchange(request, partial(respond, request, args, kwargs), is_async))
            return answering if is_async else finish(answering)

        return markcoroutinefunction(protected) if is_async else protected

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
        self._guard = HttpGuard(caller, store, celery, cast(HttpOptions, options))
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self._only is not None and not self._only(request):
            return self._get_response(request)

        async def respond() -> HttpResponseBase:
            found = self._get_response(request)
            response: HttpResponseBase = await found if self._is_async else found
            return response

        answering = _answer(self._guard, _DjangoExchange(request, respond, self._is_async))
        return answering if self._is_async else finish(answering)

    def process_exception(self, request: HttpRequest, error: Exception) -> None:
        """Note what the view raised: the gate is to see it, and not only the page that Django makes of it."""
        request._idempotent_raised = error  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _DjangoExchange:
    native: HttpRequest
    pass_on: Callable[[], Coroutine[Any, Any, HttpResponseBase]]
    is_async: bool

    @property
    def method(self) -> str:
        return self.native.method or ""

    def lines(self, name: str) -> list[str]:
        line = self.native.headers.get(name)
        return [] if line is None else [line]

    async def read(self, rules: HttpRules) -> bytes | None:
        if rules.refuses:
            _refuse_transaction()
        try:
            return self.native.body
        except RawPostDataException:
            if rules.refuses:
                raise
            return None

    def facts(self, **known: Any) -> RequestFacts:
        return RequestFacts(
            path=self.native.path,
            query=self.native.META.get("QUERY_STRING", ""),
            content_type=self.native.content_type or "",
            **known,
            route=_route_of(self.native),
        )

    async def respond(self, limit: int) -> Response[HttpResponseBase]:
        response = await self.pass_on()
        raised = getattr(self.native, _RAISED, None) if response.status_code >= 500 else None
        if not isinstance(response, StreamingHttpResponse):
            content = cast(HttpResponse, response).content
            return Response(response, response.status_code, response.items(), content, raised)
        buffer = Buffer(limit)
        if self.is_async and response.is_async:
            async for chunk in cast(AsyncIterator[bytes], response.streaming_content):
                buffer.write(chunk)
        else:
            await _run(self.is_async, buffer.fill, response.streaming_content if self.is_async else response)
        await _run(self.is_async, _close_sources, response)
        response.streaming_content = _awaited(buffer.chunks()) if self.is_async else buffer.chunks()
        return Response(response, response.status_code, response.items(), buffer, raised)


async def _run(is_async: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what may block: in a thread where there is an event loop."""
    return await sync_to_async(function)(*arguments) if is_async else function(*arguments)


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
    """The route, also before Django has looked for it."""
    try:
        match = request.resolver_match or resolve(request.path_info, getattr(request, "urlconf", None))
    except Resolver404:
        return None
    return f"/{match.route}"


async def _answer(guard: HttpGuard, exchange: _DjangoExchange) -> HttpResponseBase:
    answer = await guard.answer(exchange)
    if isinstance(answer, HttpResponseBase):
        return answer
    response = HttpResponse(answer.body, status=answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        # Django has one line for each name; a list is the same in one.
        response.headers[name] = f"{response.headers[name]}, {value}" if name in response.headers else value
    return response
