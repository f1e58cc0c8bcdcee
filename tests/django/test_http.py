"""Django's views with an ``Idempotency-Key``: behind the decorator and behind the middleware, sync and async."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from io import BytesIO
from types import ModuleType
from typing import Any, Literal

import pytest
from django.core.exceptions import PermissionDenied
from django.core.signals import request_finished
from django.db import connection, transaction
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    RawPostDataException,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path

from celery_idempotent import IdempotencyWarning, Policy, PolicyError, Status, StoreUnavailable, current_attempt
from celery_idempotent.contrib.http import answer
from celery_idempotent.contrib.http import django as coat
from celery_idempotent.contrib.http.django import IdempotentViewMiddleware, idempotent_view
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http_behaviour import Behaviour, Got, Reply, Shop

MIDDLEWARE = f"{IdempotentViewMiddleware.__module__}.{IdempotentViewMiddleware.__qualname__}"
KINDS = ["decorator", "async decorator", "middleware", "async middleware"]


def somebody(request: HttpRequest) -> str:
    """Who calls, for a setting that names a function."""
    return request.headers.get("X-Caller", "somebody")


class DjangoShop(Shop):
    """A project with one view; the settings are those of the test's time."""

    def __init__(self, kind: str) -> None:
        self.bodies: list[bytes] = []
        self.is_async = "async" in kind
        self._is_middleware = "middleware" in kind
        self._settings: dict[str, Any] = {}

    def serve(self, respond: Callable[[], Reply], **options: Any) -> None:
        def view(request: HttpRequest, path: str) -> Any:
            self.bodies.append(request.body)
            reply = respond()
            if reply.chunks is None:
                return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))
            chunks = _awaited(reply.chunks) if self.is_async else iter(reply.chunks)
            return StreamingHttpResponse(chunks, status=reply.status, headers=dict(reply.headers))

        async def async_view(request: HttpRequest, path: str) -> Any:
            return view(request, path)

        self.serve_view(async_view if self.is_async else view, **options)

    def serve_view(self, view: Any, **options: Any) -> None:
        options = {"caller": "anybody", **options}
        urls: Any = ModuleType("urls")
        if self._is_middleware:
            start(options)
            self._settings = {"MIDDLEWARE": [MIDDLEWARE], "IDEMPOTENT_REQUESTS": options}
        else:
            self._settings = {"MIDDLEWARE": []}
            view = idempotent_view(**options)(view)
        urls.urlpatterns = [path("<path:path>", view)]
        self._settings["ROOT_URLCONF"] = urls

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Got:
        named = dict(headers)
        kind = named.pop("content-type", "application/octet-stream")
        with override_settings(**self._settings):
            got, content = self._sent(method, path, data=body, content_type=kind, headers=named)
        if got.status_code == 500 and got.exc_info and got.headers["Content-Type"] != "application/problem+json":
            raise got.exc_info[1]
        lines = {name.lower(): value for name, value in got.headers.items()}
        if got.cookies:
            lines["set-cookie"] = got.cookies.output()
        return Got(got.status_code, lines, content)

    def _sent(self, *args: Any, **options: Any) -> tuple[Any, bytes]:
        if not self.is_async:
            got = Client(raise_request_exception=False).generic(*args, **options)
            return got, b"".join(got) if got.streaming else got.content

        async def send() -> tuple[Any, bytes]:
            got: Any = await AsyncClient(raise_request_exception=False).generic(*args, **options)
            return got, b"".join([each async for each in got]) if got.streaming else got.content

        return asyncio.run(send())


def start(options: dict[str, Any]) -> None:
    """Make the middleware with these options, as Django does at its start."""
    with override_settings(IDEMPOTENT_REQUESTS=options):
        IdempotentViewMiddleware(lambda request: None)


async def _awaited(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for each in chunks:
        yield each


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest) -> DjangoShop:
    """One of each kind."""
    return DjangoShop(request.param)


class TestDjango(Behaviour):
    """The behaviour that all coats share."""


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store of the test's own."""
    made = MemoryStore()
    yield made
    made.close()


def of_kind(shop: DjangoShop, view: Callable[[HttpRequest], Any]) -> Any:
    """``view``, sync or async as the shop is."""

    async def async_view(request: HttpRequest, path: str) -> Any:
        return view(request)

    def sync_view(request: HttpRequest, path: str) -> Any:
        return view(request)

    return async_view if shop.is_async else sync_view


@pytest.mark.parametrize(("raised", "status"), [(Http404("gone"), 404), (PermissionDenied(), 403)])
def test_exceptions_that_are_responses_are_outcomes(
    shop: DjangoShop, store: MemoryStore, raised: Exception, status: int
) -> None:
    """As Django answers them; they are replayed."""
    views: list[int] = []

    def view(request: HttpRequest) -> HttpResponse:
        views.append(1)
        raise raised

    shop.serve_view(of_kind(shop, view), store=store)
    first, again = shop.request(), shop.request()
    assert (first.status, first.body) == (again.status, again.body)
    assert first.status == status
    assert len(views) == 1


