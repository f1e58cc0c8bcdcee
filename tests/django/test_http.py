"""Django's views with an ``Idempotency-Key``: behind the decorator and behind the middleware, sync and async."""

import asyncio
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from types import ModuleType
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from django.core.exceptions import PermissionDenied
from django.core.signals import request_finished
from django.db import connection, transaction
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, RawPostDataException, StreamingHttpResponse
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
        def view(request: HttpRequest) -> Any:
            reply = respond()
            if reply.chunks is None:
                return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))
            chunks = _awaited(reply.chunks) if self.is_async else iter(reply.chunks)
            return StreamingHttpResponse(chunks, status=reply.status, headers=dict(reply.headers))

        self.serve_view(view, **options)

    def serve_view(self, view: Callable[[HttpRequest], Any], **options: Any) -> None:
        """Have ``view`` answer, sync or async as the shop is; the body of each of its requests is kept."""
        options, urls = {"caller": "anybody", **options}, cast(Any, ModuleType("urls"))

        def sync_view(request: HttpRequest, path: str) -> Any:
            self.bodies.append(request.body)
            return view(request)

        async def async_view(request: HttpRequest, path: str) -> Any:
            return sync_view(request, path)

        served: Any = async_view if self.is_async else sync_view
        self._settings = {"MIDDLEWARE": [], "ROOT_URLCONF": urls}
        if self._is_middleware:
            start(options)
            self._settings |= {"MIDDLEWARE": [MIDDLEWARE], "IDEMPOTENT_REQUESTS": options}
        else:
            served = idempotent_view(**options)(served)
        urls.urlpatterns = [path("<path:path>", served)]

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
    return DjangoShop(request.param)


class TestDjango(Behaviour):
    """The behaviour that all coats share."""


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize(("raised", "status"), [(Http404("gone"), 404), (PermissionDenied(), 403)])
def test_exceptions_that_are_responses_are_outcomes(
    shop: DjangoShop, store: MemoryStore, raised: Exception, status: int
) -> None:
    """As Django answers them; they are replayed."""
    shop.serve_view(Mock(side_effect=raised), store=store)
    first, again = shop.request(), shop.request()
    assert (first.status, first.body, len(shop.bodies)) == (status, again.body, 1)


