"""ASGI applications behind the middleware, without a server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from celery_idempotent import IdempotencyWarning, Policy, PolicyError, Status, current_attempt
from celery_idempotent.contrib.http import answer
from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware, route_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from tests.support.http_behaviour import Behaviour, Got, Reply, Shop

Message = dict[str, Any]
KEY = ("idempotency-key", "k")
START = Message(type="http.response.start", status=201, headers=[])


class Client(Shop):
    """Speaks ASGI with an application, or one that it serves: each request has an event loop of its own."""

    def __init__(self, app: Any = None) -> None:
        self.app = app
        self.bodies: list[bytes] = []

    def serve(self, respond: Callable[[], Reply], **options: Any) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.bodies.append((await receive())["body"])
            reply = respond()
            length = {} if reply.chunks else {"content-length": str(len(reply.body))}
            headers = [(n.lower().encode(), v.encode()) for n, v in {**length, **reply.headers}.items()]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            for each in reply.chunks or ():
                await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"" if reply.chunks else reply.body})

        self.app = IdempotencyMiddleware(app, **{"caller": "anybody", **options})

    def send(self, method: str, path: str, headers: list[tuple[str, str]], *parts: bytes) -> Got:
        waiting = [Message(type="http.request", body=each, more_body=each is not parts[-1]) for each in parts]
        start, *bodies = asyncio.run(exchange(self.app, scope(method, path, headers), waiting))
        assert [each.get("more_body", False) for each in bodies] == [True] * (len(bodies) - 1) + [False]
        named = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
        return Got(start["status"], named, b"".join(each["body"] for each in bodies))


def scope(method: str, path: str, headers: list[tuple[str, str]]) -> dict[str, Any]:
    """A connection's, as a server makes it."""
    path, _, query = path.partition("?")
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    about = {"method": method, "path": path, "root_path": "", "query_string": query.encode(), "headers": raw}
    return {"type": "http", **about, "extensions": {"http.response.pathsend": {}}}


async def exchange(app: Any, asked: Message, waiting: list[Message]) -> list[Any]:
    """All that ``app`` sends for one connection; what it receives when nothing waits is a disconnect."""
    receive = AsyncMock(side_effect=lambda: waiting.pop(0) if waiting else {"type": "http.disconnect"})
    await app(asked, receive, send := AsyncMock())
    return [each.args[0] for each in send.call_args_list]


class TestAsgi(Behaviour):
    """The behaviour that all coats share."""

    @pytest.fixture
    def shop(self) -> Client:
        return Client()


def starlette(endpoint: Callable[[Request], Awaitable[Response]], store: Any, **options: Any) -> Client:
    """A client of a Starlette application with one endpoint."""
    options = {"caller": "anybody", "store": store, **options}
    routes = [
        Mount("/api", routes=[Route("/{rest:path}", endpoint)]),
        Route("/orders/{id}", endpoint, methods=["POST"]),
    ]
    return Client(Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, **options)]))


async def created(request: Request) -> Response:
    """An endpoint that answers with the body, or the number of its attempt."""
    return Response(await request.body() or str(current_attempt().number), 201)


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """An application without a framework, which answers with the number of its attempt."""
    await receive()
    await send(START)
    await send({"type": "http.response.body", "body": str(current_attempt().number).encode()})


def test_record_is_called_by_the_route(store: MemoryStore) -> None:
    """So that metrics have as many names as the application has routes."""
    client = starlette(created, store)
    for path in ("/orders/1", "/orders/2", "/nowhere"):
        client.request(path=path)
    assert sorted(each.task for each in store.scan()) == ["POST /nowhere", *["POST /orders/{id}"] * 2]
    assert route_of({}) is None


def test_other_connections_pass() -> None:
    """Of a server's start, of WebSockets, and those that ``only`` leaves out, which has to be a function."""
    app = AsyncMock()
    middleware = IdempotencyMiddleware(app, caller="anybody", store="memory://", only=lambda scope: False)
    for each in ({"type": "lifespan"}, scope("POST", "/", [KEY])):
        asyncio.run(exchange(middleware, each, []))
    assert [each.args[0]["type"] for each in app.call_args_list] == ["lifespan", "http"]
    only: Any = "/orders"
    with pytest.raises(PolicyError, match="only"):
        IdempotencyMiddleware(plain, caller="anybody", store="memory://", only=only)
    with pytest.warns(IdempotencyWarning, match="caller is not given"):
        IdempotencyMiddleware(plain, store="memory://")


@pytest.mark.parametrize(
    ("headers", "parts", "told"),
    [
        (None, [b"abc", b"de", b"f"], "201 abcdef"),
        ([KEY], [b"ab", b"cd"], "201 abcd"),
        ([KEY, ("content-length", "4")], [b"ab", b"cd"], "201 abcd"),
        ([KEY], [b"ab", b"cde"], "413 body-too-large"),
        ([KEY, ("content-length", "4")], [b"abc"], "400 body-malformed"),
        ([KEY, ("content-length", "x")], [b"abc"], "400 body-malformed"),
        ([KEY, KEY], [b"abcd"], "400 key-malformed"),
    ],
)
def test_body_in_parts_is_one(store: MemoryStore, headers: Any, parts: list[bytes], told: str) -> None:
    """And it is bounded unless it is observed, however it comes; a declared length has to be the body's."""
    client = starlette(created, store, max_request=4, policy=Policy(mode="enforce" if headers else "observe"))
    assert str(client.send("POST", "/orders/1", headers or [KEY], *parts)) == told