def test_under_refuse_an_exception_is_an_outcome(shop: DjangoShop, store: MemoryStore) -> None:
    """It is recorded as such, also where Django has made a page of it, and raised again."""
    views: list[int] = []

    def view(request: HttpRequest) -> HttpResponse:
        views.append(1)
        raise ZeroDivisionError

    shop.serve_view(of_kind(shop, view), store=store, policy=Policy(on_takeover="refuse"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shop.request()
    assert [each.status for each in store.scan()] == [Status.FAILED]
    assert len(views) == 1


def test_outage_in_a_step_is_none_of_the_views_outcomes(shop: DjangoShop, store: MemoryStore) -> None:
    """Under refuse the operation is UNKNOWN, and not answered by Django's page for ever."""

    def view(request: HttpRequest) -> HttpResponse:
        raise StoreUnavailable("the store", "swap", "no answer")

    shop.serve_view(of_kind(shop, view), store=store, policy=Policy(on_takeover="refuse"))
    assert shop.request().problem == "unconfirmed"
    assert shop.request().problem == "outcome-unknown"


def test_template_is_rendered_before_it_is_recorded(shop: DjangoShop, store: MemoryStore) -> None:
    """Later there would be nothing to record."""
    rendered: list[int] = []

    class Note:
        def __str__(self) -> str:
            rendered.append(1)
            return f"order {len(rendered)}"

    template = engines["django"].from_string("{{ note }}")

    def view(request: HttpRequest) -> HttpResponse:
        return TemplateResponse(request, template, {"note": Note()})

    shop.serve_view(of_kind(shop, view), store=store)
    assert [shop.request().body for _ in range(2)] == [b"order 1"] * 2


def test_sync_stream_and_file_are_recorded(shop: DjangoShop, store: MemoryStore) -> None:
    """Under async, too; the file is closed when it was read."""
    file = BytesIO(b"report")
    shop.serve_view(of_kind(shop, lambda request: FileResponse(file)), store=store)
    if shop.is_async:
        assert shop.request().body == b"report"
    else:
        assert [shop.request().body for _ in range(2)] == [b"report"] * 2
    assert file.closed


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_form_that_was_read_before_runs_only_where_a_policy_is_tried_out(
    store: MemoryStore, mode: Literal["enforce", "observe"]
) -> None:
    """Django keeps no body of multipart forms, and two of them could not be told apart."""
    view = idempotent_view(store=store, caller="anybody", policy=Policy(mode=mode))(
        lambda request: HttpResponse(request.POST["cents"])
    )
    request = RequestFactory().post("/", {"cents": "5"}, headers={"Idempotency-Key": "k-1"})
    assert request.POST
    if mode == "observe":
        assert view(request).content == b"5"
    else:
        with pytest.raises(RawPostDataException):
            view(request)


def test_request_with_a_stream_is_over_once(shop: DjangoShop, store: MemoryStore) -> None:
    """Django closes connections and caches then, and tells the site's own receivers."""
    over: list[Any] = []

    def receive(**about: Any) -> None:
        over.append(about["sender"])

    request_finished.connect(receive)
    shop.serve_view(of_kind(shop, lambda request: FileResponse(BytesIO(b"report"))), store=store)
    assert shop.request().body == b"report"
    assert len(over) == 1
    request_finished.disconnect(receive)


def test_lists_of_one_header_are_in_one_line(shop: DjangoShop, store: MemoryStore) -> None:
    """Django has no more."""

    def view(request: HttpRequest) -> HttpResponse:
        current_attempt()
        return HttpResponse("x", headers={"Link": "<a>, <b>"})

    shop.serve_view(of_kind(shop, view), store=store)
    assert [shop.request().headers["link"] for _ in range(2)] == ["<a>, <b>"] * 2


def test_wrong_length_is_refused(store: MemoryStore) -> None:
    """By the library, where the server has let it pass."""
    shop = DjangoShop("decorator")
    shop.serve(Reply, store=store)
    with override_settings(**shop._settings):
        got = Client().generic("POST", "/a", b"ab", headers={"Idempotency-Key": "k"}, CONTENT_LENGTH="ten")
    assert got.status_code == 400


def test_body_that_came_in_chunks_is_measured(store: MemoryStore) -> None:
    """No header says how long it is."""
    view = idempotent_view(store=store, caller="anybody", max_request=1)(lambda request: HttpResponse())
    request = RequestFactory().post("/", b"ab", "text/plain", headers={"Idempotency-Key": "k-1"})
    assert request.body == b"ab"
    del request.META["CONTENT_LENGTH"]
    assert view(request).status_code == 413


def test_view_must_return_a_response(store: MemoryStore) -> None:
    """As Django says."""
    shop = DjangoShop("decorator")
    shop.serve_view(lambda request, path: None, store=store)
    with pytest.raises(TypeError, match="NoneType"):
        shop.request()


def test_transaction_around_a_view_is_refused(store: MemoryStore) -> None:
    """It could undo the effect that was recorded; ``non_atomic_requests`` above the decorator helps."""
    shop = DjangoShop("decorator")
    shop.serve(Reply, store=store)
    connection.ensure_connection()
    with transaction.atomic(), pytest.raises(PolicyError, match="non_atomic_requests"):
        shop.request()
    assert not list(store.scan())


def test_transaction_of_a_test_case_is_none(store: MemoryStore) -> None:
    """As for Django's own checks: it is rolled back with all that the test has done."""
    shop = DjangoShop("decorator")
    shop.serve(Reply, store=store)
    connection.ensure_connection()
    around: Any = transaction.atomic()
    around._from_testcase = True
    with around:
        assert shop.request().status == 201


def test_transaction_around_a_view_that_is_observed_is_its_own_affair(store: MemoryStore) -> None:
    """Trying a policy out changes nothing of what a view does."""
    shop = DjangoShop("decorator")
    shop.serve(Reply, store=store, policy=Policy(mode="observe"))
    connection.ensure_connection()
    with transaction.atomic():
        assert shop.request().status == 201


def test_awaited_caller_is_awaited(store: MemoryStore) -> None:
    """As ``request.auser()`` is."""

    async def caller(request: HttpRequest) -> str:
        return "ann"

    shop = DjangoShop("async decorator")
    shop.serve(Reply, store=store, caller=caller)
    assert shop.request().status == 201


def test_settings_of_the_middleware_may_be_names(store: MemoryStore) -> None:
    """Of functions; ``only`` leaves requests out."""
    shop = DjangoShop("middleware")
    shop.serve(Reply, store=store, caller=f"{__name__}.somebody", only=lambda request: request.path != "/free")
    shop.request(path="/free")
    assert not list(store.scan())
    shop.request(x_caller="ann")
    shop.request(x_caller="bob")
    assert len(list(store.scan())) == 2


def test_public_names_are_these() -> None:
    """As in tests/unit/test_public_names.py, where there is no Django."""
    assert set(coat.__all__) == {"IdempotentViewMiddleware", "idempotent_view"}


def test_middleware_refuses_a_path_for_a_function_of_the_request() -> None:
    """At the start."""
    options = {"store": "memory://", "caller": "anybody", "only": "/orders"}
    with pytest.raises(PolicyError, match="only"), override_settings(IDEMPOTENT_REQUESTS=options):
        IdempotentViewMiddleware(lambda request: None)


def test_middleware_that_nobody_told_of_callers_warns() -> None:
    """At the start."""
    with (
        pytest.warns(IdempotencyWarning, match="caller is not given"),
        override_settings(IDEMPOTENT_REQUESTS={"store": "memory://"}),
    ):
        IdempotentViewMiddleware(lambda request: None)


def test_path_that_no_route_has_is_its_own_name(store: MemoryStore) -> None:
    """Django's page for it is an outcome like any other."""
    shop = DjangoShop("middleware")
    shop.serve(Reply, store=store)
    shop._settings["ROOT_URLCONF"].urlpatterns = []
    assert shop.request(path="/lost").status == 404
    assert [each.task for each in store.scan()] == ["POST /lost"]


def test_view_commits_on_djangos_own_connection() -> None:
    """The record and the view's rows in one transaction; what was committed is the answer."""
    shop = DjangoShop("decorator")

    def view(request: HttpRequest, path: str) -> HttpResponse:
        with current_attempt().transaction() as tx:
            tx.done(answer(201, {"order": 1}, {"Link": "<a>"}))
        return HttpResponse("another")

    shop.serve_view(view, store="django://default")
    first, again = shop.request("commit-1"), shop.request("commit-1")
    assert first.body == again.body == b'{"order": 1}'
    assert (first.status, again.headers["link"]) == (201, "<a>")


def test_view_that_committed_nothing_to_send_is_answered_as_its_repetitions() -> None:
    """Also where the response that it returns is no outcome."""
    shop = DjangoShop("decorator")

    def view(request: HttpRequest, path: str) -> HttpResponse:
        with current_attempt().transaction() as tx:
            tx.done(None)
        return HttpResponse("late", status=503)

    shop.serve_view(view, store="django://default")
    assert [shop.request("commit-2").status for _ in range(2)] == [204, 204]
