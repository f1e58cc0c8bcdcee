"""Every exception a user of this library can meet, and what to do about each.

::

    IdempotencyError
    ├── PolicyError           a declaration or an argument that cannot work; fix the code
    ├── KeyMissing            the call carries no idempotency key; nothing ran
    ├── KeyReused             the key belongs to a call with other arguments; nothing ran
    ├── InFlight              another delivery holds the key; come back later
    ├── LeaseLost             this attempt no longer owns the key; nothing was recorded
    │   └── DeadlineExceeded      ... because its body has been running for too long; it may still end
    ├── OutcomeUnknown        nobody can tell whether the effect happened; a person decides
    ├── ResultLost            the effect happened, its result could not be kept
    ├── WriteRefused          attempt.commit(): one of your writes was refused, and nothing was written
    ├── ReplayedFailure       the recorded failure, when its own type cannot be rebuilt
    └── StoreUnavailable      no certain answer from the store; nothing is reported as done
        └── StoreMisconfigured    ... and there will be none until somebody changes something
    SafeToRetry               raised *by* a task body: no effect has begun

All fields are positional and plain, and all of them are ``args``: that is what lets an exception survive pickle and
Celery's JSON result backend. ``_sentence`` builds the sentence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from celery_idempotent.printable import one_line
from celery_idempotent.troubleshooting import with_link

__all__ = [
    "DeadlineExceeded",
    "IdempotencyError",
    "IdempotencyWarning",
    "InFlight",
    "KeyMissing",
    "KeyReused",
    "LeaseLost",
    "OutcomeUnknown",
    "PolicyError",
    "ReplayedFailure",
    "ResultLost",
    "SafeToRetry",
    "StoreMisconfigured",
    "StoreUnavailable",
    "WriteRefused",
]


def _anchor(name: str) -> str:
    """The place of an entry on its page: what names the class, or the first word of what names the option."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", re.split(r"[ ,\[]", str(name))[0])
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def _of_class(cls: type) -> str:
    """The first class of this library that ``cls`` is: a class of somebody else has no entry of its own."""
    return _anchor(next(each.__name__ for each in cls.__mro__ if each.__module__.startswith("celery_idempotent.")))


