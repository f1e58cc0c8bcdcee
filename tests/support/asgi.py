"""Requests to ASGI applications, without a server."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware
from tests.support.http_behaviour import Got, Reply, Sender, Shop

__all__ = ["AsgiShop", "Client", "Message", "exchange", "scope"]

Message = MutableMapping[str, Any]


class Client(Sender):
    """Speaks ASGI: each request is a connection, in an event loop of its own."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Got:
        return self.send_parts(method, path, headers, [body])

    def send_parts(self, method: str, path: str, headers: list[tuple[str, str]], parts: list[bytes]) -> Got:
        """Send a request whose body comes in parts."""
        waiting: list[Message] = [
            {"type": "http.request", "body": each, "more_body": each is not parts[-1]} for each in parts
        ]
        return asyncio.run(self._exchange(scope(method, path, headers), waiting))

    async def _exchange(self, asked: dict[str, Any], waiting: list[Message]) -> Got:
        sent = await exchange(self.app, asked, waiting)
        start = sent[0]
        assert [each.get("more_body", False) for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
        named = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
        return Got(start["status"], named, b"".join(each["body"] for each in sent[1:]))


def scope(method: str, path: str, headers: list[tuple[str, str]]) -> dict[str, Any]:
    """A connection's, as a server makes it."""
    path, _, query = path.partition("?")
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": raw,
        "extensions": {"http.response.pathsend": {}},
    }


async def exchange(app: Any, asked: dict[str, Any], waiting: list[Message]) -> list[Message]:
    """All that ``app`` sends for one connection; what it receives when nothing waits is a disconnect."""
    sent: list[Message] = []

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(asked, receive, send)
    return sent


class AsgiShop(Client, Shop):
    """An application of plain ASGI."""

    def __init__(self) -> None:
        super().__init__(None)
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
