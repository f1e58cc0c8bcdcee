"""The guard of requests: what all frameworks have in common beside the rules."""

import warnings
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from tempfile import SpooledTemporaryFile
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from uuid import uuid4
from weakref import finalize

from celery import Celery

from celery_idempotent.contrib.http.semantics import (
    REPLAYED,
    SIGNATURE,
    Caller,
    HttpAnswer,
    HttpOptions,
    HttpRules,
    Problem,
    RequestFacts,
    answer_of,
    by_authorization,
    caller_of,
    key_of,
    record_of,
)
from celery_idempotent.engine.attempt import Attempt, executed_by, execution
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.errors import IdempotencyWarning, SafeToRetry
from celery_idempotent.integration.task.guard import Guard, place_of
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.store import Store

R = TypeVar("R")
T = TypeVar("T")

_CHUNK = 65_536

_NOBODY_NAMED = (
    "caller is not given, so requests with neither an Authorization header nor a cookie share their keys, and those "
    'with a cookie alone are refused; name the user or tenant by a function, or write caller="anybody"'
)


class Buffer:
    """The body of a response, in memory up to a size, and in a file beyond it."""

    def __init__(self, limit: int) -> None:
        self._file = SpooledTemporaryFile(limit)  # noqa: SIM115 - as long as the buffer
        finalize(self, self._file.close)
        self._size = 0

    def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        self._file.write(chunk)

    def fill(self, chunks: Iterable[bytes]) -> "Buffer":
        for each in chunks:
            self.write(each)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK):
            yield chunk


class _Unkept:
    """In place of a response that is too large: no serialiser can keep it, and each says why."""

    def __init__(self, size: int, limit: int) -> None:
        self._reason = f"a response of {size} bytes, over max_response={limit}"

    def __json__(self) -> NoReturn:
        raise ValueError(self._reason)

    def __reduce__(self) -> NoReturn:
        raise ValueError(self._reason)

    def __repr__(self) -> str:
        return self._reason


class NotAnOutcome(SafeToRetry):
    """The response is none that is recorded: the claim is given back, and the caller gets it all the same."""


@dataclass(frozen=True, slots=True)
class Response(Generic[R]):
    """A response of the application's: ``native`` is what its framework sends, the rest is what may be recorded.

    Where the framework has made it of an exception that the view ``raised``, that is recorded in its place.
    """

    native: R
    status: int
    headers: Iterable[tuple[str, str]]
    body: bytes | Buffer
    raised: Exception | None = None

    def value(self, rules: HttpRules) -> Any:
        """What is recorded of it."""
        if len(self.body) > rules.max_response:
            return _Unkept(len(self.body), rules.max_response)
        return record_of(HttpAnswer(self.status, tuple(self.headers), bytes(self.body)), rules.headers)


class HttpExchange(Protocol[R]):
    """A request of one framework's, and how its response comes about. Nothing waits where it is not ``is_async``."""

    @property
    def native(self) -> Any:
        """The request, as functions of the author's take it."""

    @property
    def method(self) -> str:
        """Its method."""

    @property
    def is_async(self) -> bool:
        """Whether an event loop serves it."""

    def lines(self, name: str) -> list[str]:
        """The header lines of this name."""

    async def read(self, rules: HttpRules) -> bytes | Problem | None:
        """The body, or what is wrong with it; None where none can be had, and the request runs unprotected."""

    def facts(self, **known: Any) -> RequestFacts:
        """What the request is about; ``known`` are method, body, key and caller."""

    async def respond(self, limit: int) -> Response[R]:
        """The application's whole response, up to ``limit`` bytes of it in memory."""

    async def pass_on(self) -> R:
        """The application's response as it is, unprotected."""