class IdempotencyError(Exception):
    """Base of everything this library raises on its own behalf.

    Its text is one line, whatever its fields hold, and ends with the address of the page that says more.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.args = tuple(map(vars(self).get, self.__match_args__))

    @property
    def see(self) -> str:
        """The entry under ``docs/troubleshooting``: its page and its place there, which follow from the class."""
        return f"errors#{_of_class(type(self))}"

    def __str__(self) -> str:
        return one_line(with_link(self._sentence(), self.see))

    def _sentence(self) -> str:
        return super().__str__()


class IdempotencyWarning(UserWarning):
    """A setting under which the promise is weaker than its author probably thinks.

    Args:
        text: What is set, what comes of it, and what to write instead.
        option: The setting or option; the entry under ``docs/troubleshooting`` follows from it.
    """

    option = ""

    def __init__(self, text: str, option: str = "") -> None:
        super().__init__(*([text, option] if option else [text]))  # a subclass need not take an option to be rebuilt
        self.text = text
        self.option = option

    @property
    def see(self) -> str:
        """The entry under ``docs/troubleshooting``; empty without an option."""
        return f"warnings#{_anchor(self.option)}" if self.option else ""

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""  # of a subclass, too, that does not call the constructor above
        return one_line(with_link(text, self.see))


@dataclass(eq=False, repr=False)
class PolicyError(IdempotencyError, ValueError):
    """A policy, setting or argument cannot be used as given; nothing ran."""

    #: The option, setting or argument at fault.
    option: str
    #: ``repr`` of what was given.
    value: str
    #: What is wrong and what to write instead.
    remedy: str

    @property
    def see(self) -> str:
        """The entry under ``docs/troubleshooting``, by the option."""
        page = "settings" if self.option.startswith("idempotency_") else "options"
        return f"{page}#{_anchor(self.option)}"

    def _sentence(self) -> str:
        return f"{self.option}={self.value}: {self.remedy}"


@dataclass(eq=False, repr=False)
class KeyMissing(IdempotencyError):
    """The call has no idempotency key, so it was not run: unprotected is never the fallback."""

    #: Name of the task.
    task: str
    #: Where the key was looked for.
    source: str

    def _sentence(self) -> str:
        return (
            f"{self.task}: {self.source} is missing or null, or a key was given that is empty, so there is no "
            "idempotency key and nothing ran. Pass the argument; a task may be published with "
            "apply_async(..., idempotency_key='...') instead"
        )


@dataclass(eq=False, repr=False)
class KeyReused(IdempotencyError):
    """The key is retained for a call with other arguments; nothing ran and a retry cannot help.

    The rule of the IETF Idempotency-Key draft, section 2.7 (HTTP 422) and of Stripe's API.
    """

    #: The idempotency key.
    key: str
    #: Task id of the call that the key belongs to.
    task_id: str

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} belongs to a call with other arguments (task id {self.task_id}); "
            "nothing ran. Use a new key for a new effect, or narrow Policy(fingerprint=...) "
            "to the arguments that define it"
        )


@dataclass(eq=False, repr=False)
class InFlight(IdempotencyError):
    """Another delivery holds a running lease on the key; this one did nothing."""

    #: The idempotency key.
    key: str
    #: Milliseconds until the lease can be taken over, on the store's clock.
    retry_after: int
    #: Worker that holds the lease.
    holder: str

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} is in flight on {self.holder}; "
            f"its lease runs for another {self.retry_after} ms unless renewed"
        )


@dataclass(eq=False, repr=False)
class LeaseLost(IdempotencyError):
    """This attempt no longer owns its key: it wrote nothing and reports nothing as done.

    Stop producing effects. The delivery is tried again as a conflict and will meet the
    outcome of whoever took over.
    """

    #: The idempotency key.
    key: str
    #: The token of this attempt.
    fencing_token: int

    def _sentence(self) -> str:
        return f"idempotency key {self.key}: the attempt with fencing token {self.fencing_token} was taken over"


class DeadlineExceeded(LeaseLost):
    """The body has been running for longer than its policy's ``deadline``: this attempt begins nothing more.

    Its lease is not renewed any more, and others may take over once that is over. Let it pass: the claim ends
    without an outcome, as that of an attempt that never ended, and the delivery is postponed.
    """

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key}: the attempt with fencing token {self.fencing_token} has been running for "
            "longer than its Policy(deadline=...) allows; it begins nothing more, and another may take over"
        )


@dataclass(eq=False, repr=False)
class OutcomeUnknown(IdempotencyError):
    """An attempt under ``on_takeover="refuse"`` ended without a recorded outcome; it is never re-run.

    Find out whether the effect happened, then resolve the record.
    """

    #: The idempotency key.
    key: str
    #: How the attempt ended, for the person who resolves it.
    reason: str

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key}: it is unknown whether the effect happened ({self.reason}). "
            "Check the receiver, then run: celery -A <your app> idempotency resolve KEY, with --completed or --rerun"
        )


@dataclass(eq=False, repr=False)
class ResultLost(IdempotencyError):
    """The effect happened and will not be repeated, but its result could not be kept for replays."""

    #: The idempotency key.
    key: str
    #: Why: too large for the store or the policy, or not encodable.
    reason: str

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} is completed, but its result was not kept: {self.reason}. "
            "The effect is not repeated; a body that returns something small and serialisable, such as an id, keeps it"
        )


@dataclass(eq=False, repr=False)
class ReplayedFailure(IdempotencyError):
    """The recorded failure of an earlier delivery, whose exception type cannot be rebuilt here."""

    #: The idempotency key.
    key: str
    #: Qualified name of the exception that was recorded.
    type_name: str
    #: Its message; empty if none was kept.
    message: str

    def _sentence(self) -> str:
        told = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"idempotency key {self.key} failed earlier with {told}"


@dataclass(eq=False, repr=False)
class WriteRefused(IdempotencyError):
    """One of the writes given to ``attempt.commit()`` was refused; nothing was written, no effect has happened.

    It is the body's own error: it releases the claim or is remembered, as the policy says of exceptions.
    """

    #: The idempotency key.
    key: str
    #: Which write, such as ``writes[1] (Update of stock)``.
    write: str
    #: Why, in the store's words; ``ConditionalCheckFailed`` for a condition of yours.
    reason: str

    def _sentence(self) -> str:
        return f"idempotency key {self.key}: {self.write} was refused ({self.reason}); nothing was written"


@dataclass(eq=False, repr=False)
class StoreUnavailable(IdempotencyError):
    """The store gave no certain answer: the write may or may not have happened.

    Nothing is reported as done after it. The driver's exception is the ``__cause__``.
    """

    #: The store, readable, without credentials.
    store: str
    #: What was asked of it.
    operation: str
    #: What went wrong.
    reason: str

    #: Whether the write is stored all the same, and could only be forgotten.
    is_stored = False

    @property
    def see(self) -> str:
        """The entry under ``docs/troubleshooting``, by the class."""
        return f"stores#{_of_class(type(self))}"

    def _sentence(self) -> str:
        return f"{self.store}: {self.operation} failed: {self.reason}"


class StoreMisconfigured(StoreUnavailable):
    """The store cannot work until somebody changes a setting, a permission or a table; ``reason`` says what helps."""


class SafeToRetry(Exception):
    """Raise it from a task body to state that no effect has begun: the claim is released.

    The delivery fails with it, and the next one runs; nothing is tried again by itself. The only exception
    besides Celery's ``Retry`` that releases under ``on_takeover="refuse"``.
    """


def members(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group, however deeply they are nested; any other exception is its own only member."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from members(each)
    else:
        yield error


def are_all(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether ``error`` is of these kinds, or a group of nothing else."""
    return all(isinstance(each, kinds) for each in members(error))
