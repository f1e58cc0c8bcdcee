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

All fields are positional and plain, and all of them reach ``super().__init__``: that is what
lets an exception survive pickle and Celery's JSON result backend. ``_sentence`` builds the sentence.
"""

import re
from collections.abc import Iterator

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


class PolicyError(IdempotencyError, ValueError):
    """A policy, setting or argument cannot be used as given; nothing ran.

    Args:
        option: The option, setting or argument at fault.
        value: ``repr`` of what was given.
        remedy: What is wrong and what to write instead.
    """

    def __init__(self, option: str, value: str, remedy: str) -> None:
        super().__init__(option, value, remedy)
        self.option = option
        self.value = value
        self.remedy = remedy

    @property
    def see(self) -> str:
        """The entry under ``docs/troubleshooting``, by the option."""
        page = "settings" if self.option.startswith("idempotency_") else "options"
        return f"{page}#{_anchor(self.option)}"

    def _sentence(self) -> str:
        return f"{self.option}={self.value}: {self.remedy}"


class KeyMissing(IdempotencyError):
    """The call has no idempotency key, so it was not run: unprotected is never the fallback.

    Args:
        task: Name of the task.
        source: Where the key was looked for.
    """

    def __init__(self, task: str, source: str) -> None:
        super().__init__(task, source)
        self.task = task
        self.source = source

    def _sentence(self) -> str:
        return (
            f"{self.task}: {self.source} is missing or null, or an explicit key that is empty, so this call has no "
            "idempotency key; nothing ran. Pass the argument; a task may be published with "
            "apply_async(..., idempotency_key='...') instead"
        )


class KeyReused(IdempotencyError):
    """The key is retained for a call with other arguments; nothing ran and a retry cannot help.

    The rule of the IETF Idempotency-Key draft, section 2.7 (HTTP 422) and of Stripe's API.

    Args:
        key: The idempotency key.
        task_id: Task id of the call that the key belongs to.
    """

    def __init__(self, key: str, task_id: str) -> None:
        super().__init__(key, task_id)
        self.key = key
        self.task_id = task_id

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} belongs to a call with other arguments (task id {self.task_id}); "
            "nothing ran. Use a new key for a new effect, or narrow Policy(fingerprint=...) "
            "to the arguments that define it"
        )


class InFlight(IdempotencyError):
    """Another delivery holds a running lease on the key; this one did nothing.

    Args:
        key: The idempotency key.
        retry_after: Milliseconds until the lease can be taken over, on the store's clock.
        holder: Worker that holds the lease.
    """

    def __init__(self, key: str, retry_after: int, holder: str) -> None:
        super().__init__(key, retry_after, holder)
        self.key = key
        self.retry_after = retry_after
        self.holder = holder

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} is in flight on {self.holder}; "
            f"its lease runs for another {self.retry_after} ms unless renewed"
        )


class LeaseLost(IdempotencyError):
    """This attempt no longer owns its key: it wrote nothing and reports nothing as done.

    Stop producing effects. The delivery is tried again as a conflict and will meet the
    outcome of whoever took over.

    Args:
        key: The idempotency key.
        fencing_token: The token of this attempt.
    """

    def __init__(self, key: str, fencing_token: int) -> None:
        super().__init__(key, fencing_token)
        self.key = key
        self.fencing_token = fencing_token

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


class OutcomeUnknown(IdempotencyError):
    """An attempt under ``on_takeover="refuse"`` ended without a recorded outcome; it is never re-run.

    Find out whether the effect happened, then resolve the record.

    Args:
        key: The idempotency key.
        reason: How the attempt ended, for the person who resolves it.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key}: it is unknown whether the effect happened ({self.reason}). "
            "Check the receiver, then run: celery -A <your app> idempotency resolve KEY, with --completed or --rerun"
        )


class ResultLost(IdempotencyError):
    """The effect happened and will not be repeated, but its result could not be kept for replays.

    Args:
        key: The idempotency key.
        reason: Why: too large for the store or the policy, or not encodable.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def _sentence(self) -> str:
        return (
            f"idempotency key {self.key} is completed, but its result was not kept: {self.reason}. "
            "The effect is not repeated; a body that returns something small and serialisable, such as an id, keeps it"
        )


class ReplayedFailure(IdempotencyError):
    """The recorded failure of an earlier delivery, whose exception type cannot be rebuilt here.

    Args:
        key: The idempotency key.
        type_name: Qualified name of the exception that was recorded.
        message: Its message; empty if none was kept.
    """

    def __init__(self, key: str, type_name: str, message: str) -> None:
        super().__init__(key, type_name, message)
        self.key = key
        self.type_name = type_name
        self.message = message

    def _sentence(self) -> str:
        told = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"idempotency key {self.key} failed earlier with {told}"


class WriteRefused(IdempotencyError):
    """One of the writes given to ``attempt.commit()`` was refused; nothing was written, no effect has happened.

    It is the body's own error: it releases the claim or is remembered, as the policy says of exceptions.

    Args:
        key: The idempotency key.
        write: Which write, such as ``writes[1] (Update of stock)``.
        reason: Why, in the store's words; ``ConditionalCheckFailed`` for a condition of yours.
    """

    def __init__(self, key: str, write: str, reason: str) -> None:
        super().__init__(key, write, reason)
        self.key = key
        self.write = write
        self.reason = reason

    def _sentence(self) -> str:
        return f"idempotency key {self.key}: {self.write} was refused ({self.reason}); nothing was written"


class StoreUnavailable(IdempotencyError):
    """The store gave no certain answer: the write may or may not have happened.

    Nothing is reported as done after it. The driver's exception is the ``__cause__``.

    Args:
        store: The store, readable, without credentials.
        operation: What was asked of it.
        reason: What went wrong.
    """

    #: Whether the write is stored all the same, and could only be forgotten.
    is_stored = False

    def __init__(self, store: str, operation: str, reason: str) -> None:
        super().__init__(store, operation, reason)
        self.store = store
        self.operation = operation
        self.reason = reason

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
