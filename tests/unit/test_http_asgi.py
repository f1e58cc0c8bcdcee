"""ASGI applications behind the middleware, without a server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from celery_idempotent import IdempotencyWarning, Policy, PolicyError, Status, current_attempt
from celery_idempotent.contrib.http import answer
from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware, route_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from tests.support.asgi import AsgiShop, Client, Message, exchange, scope
from tests.support.http_behaviour import Behaviour


class TestAsgi(Behaviour):
    """The behaviour that all coats share."""

    @pytest.fixture
    def shop(self) -> AsgiShop:
        return AsgiShop()


def starlette(endpoint: Callable[[Request], Awaitable[Response]], store: Any, **options: Any) -> Client:
    """A client of a Starlette application with one route."""
    options = {"caller": "anybody", "store": store, **options}
    routes = [
        Mount("/api", routes=[Route("/{rest:path}", endpoint)]),
        Route("/orders/{id}", endpoint, methods=["POST"]),
    ]
    return Client(Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, **options)]))


async def created(request: Request) -> Response:
    """A view."""
    return JSONResponse({"attempt": current_attempt().number}, 201)


def test_record_is_called_by_the_route() -> None:
    """So that metrics have as many names as the application has routes."""
    store = MemoryStore()
    client = starlette(created, store)
    for path in ("/orders/1", "/orders/2", "/nowhere"):
        client.request(path=path)
    assert sorted(each.task for each in store.scan()) == ["POST /nowhere", *["POST /orders/{id}"] * 2]
    assert route_of({}) is None


def test_other_connections_pass() -> None:
    """Of a server's start, of WebSockets, and what ``only`` leaves out."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware = IdempotencyMiddleware(app, caller="anybody", store="memory://", only=lambda scope: False)
    asyncio.run(exchange(middleware, {"type": "lifespan"}, []))
    asyncio.run(exchange(middleware, scope("POST", "/", [("idempotency-key", "k")]), []))
    assert seen == ["lifespan", "http"]


def test_path_is_no_function_of_the_request() -> None:
    """Refused where it is written; at the first request it would be an error of the server's."""
    only: Any = "/orders"
    with pytest.raises(PolicyError, match="only"):
        IdempotencyMiddleware(starlette_app, caller="anybody", store="memory://", only=only)


async def starlette_app(scope: Any, receive: Any, send: Any) -> None:
    """Any application."""


def test_body_in_parts_is_one() -> None:
    """And it is bounded, however it comes; a declared length has to be the body's."""
    store = MemoryStore()
    bodies: list[bytes] = []

    async def view(request: Request) -> Response:
        bodies.append(await request.body())
        return Response(status_code=204)

    client = starlette(view, store, max_request=4)
    key = ("idempotency-key", "k")
    assert client.send_parts("POST", "/orders/1", [key], [b"ab", b"cd"]).status == 204
    assert "content-length" not in client.send_parts("POST", "/orders/1", [key], [b"abcd"]).headers
    assert client.send_parts("POST", "/orders/1", [key], [b"ab", b"cde"]).problem == "body-too-large"
    assert client.send_parts("POST", "/orders/1", [key, ("content-length", "4")], [b"abc"]).problem == "body-malformed"
    assert client.send_parts("POST", "/orders/1", [key, ("content-length", "x")], [b"abc"]).problem == "body-malformed"
    assert client.send_parts("POST", "/orders/1", [key, key], [b"abcd"]).problem == "key-malformed"
    assert bodies == [b"abcd"]


@pytest.mark.parametrize("caller", ["authorization", lambda scope: None])
def test_nothing_is_read_of_a_stranger(caller: Any) -> None:
    """Hundreds of half-sent bodies would otherwise stay in memory, of whom nobody has let in."""
    asked: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("read")

    async def send(message: Any) -> None:
        asked.append(message)

    app = IdempotencyMiddleware(starlette_app, store=MemoryStore(), caller=caller)
    asyncio.run(app(scope("POST", "/orders/1", [("idempotency-key", "k")]), receive, send))

    assert asked[0]["status"] == 403


def test_body_that_is_too_large_is_observed_as_it_comes() -> None:
    """Part of it was read; the application gets all."""
    bodies: list[bytes] = []

    async def view(request: Request) -> Response:
        bodies.append(await request.body())
        return Response()

    client = starlette(view, MemoryStore(), max_request=4, policy=Policy(mode="observe"))
    assert client.send_parts("POST", "/orders/1", [("idempotency-key", "k")], [b"abc", b"de", b"f"]).status == 200
    assert bodies == [b"abcdef"]


def test_coat_in_a_coat_is_one() -> None:
    """The inner one meets its own operation, and would wait for itself."""
    store = MemoryStore()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"once"})

    inner = IdempotencyMiddleware(app, caller="anybody", store=store)
    client = Client(IdempotencyMiddleware(inner, caller="anybody", store=store))
    assert [client.request().body for _ in range(2)] == [b"once"] * 2


