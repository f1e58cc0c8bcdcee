"""A decorator for Flask's views."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Unpack

from celery import Celery
from flask import Response as FlaskResponse
from flask import current_app, make_response, request
from werkzeug.exceptions import HTTPException

from celery_idempotent.contrib.http.guard import Buffer, HttpGuard, Response, finish
from celery_idempotent.contrib.http.semantics import Caller, HttpAnswer, HttpOptions, HttpRules, RequestFacts
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.store import Store

__all__ = ["idempotent_view"]

View = Callable[..., Any]


def idempotent_view(
    *,
    caller: Caller | None = None,
    store: str | Store | None = None,
    celery: Celery | None = None,
    **options: Unpack[HttpOptions],
) -> Callable[[View], View]:
    """Have the effect of a request with an ``Idempotency-Key`` happen once, and answer its repetitions alike::

        @app.post("/charges")
        @idempotent_view(store="redis://localhost/0", caller=lambda request: g.tenant)
        def charge(): ...

    The view's response is sent when it is recorded, streams included. ``abort()`` is a response like any other.

    Args:
        caller: Who calls, of Flask's request; see :class:`~celery_idempotent.contrib.http.semantics.HttpRules`.
        store: Where requests are recorded: a URL or a store.
        celery: The Celery app whose ``idempotency_*`` settings count; default, without ``store``: the current app.
        options: See :class:`~celery_idempotent.contrib.http.semantics.HttpRules`.

    Raises:
        PolicyError: An option cannot work.
    """
    guard = HttpGuard(caller, store, celery, options)

    def decorated(view: View) -> View:
        @wraps(view)
        def protected(*args: Any, **kwargs: Any) -> Any:
            answered = finish(guard.answer(_FlaskExchange(lambda: current_app.ensure_sync(view)(*args, **kwargs))))
            return _response(answered) if isinstance(answered, HttpAnswer) else answered

        return protected

    return decorated


class _FlaskExchange:
    is_async = False

    def __init__(self, view: Callable[[], Any]) -> None:
        self._view = view
        self.native = request
        self.method = request.method

    def lines(self, name: str) -> list[str]:
        return request.headers.getlist(name)

    async def read(self, rules: HttpRules) -> bytes:
        # Werkzeug cuts a body in chunks at its limit, and says nothing: one byte more tells.
        limit = rules.max_request + 1
        request.max_content_length = min(limit, request.max_content_length or limit)
        body = request.get_data()
        # Somebody, such as a check against CSRF, may have made a form of it.
        is_consumed = "form" in vars(request) and bool(request.form or request.files)
        if not body and rules.refuses and is_consumed:
            why = "of its body nothing is left to tell two requests apart"
            remedy = f"{why}; call request.get_data() before, which keeps it"
            raise PolicyError("request.form", "read before the view", remedy)
        return body

    def facts(self, **known: Any) -> RequestFacts:
        return RequestFacts(
            path=request.root_path + request.path,
            query=request.query_string.decode("latin-1"),
            content_type=request.content_type or "",
            **known,
            route=None if request.url_rule is None else request.url_rule.rule,
        )

    async def respond(self, limit: int) -> Response[Any]:
        try:
            returned = self._view()
        except HTTPException as error:
            returned = current_app.handle_http_exception(error)
        response = make_response(returned)
        if not (response.is_streamed or response.direct_passthrough):
            return Response(response, response.status_code, response.headers.items(), response.get_data())
        buffer = Buffer(limit).fill(response.iter_encoded())
        close = getattr(response.response, "close", None)
        if close is not None:
            close()  # it, and not the response: what the view calls on close is called at the end, once
        response.direct_passthrough = False
        response.response = buffer.chunks()
        return Response(response, response.status_code, response.headers.items(), buffer)

    async def pass_on(self) -> Any:
        return self._view()


def _response(answer: HttpAnswer) -> FlaskResponse:
    response = FlaskResponse(answer.body, answer.status)
    del response.headers["Content-Type"]
    for name, value in answer.headers:
        response.headers.add(name, value)
    return response