class HttpGuard:
    """What guards the requests of one application: the rules, and the store."""

    def __init__(
        self, caller: Caller | None, store: str | Store | None, celery: Celery | None, options: HttpOptions
    ) -> None:
        if caller is None:
            warnings.warn(IdempotencyWarning(_NOBODY_NAMED, "caller"), stacklevel=3)
        self.rules = HttpRules(caller=caller, **options)
        self._where = place_of(store, celery)

    async def answer(self, exchange: HttpExchange[R]) -> R | HttpAnswer:
        """What to send: the application's response, or one in its place."""
        facts = await self._facts(exchange)
        if isinstance(facts, RequestFacts):
            return await self._call(facts, exchange)
        if facts is not None and self.rules.refuses:
            return self.rules.refusal(facts)
        with self._unprotected():
            return await exchange.pass_on()

    async def _facts(self, exchange: HttpExchange[R]) -> RequestFacts | Problem | None:
        """What a request is about, or why it is refused; None where it runs unprotected."""
        if exchange.method not in self.rules.methods:
            return None
        key = key_of(exchange.lines("Idempotency-Key"))
        if isinstance(key, Problem):
            return None if key is Problem.KEY_MISSING and not self.rules.required else key
        named = self._caller(exchange)
        caller = caller_of(await named if exchange.is_async and isawaitable(named) else named)
        if isinstance(caller, Problem):
            return caller
        if problem := self.rules.problem_of_length(_line(exchange, "Content-Length")):
            return problem
        # Not before: whoever may not come must not have a body kept here.
        body = await exchange.read(self.rules)
        if not isinstance(body, bytes):
            return body
        if len(body) > self.rules.max_request:
            return Problem.BODY_TOO_LARGE
        return exchange.facts(method=exchange.method, body=body, key=key, caller=caller)

    def _caller(self, exchange: HttpExchange[R]) -> Any:
        """What the author says about who calls; where he says nothing, a cookie may be somebody's session."""
        authorization = _line(exchange, "Authorization")
        match self.rules.caller:
            case "anybody" as everybody:
                return everybody
            case "authorization":
                return by_authorization(authorization)
            case None:
                return by_authorization(authorization) or (None if _line(exchange, "Cookie") else "anybody")
            case function:
                return function(exchange.native)

    def _unprotected(self) -> AbstractContextManager[Any]:
        """Within the block, the current attempt protects nothing, unless one around it does."""
        if execution() is not None:
            return nullcontext()
        identity = Identity(f"{self.rules.policy.scope_of('http')}:{uuid4()}", None)
        return executed_by(Attempt(lambda: identity), "http", None, HttpGuard)

    async def _call(self, facts: RequestFacts, exchange: HttpExchange[R]) -> R | HttpAnswer:
        rules = self.rules
        gate = Guard(facts.name, rules.policy, self._where)
        identity = partial(gate.identity, SIGNATURE, (), facts.arguments())
        has_run = False
        response: list[Response[R]] = []
        value: Any = object()  # equal to nothing that is recorded

        async def body() -> Any:
            nonlocal has_run, value
            has_run = True
            response.append(await exchange.respond(rules.max_response))
            if response[0].raised is not None:
                raise response[0].raised
            if not rules.is_outcome(response[0].status):
                raise NotAnOutcome(f"status {response[0].status}")
            value = response[0].value(rules)
            return value

        try:
            if exchange.is_async:
                found = await gate.call_on_loop(identity, body)
            else:
                found = gate.call(identity, lambda: finish(body()))
            if isinstance(found, Conflict):
                return rules.refusal(Problem.IN_FLIGHT, gate.pause_after(found, 0))
            # What else is recorded was committed by the view, or by an attempt that took over, and it is what counts.
            if response and found.value == value:
                return response[0].native
            kept = answer_of(found.value)
            return kept if has_run else replace(kept, headers=(*kept.headers, REPLAYED))
        except Exception as error:
            if response and isinstance(error, NotAnOutcome):
                return response[0].native
            refusal = rules.refusal_of(error, identity().key, has_run=has_run)
            if refusal is not None:
                return refusal
            if response and error is response[0].raised:
                return response[0].native
            raise


def finish(answering: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        answering.send(None)
    except StopIteration as over:
        result: T = over.value
        return result
    raise RuntimeError("a request that no event loop serves has waited for one")


def _line(exchange: HttpExchange[Any], name: str) -> str | None:
    return next(iter(exchange.lines(name)), None)
