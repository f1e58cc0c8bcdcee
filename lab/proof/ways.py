"""The ways by which a body can be delivered once: as a task's, by a function, awaited or not, or by an HTTP request."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from celery_idempotent import current_attempt, idempotent
from celery_idempotent.contrib.http.asgi import IdempotencyMiddleware
from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.events import Event
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import InFlight, OutcomeUnknown, StoreUnavailable
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.store import Store
from lab.proof.verdicts import CODEC, TOLD, Told, tell, told_of

Body = Callable[[Claim | None], str]
Way = Callable[[Operation, Store, Heartbeat, Callable[[Event], None], Body], Told]
"""Delivers the operation once, and says what the caller was told."""


def _delivery(
    operation: Operation, store: Store, heartbeat: Heartbeat, observe: Callable[[Event], None], body: Body
) -> Told:
    return tell(Delivery(operation, store, CODEC, heartbeat, ControlFlow(), observe), body)


def _called(call: Callable[[Operation, Store, Callable[[], str]], Any]) -> Way:
    def way(operation: Operation, store: Store, _: object, __: object, body: Body) -> Told:
        try:
            return Told("finished", str(call(operation, store, lambda: body(_claim()))))
        except TOLD as error:
            return told_of(error)

    return way


def _claim() -> Claim:
    attempt = current_attempt()
    assert isinstance(attempt, ProtectedAttempt)
    return attempt._claim


def _function(operation: Operation, store: Store, body: Callable[[], str]) -> str:
    @idempotent(operation.policy, store=store, name=operation.task)
    def call(key: str) -> str:
        return body()

    return call(operation.identity.key)


def _awaited(operation: Operation, store: Store, body: Callable[[], str]) -> str:
    @idempotent(operation.policy, store=store, name=operation.task)
    async def call(key: str) -> str:
        await asyncio.sleep(0)
        return body()

    return asyncio.run(call(operation.identity.key))


def _request(operation: Operation, store: Store, body: Callable[[], str]) -> str:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        receipt = body().encode()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": receipt})

    guarded = IdempotencyMiddleware(app, caller="anybody", store=store, policy=operation.policy)
    return asyncio.run(_answer(guarded, operation.identity.key))


async def _answer(app: IdempotencyMiddleware, key: str) -> str:
    """The body of the answer to a request; what is no outcome is raised, as a function would."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", key.encode())]
    await app({"type": "http", "method": "POST", "path": "/charges", "headers": headers}, receive, send)
    start, *parts = sent
    text = b"".join(each["body"] for each in parts).decode()
    match start["status"]:
        case 409:
            raise InFlight(key, 0, "")
        case 503:
            raise StoreUnavailable("the store", "request", text)
        case 500:
            raise OutcomeUnknown(key, text)
        case _:
            return text


WAYS: Mapping[str, Way] = {
    "delivery": _delivery,
    "function": _called(_function),
    "awaited function": _called(_awaited),
    "request": _called(_request),
}
"""By name."""
