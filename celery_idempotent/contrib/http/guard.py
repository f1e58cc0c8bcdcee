"""The guard of requests: what all frameworks have in common beside the rules."""

import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any, Generic, NoReturn, TypeVar
from uuid import uuid4
from weakref import finalize

from celery import Celery

from celery_idempotent.contrib.http.semantics import (
    SIGNATURE,
    Caller,
    HttpAnswer,
    HttpOptions,
    HttpRules,
    Problem,
    RequestFacts,
    answer_of,
    by_authorization,
)
from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.engine.execution import executed_by, execution
from celery_idempotent.errors import IdempotencyWarning, SafeToRetry
from celery_idempotent.integration.task.gates import Gate
from celery_idempotent.integration.task.places import Place, place_of
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.store import Store

R = TypeVar("R")

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
        """Append ``chunk``."""
        self._size += len(chunk)
        self._file.write(chunk)

    def fill(self, chunks: Iterable[bytes]) -> "Buffer":
        """Append all ``chunks``."""
        for each in chunks:
            self.write(each)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """All of it in parts."""
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
        return rules.record_of(HttpAnswer(self.status, tuple(self.headers), bytes(self.body)))


class HttpGuard:
    """What guards the requests of one application: the rules, and the store."""

    def __init__(
        self, caller: Caller | None, store: str | Store | None, celery: Celery | None, options: HttpOptions
    ) -> None:
        if caller is None:
            warnings.warn(IdempotencyWarning(_NOBODY_NAMED, "caller"), stacklevel=3)
        self.rules = HttpRules(caller=caller, **options)
        self._where = place_of(store, celery)

    def unprotected(self) -> AbstractContextManager[Any]:
        """Within the block, the current attempt protects nothing, unless one around it does."""
        if execution() is not None:
            return nullcontext()
        identity = Identity(f"{self.rules.policy.scope_of('http')}:{uuid4()}", None)
        return executed_by(Attempt(lambda: identity), "http", None, HttpGuard)

    def caller(self, request: Any, authorization: str | None, cookie: str | None) -> Any:
        """What the author says about who calls; where he says nothing, a cookie may be somebody's session."""
        match self.rules.caller:
            case "anybody" as everybody:
                return everybody
            case "authorization":
                return by_authorization(authorization)
            case None:
                return by_authorization(authorization) or (None if cookie else "anybody")
            case function:
                return function(request)

    def call(self, facts: RequestFacts, make: Callable[[], Response[R]]) -> R | HttpAnswer:
        """What to send: the response that ``make`` makes, or one in its place."""
        request_call: _RequestCall[R] = _RequestCall(self.rules, self._where, facts)

        def body(attempt: Attempt) -> Any:
            request_call.has_run = True
            return request_call.record(make())

        with request_call:
            request_call.answer(request_call.gate.passed(request_call.identity, body))
        return request_call.answered

    async def call_on_loop(self, facts: RequestFacts, make: Callable[[], Awaitable[Response[R]]]) -> R | HttpAnswer:
        """As :meth:`call`, without blocking the event loop."""
        request_call: _RequestCall[R] = _RequestCall(self.rules, self._where, facts)

        async def body(attempt: Attempt) -> Any:
            request_call.has_run = True
            return request_call.record(await make())

        with request_call:
            request_call.answer(await request_call.gate.passed_on_loop(request_call.identity, body))
        return request_call.answered


class _RequestCall(Generic[R]):
    """One request, and what has become of it; an error in its block becomes ``answered``, unless it is the body's."""

    answered: R | HttpAnswer

    def __init__(self, rules: HttpRules, where: Callable[[], Place], facts: RequestFacts) -> None:
        self._rules = rules
        self.gate = Gate(facts.name, rules.policy, where)
        self.identity: Callable[[], Identity] = partial(self.gate.identity, SIGNATURE, (), facts.arguments())
        self.has_run = False
        self._response: Response[R] | None = None
        self._value: Any = object()  # equal to nothing that is recorded

    def record(self, response: Response[R]) -> Any:
        """What is recorded of the application's response; raises what is to be recorded, or ``NotAnOutcome``."""
        self._response = response
        if response.raised is not None:
            raise response.raised
        if not self._rules.is_outcome(response.status):
            raise NotAnOutcome(f"status {response.status}")
        self._value = response.value(self._rules)
        return self._value

    def answer(self, found: Outcome | Conflict) -> None:
        """Settle what to send where the gate has answered."""
        if isinstance(found, Conflict):
            self.answered = self._rules.refusal(Problem.IN_FLIGHT, self.gate.pause_after(found, 0))
        # What else is recorded was committed by the view, or by an attempt that took over, and it is what counts.
        elif self._response is not None and found.value == self._value:
            self.answered = self._response.native
        else:
            kept = answer_of(found.value)
            self.answered = kept if self.has_run else kept.as_replay()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        instead = self._instead_of(error) if isinstance(error, Exception) else None
        if instead is not None:
            self.answered = instead
        return instead is not None

    def _instead_of(self, error: Exception) -> R | HttpAnswer | None:
        response = self._response
        if response is not None and isinstance(error, NotAnOutcome):
            return response.native
        refusal = self._rules.refusal_of(error, self.identity().key, has_run=self.has_run)
        return response.native if refusal is None and response is not None and error is response.raised else refusal