def test_without_a_caller_the_authorization_tells_who_calls_and_a_warning_is_given() -> None:
    """Requests that have one keep to themselves; those without are of one caller, which an author has to hear."""
    store = MemoryStore()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"once"})

    with pytest.warns(IdempotencyWarning, match="caller is not given"):
        client = Client(IdempotencyMiddleware(app, store=store))
    for authorization in ("Bearer ann", "Bearer bob"):
        client.request(authorization=authorization)
    client.request()
    client.request()

    assert len(list(store.scan())) == 3


def test_coat_that_does_not_care_leaves_the_attempt_around_it() -> None:
    """As of an application that is mounted in another."""
    store = MemoryStore()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": str(current_attempt().number).encode()})

    inner = IdempotencyMiddleware(app, caller="anybody", store=store, methods=("PATCH",))
    client = Client(IdempotencyMiddleware(inner, caller="anybody", store=store))
    assert client.request().body == b"1"


def test_client_that_leaves_within_his_request_asked_for_nothing() -> None:
    """Half a body is none."""
    store = MemoryStore()
    client = starlette(created, store)
    parts: list[Message] = [{"type": "http.request", "body": b"ab", "more_body": True}]
    asked = scope("POST", "/orders/1", [("idempotency-key", "k")])
    assert asyncio.run(exchange(client.app, asked, parts)) == []
    assert not list(store.scan())


def test_client_that_leaves_later_does_not_stop_the_application() -> None:
    """Its stream is read to the end, and recorded for his repetition."""
    store = MemoryStore()

    async def stream(request: Request) -> Response:
        async def parts() -> Any:
            for each in (b"a", b"b"):
                await asyncio.sleep(0)
                yield each

        return StreamingResponse(parts())

    client = starlette(stream, store)
    assert client.request(path="/orders/1").body == b"ab"
    assert client.request(path="/orders/1").headers["idempotent-replayed"] == "true"


def test_background_task_is_part_of_the_operation() -> None:
    """It is over when the response is sent; if it fails, the claim is given back."""
    store = MemoryStore()
    done: list[int] = []

    async def view(request: Request) -> Response:
        return Response(background=BackgroundTask(done.append, 1))

    assert starlette(view, store).request(path="/orders/1").status == 200
    assert done == [1]

    async def failing(request: Request) -> Response:
        return Response(background=BackgroundTask(lambda: 1 / 0))

    with pytest.raises(ZeroDivisionError):
        starlette(failing, store).request("k-2", path="/orders/1")
    assert {each.status for each in store.scan()} == {Status.COMPLETED, Status.RELEASED}


@pytest.mark.parametrize("messages", [[], [{"type": "http.response.start", "status": 200}]])
def test_incomplete_response_is_none(messages: list[Message]) -> None:
    """The application has failed."""
    store = MemoryStore()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for each in messages:
            await send(each)

    client = Client(IdempotencyMiddleware(app, caller="anybody", store=store))
    with pytest.raises(RuntimeError, match="without a complete response"):
        client.request()
    assert [each.status for each in store.scan()] == [Status.RELEASED]


def test_application_learns_that_the_client_is_gone_at_the_end() -> None:
    """What waits for that ends then; what is sent later, or is no part of a response, is dropped."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["extensions"] == {}
        await receive()
        waiting = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not waiting.done()
        await send({"type": "http.response.debug"})
        await send({"type": "http.response.body", "body": b"x"})
        await send({"type": "http.response.body", "body": b"y"})
        assert (await waiting)["type"] == "http.disconnect"

    client = Client(IdempotencyMiddleware(app, caller="anybody", store="memory://"))
    assert client.request(path="/gone").body == b"x"


def test_cancelled_application_gives_the_claim_back() -> None:
    """As a server cancels it that has to stop."""
    store = MemoryStore()

    async def run() -> None:
        begun = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        middleware = IdempotencyMiddleware(app, caller="anybody", store=store)
        asked = scope("POST", "/", [("idempotency-key", "k")])
        waiting: list[Message] = [{"type": "http.request", "body": b""}]
        task = asyncio.ensure_future(exchange(middleware, asked, waiting))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [each.status for each in store.scan()] == [Status.RELEASED]


def test_caller_may_be_awaited() -> None:
    """As a session of a database is."""

    async def caller(scope: Any) -> str:
        return "tenant"

    assert starlette(created, MemoryStore(), caller=caller).request(path="/orders/1").status == 201


def test_what_a_view_commits_is_the_answer(tmp_path: Any) -> None:
    """Of the first request, too, whatever the view returns, or raises, after it."""
    store = SQLStore.from_url(f"sqlite:///{tmp_path}/shop.sqlite3")
    store.provision()

    async def view(request: Request) -> Response:
        def book() -> None:
            with current_attempt().transaction() as tx:
                tx.done(answer(201, {"booked": 5}))

        await asyncio.to_thread(book)
        if request.path_params["id"] == "raise":
            raise ZeroDivisionError
        return JSONResponse({"other": 1}, 500)

    client = starlette(view, store)
    for path in ("/orders/return", "/orders/raise"):
        first, again = client.request(path=path), client.request(path=path)
        assert first.status == again.status == 201
        assert first.body == again.body == b'{"booked": 5}'
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
    store.close()
