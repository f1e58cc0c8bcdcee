"""What a body can do with its attempt: effects that a crash between two of them does not repeat.

A claim around the body is not enough when the worker dies between an effect and the record of it. Each tool
here closes that gap for one kind of receiver; where no tool can, the author says which error is worse.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, assert_never

from kombu.exceptions import KombuError

from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.transaction import BodyTransaction, derived_id, signature_of
from celery_idempotent.errors import OutcomeUnknown, PolicyError, ResultLost, SafeToRetry, WriteRefused
from celery_idempotent.protocol.codec import Codec, Kept
from celery_idempotent.protocol.effects import Duration, Effect
from celery_idempotent.protocol.operation import OnTakeover
from celery_idempotent.protocol.steps import Begin, Call, Doubt, Finished, Recall, Step, Terms, decide_step, terms_of
from celery_idempotent.protocol.store import CommittingStore, RecordTooLarge, TransactionalStore, WriteFailed

__all__ = ["Protected"]

T = TypeVar("T")


class _Stretch(Enum):
    """Where in its effects a body stands."""

    BEFORE_ALL = "nothing said, nothing begun"
    BEFORE_EFFECTS = "in the block that says so"
    AMONG_EFFECTS = "something may have begun"


@dataclass(slots=True, eq=False)
class Protected:
    """The handle of a body that a claim protects.

    Args:
        attempt: The attempt that owns the key.
        codec: How the results of steps are kept.
        nothing_begun: Exceptions by which a call states that it had no effect.
        effects: What the policy declares.
        message_codec: How messages for the outbox are kept; None: as results are.
    """

    attempt: Attempt
    codec: Codec
    nothing_begun: tuple[type[BaseException], ...] = (SafeToRetry,)
    effects: Mapping[str, Effect] = field(default_factory=dict)
    message_codec: Codec | None = None
    _names: set[str] = field(default_factory=set, init=False)
    _naming: threading.Lock = field(default_factory=threading.Lock, init=False)
    _stretch: _Stretch = field(default=_Stretch.BEFORE_ALL, init=False)

    @property
    def key(self) -> str:
        """The idempotency key."""
        return self.attempt.key

    @property
    def fencing_token(self) -> int:
        """Larger than that of every earlier attempt."""
        return self.attempt.fencing_token

    @property
    def number(self) -> int:
        """1 for the operation's first attempt, 2 for the next, and so on."""
        return self.attempt.number

    @property
    def is_takeover(self) -> bool:
        """Whether the attempt before this one ended without a word."""
        return self.attempt.is_takeover

    def effect_key(self, name: str) -> str:
        """A key for the effect called ``name``; see :class:`~celery_idempotent.AttemptHandle`."""
        return self.attempt.effect_key(name)

    def ensure_owned(self) -> None:
        """Return if the attempt still owns its key; see :class:`~celery_idempotent.AttemptHandle`."""
        self.attempt.ensure_owned()

    @contextmanager
    def before_effects(self) -> Iterator[None]:
        """A stretch in which no effect has begun; see :class:`~celery_idempotent.AttemptHandle`."""
        if self._stretch is not _Stretch.BEFORE_ALL:
            raise PolicyError(
                "before_effects", "after an effect", "it is for the beginning of the body, and entered once"
            )
        self._stretch = _Stretch.BEFORE_EFFECTS
        try:
            yield
        except BaseException as error:
            self.attempt.excused = error
            raise
        finally:
            self._stretch = _Stretch.AMONG_EFFECTS

    def _begin_effect(self, what: str) -> None:
        if self._stretch is _Stretch.BEFORE_EFFECTS:
            raise PolicyError(
                what, "inside before_effects()", "make it after the block, which says that nothing has begun"
            )
        self._stretch = _Stretch.AMONG_EFFECTS
        self.attempt.excused = None  # an error of before, raised again now, is none of before

    def step(
        self,
        name: str,
        call: Callable[[Step], T],
        *,
        on_takeover: OnTakeover | None = None,
        window: Duration | None = None,
    ) -> T:
        """Make ``call`` unless an earlier attempt finished it; see :class:`~celery_idempotent.AttemptHandle`."""
        return self._made(name, call, terms_of(name, on_takeover, window, self.effects))

    def fenced_step(
        self, name: str, *, fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
    ) -> T:
        """Have one effect on a receiver that checks fencing tokens; see
        :class:`~celery_idempotent.AttemptHandle`."""
        return self._made(name, fenced(fence, probe, act), terms_of(name, None, None, self.effects, is_fenced=True))

    def commit(self, result: T, writes: Sequence[Mapping[str, Any]]) -> T:
        """Record ``result`` and make ``writes`` in one atomic step; see
        :class:`~celery_idempotent.AttemptHandle`."""
        self._begin_effect("commit")
        store = self.attempt.store
        if not isinstance(store, CommittingStore):
            raise PolicyError(
                "idempotency_store", repr(store), "commits no writes; attempt.commit() needs a DynamoDB store"
            )
        if self.attempt.committed is not None:
            raise PolicyError("commit", "a second time", "an operation commits once; give all writes to one commit()")
        kept = self.codec.keep(result)
        try:
            try:
                self.attempt.commit(store, kept, writes)
            except RecordTooLarge as error:
                self.attempt.commit(store, Kept(None, kept.value, str(error)), writes)
        except WriteFailed as error:
            raise WriteRefused(self.key, _described(error.position, writes), error.reason) from error
        value: T = kept.value
        return value

    def transaction(self, using: Any = None) -> BodyTransaction:
        """A transaction that the record is part of; see :class:`~celery_idempotent.AttemptHandle`."""
        self._begin_effect("transaction")
        store = self.attempt.store
        if not isinstance(store, TransactionalStore):
            raise PolicyError(
                "idempotency_store", repr(store), "has no transactions; attempt.transaction() needs an SQL store"
            )
        if self.attempt.committed is not None:
            raise PolicyError("transaction", "after a commit", "an operation commits once; do it all in one")
        return BodyTransaction(self.attempt, self.codec, self.message_codec or self.codec, store, using)

    def send(self, name: str, task: Any, *args: Any, **kwargs: Any) -> str:
        """Publish a follow-up task once; see :class:`~celery_idempotent.AttemptHandle`."""
        return self.step(name, sending(task, args, kwargs))

    def _made(self, name: str, call: Callable[[Step], T], terms: Terms) -> T:
        self._begin_effect("step")
        step = Step(name, self.effect_key(name), self.fencing_token)
        self._take(name)
        try:
            return self._performed(step, call, terms)
        except BaseException:
            self._names.discard(name)  # a body may catch what its call raised, and make the step again
            raise

    def _take(self, name: str) -> None:
        with self._naming:
            if name in self._names:
                raise PolicyError(
                    "step", repr(name), "this attempt has made a step of that name; name each step differently"
                )
            self._names.add(name)

    def _performed(self, step: Step, call: Callable[[Step], T], terms: Terms) -> T:
        attempt = self.attempt
        match decide_step(
            step.name,
            attempt.step_state(step.name),
            terms=terms,
            now=attempt.now(),
        ):
            case Call():
                return self._finished(step, call(step))
            case Begin():
                return self._begun(step, call)
            case Recall(finished):
                return self._recalled(step, finished)
            case Doubt(reason):
                raise OutcomeUnknown(self.key, reason)
            case unreachable:
                assert_never(unreachable)

    def _begun(self, step: Step, call: Callable[[Step], T]) -> T:
        try:
            self.attempt.begin_step(step.name)
        except RecordTooLarge as error:
            raise PolicyError("step", repr(step.name), f"the record has no room for it; {_RETURN_LESS}") from error
        try:
            value = call(step)
        except self.nothing_begun:
            self.attempt.forget_step(step.name)
            raise
        return self._finished(step, value)

    def _finished(self, step: Step, value: T) -> T:
        kept = self.attempt.unstruck(lambda: self.codec.keep(value))
        try:
            self.attempt.finish_step(step.name, Finished(kept.encoded, kept.lost))
        except RecordTooLarge as error:
            self.attempt.finish_step(step.name, Finished(None, str(error)))
        result: T = kept.value
        return result

    def _recalled(self, step: Step, finished: Finished) -> T:  # type: ignore[type-var]
        if finished.result is None:
            raise ResultLost(self.key, f"step {step.name!r}: {finished.lost}; {_RETURN_LESS}")
        try:
            result: T = self.codec.decode(finished.result)
        except KombuError as error:
            reason = f"step {step.name!r} cannot be decoded here: {self.codec.told(error)}"
            raise ResultLost(self.key, reason) from error
        return result


def _described(position: int | None, writes: Sequence[Mapping[str, Any]]) -> str:
    if position is None:
        return "writes"
    match writes[position]:
        case {**actions} if len(actions) == 1:
            ((action, body),) = actions.items()
            table = body.get("TableName") if isinstance(body, Mapping) else None
            return f"writes[{position}] ({action} of {table})"
        case _:
            return f"writes[{position}]"


def sending(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Step], str]:
    """A call that publishes the task under the task id of its step, which is what it returns."""
    signature = signature_of(task, args, kwargs)

    def call(step: Step) -> str:
        task_id = derived_id(step.key)
        signature.apply_async(task_id=task_id)
        return task_id

    return call


def fenced(
    fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
) -> Callable[[Step], T]:
    """A call that shuts out earlier attempts, then looks for their effect, and acts only if there is none."""

    def call(step: Step) -> T:
        fence(step)
        found = probe(step)
        return act(step) if found is None else found

    return call


_RETURN_LESS = "return something small from each step, such as an id"