@pytest.mark.parametrize("caller", ["authorization", lambda scope: None])
def test_nothing_is_read_of_a_stranger(caller: Any) -> None:
    """Hundreds of half-sent bodies would otherwise stay in memory, of whom nobody has let in."""
    app, receive, send = IdempotencyMiddleware(plain, store=MemoryStore(), caller=caller), AsyncMock(), AsyncMock()
    asyncio.run(app(scope("POST", "/orders/1", [KEY]), receive, send))
    assert (send.call_args_list[0].args[0]["status"], receive.called) == (403, False)


@pytest.mark.parametrize("inner", [{}, {"methods": ("PATCH",)}])
def test_coat_in_a_coat_is_one(store: MemoryStore, inner: Any) -> None:
    """The inner one meets its own operation, or does not care, and leaves the attempt around it."""
    within = IdempotencyMiddleware(plain, caller="anybody", store=store, **inner)
    client = Client(IdempotencyMiddleware(within, caller="anybody", store=store))
    assert [str(client.request()) for _ in range(2)] == ["201 1", "201 1 replayed"]


def test_client_that_leaves_within_his_request_asked_for_nothing(store: MemoryStore) -> None:
    """Half a body is none."""
    parts = [Message(type="http.request", body=b"ab", more_body=True)]
    assert asyncio.run(exchange(starlette(created, store).app, scope("POST", "/orders/1", [KEY]), parts)) == []
    assert not list(store.scan())


@pytest.mark.parametrize(("divisor", "status"), [(1, Status.COMPLETED), (0, Status.RELEASED)])
def test_background_task_is_part_of_the_operation(store: MemoryStore, divisor: int, status: Status) -> None:
    """It is over when the response is sent; if it fails, the claim is given back."""
    done: list[float] = []

    async def view(request: Request) -> Response:
        return Response(background=BackgroundTask(lambda: done.append(1 / divisor)))

    client = starlette(view, store)
    if divisor:
        assert (client.request(path="/orders/1").status, done) == (200, [1])
    else:
        with pytest.raises(ZeroDivisionError):
            client.request(path="/orders/1")
    assert [each.status for each in store.scan()] == [status]


@pytest.mark.parametrize("messages", [[], [START]])
def test_incomplete_response_is_none(store: MemoryStore, messages: list[Message]) -> None:
    """The application has failed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for each in messages:
            await send(each)

    with pytest.raises(RuntimeError, match="complete"):
        Client(IdempotencyMiddleware(app, caller="anybody", store=store)).request()
    assert [each.status for each in store.scan()] == [Status.RELEASED]


def test_application_learns_that_the_client_is_gone_at_the_end(store: MemoryStore) -> None:
    """Who waits for that ends then; later parts, or those of no response, are dropped."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["extensions"] == {}
        await receive()
        waiting = asyncio.ensure_future(receive())
        await send(START)
        await asyncio.sleep(0)
        assert not waiting.done(), "a stream of Starlette's would end here"
        for kind, body in (("debug", b""), ("body", b"x"), ("body", b"y")):
            await send({"type": f"http.response.{kind}", "body": body})
        assert (await waiting)["type"] == "http.disconnect"

    assert Client(IdempotencyMiddleware(app, caller="anybody", store=store)).request().body == b"x"


def test_cancelled_application_gives_the_claim_back(store: MemoryStore) -> None:
    """As a server cancels it that has to stop."""

    async def run() -> None:
        begun = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        middleware = IdempotencyMiddleware(app, caller="anybody", store=store)
        task = asyncio.ensure_future(
            exchange(middleware, scope("POST", "/", [KEY]), [Message(type="http.request", body=b"")])
        )
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [each.status for each in store.scan()] == [Status.RELEASED]


@pytest.mark.parametrize("fails", [False, True])
def test_answer_that_a_view_commits_counts(tmp_path: Any, fails: bool) -> None:
    """For the first request as for the others, whatever the view returns or raises after it."""
    store = SQLStore.from_url(f"sqlite:///{tmp_path}/shop.sqlite3")
    store.provision()

    async def view(request: Request) -> Response:
        def book() -> None:
            with current_attempt().transaction() as tx:
                tx.done(answer(201, {"booked": 5}))

        await asyncio.to_thread(book)
        if fails:
            raise ZeroDivisionError
        return JSONResponse({"other": 1}, 500)

    client = starlette(view, store, caller=AsyncMock(return_value="tenant"))
    answers = [str(client.request(path="/orders/1")) for _ in range(2)]
    assert answers == ['201 {"booked": 5}', '201 {"booked": 5} replayed']
    store.close()