def test_under_refuse_an_exception_is_an_outcome(shop: DjangoShop, store: MemoryStore) -> None:
    """It is recorded as such, also where Django has made a page of it, and raised again."""
    shop.serve_view(Mock(side_effect=ZeroDivisionError), store=store, policy=Policy(on_takeover="refuse"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shop.request()
    assert ([each.status for each in store.scan()], len(shop.bodies)) == ([Status.FAILED], 1)


def test_outage_in_a_step_is_none_of_the_views_outcomes(shop: DjangoShop, store: MemoryStore) -> None:
    """Under refuse the operation is UNKNOWN, and not answered by Django's page for ever."""
    outage = StoreUnavailable("the store", "swap", "no answer")
    shop.serve_view(Mock(side_effect=outage), store=store, policy=Policy(on_takeover="refuse"))
    assert [str(shop.request()) for _ in range(2)] == ["503 unconfirmed later", "500 outcome-unknown"]


def test_template_is_rendered_before_it_is_recorded(shop: DjangoShop, store: MemoryStore) -> None:
    """Later there would be nothing to record; headers are kept as Django has them, in one line each."""
    numbers = iter([1, 2])
    template = engines["django"].from_string("{{ note }}")

    def view(request: HttpRequest) -> HttpResponse:
        return TemplateResponse(request, template, {"note": lambda: next(numbers)}, headers={"Link": "<a>, <b>"})

    shop.serve_view(view, store=store)
    answers = [shop.request() for _ in range(2)]
    assert [(each.body, each.headers["link"]) for each in answers] == [(b"1", "<a>, <b>")] * 2


def test_sync_stream_and_file_are_recorded(shop: DjangoShop, store: MemoryStore) -> None:
    """The file is closed when it was read; Django tells that the request is over once, to close connections then."""
    file, receive = BytesIO(b"report"), Mock()
    request_finished.connect(receive)
    shop.serve_view(lambda request: FileResponse(file), store=store)
    assert shop.request().body == b"report"
    assert (file.closed, receive.call_count) == (True, 1)
    request_finished.disconnect(receive)
    assert shop.request().body == b"report"


def test_form_that_was_read_before_is_refused(store: MemoryStore) -> None:
    """Django keeps no body of multipart forms, and two of them could not be told apart."""
    view = idempotent_view(store=store, caller="anybody")(lambda request: HttpResponse())
    request = RequestFactory().post("/", {"cents": "5"}, headers={"Idempotency-Key": "k-1"})
    assert request.POST
    with pytest.raises(RawPostDataException):
        view(request)


@pytest.mark.parametrize(("length", "status"), [("ten", 400), (None, 413)])
def test_length_is_what_was_read(store: MemoryStore, length: str | None, status: int) -> None:
    """A wrong one that the server has let pass is refused, and a body in chunks is measured."""
    view = idempotent_view(store=store, caller="anybody", max_request=1)(lambda request: HttpResponse())
    request = RequestFactory().post("/", b"ab", "text/plain", headers={"Idempotency-Key": "k-1"})
    assert request.body == b"ab"
    request.META["CONTENT_LENGTH"] = length
    if length is None:
        del request.META["CONTENT_LENGTH"]
    assert view(request).status_code == status


@pytest.mark.parametrize(("of_a_test", "refused"), [(False, True), (True, False)])
def test_transaction_around_a_view_is_refused(store: MemoryStore, of_a_test: bool, refused: bool) -> None:
    """It could undo the effect that was recorded; not so that of a TestCase."""
    shop = DjangoShop("decorator")
    shop.serve(Reply, store=store)
    connection.ensure_connection()
    around: Any = transaction.atomic()
    around._from_testcase = of_a_test
    with around:
        if refused:
            with pytest.raises(PolicyError, match="non_atomic_requests"):
                shop.request()
        else:
            assert shop.request().status == 201
    assert len(list(store.scan())) == (not refused)


def test_awaited_caller_is_awaited(store: MemoryStore) -> None:
    """As ``request.auser()`` is."""
    shop = DjangoShop("async decorator")
    shop.serve(Reply, store=store, caller=AsyncMock(return_value="ann"))
    assert shop.request().status == 201


def test_settings_of_the_middleware_may_be_names(store: MemoryStore) -> None:
    """Of functions; ``only`` leaves requests out, and a path that no route has is its own name."""
    shop = DjangoShop("middleware")
    shop.serve(Reply, store=store, caller=f"{__name__}.somebody", only=lambda request: request.path != "/free")
    shop.request(path="/free")
    assert not list(store.scan())
    shop.request(x_caller="ann")
    shop.request(x_caller="bob")
    shop._settings["ROOT_URLCONF"].urlpatterns = []
    assert shop.request(path="/lost").status == 404
    assert sorted(each.task for each in store.scan()) == [*["POST /<path:path>"] * 2, "POST /lost"]


def test_middleware_refuses_at_its_start() -> None:
    """A path in place of a function of the request; a warning where nobody told it of callers."""
    with pytest.raises(PolicyError, match="only"):
        start({"store": "memory://", "caller": "anybody", "only": "/orders"})
    with pytest.warns(IdempotencyWarning, match="caller is not given"):
        start({"store": "memory://"})


@pytest.mark.parametrize(
    ("committed", "answered"),
    [(answer(201, {"order": 1}, {"Link": "<a>"}), (201, b'{"order": 1}')), (None, (204, b""))],
)
def test_view_commits_on_djangos_own_connection(committed: Any, answered: tuple[int, bytes]) -> None:
    """What was committed is the answer, also where the response that the view returns is no outcome."""
    shop = DjangoShop("decorator")

    def view(request: HttpRequest) -> HttpResponse:
        with current_attempt().transaction() as tx:
            tx.done(committed)
        return HttpResponse("late", status=503)

    shop.serve_view(view, store="django://default")
    key = f"commit-{answered[0]}"
    answers = [shop.request(key), shop.request(key)]
    assert [(each.status, each.body) for each in answers] == [answered] * 2
    assert {each.headers.get("link") for each in answers} == ({"<a>"} if committed else {None})


def test_public_names_are_these() -> None:
    """As in tests/unit/test_public_names.py, where there is no Django."""
    assert set(coat.__all__) == {"IdempotentViewMiddleware", "idempotent_view"}
