"""Requests to ASGI applications, without a server."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware
from tests.support.http_behaviour import Got, Reply, Shop

__all__ = ["Client", "Message", "exchange", "scope"]

Message = MutableMapping[str, Any]


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
        waiting: list[Message] = [
            {"type": "http.request", "body": each, "more_body": each is not parts[-1]} for each in parts
        ]
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


async def exchange(app: Any, asked: dict[str, Any], waiting: list[Message]) -> list[Message]:
    """All that ``app`` sends for one connection; what it receives when nothing waits is a disconnect."""
    sent: list[Message] = []

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(asked, receive, send)
    return sent
