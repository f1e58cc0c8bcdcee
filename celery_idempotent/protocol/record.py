"""The record: everything a store keeps about one idempotency key.

Times are integers, milliseconds since the epoch in UTC on the *store's* clock. ``expires_at`` is the one
exception: whole seconds, because DynamoDB's TTL attribute must be.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from hashlib import sha256
from typing import Any, Self, get_args, get_type_hints

from celery_idempotent.errors import StoreMisconfigured

SCHEMA = 1
"""Version of the record's layout. A reader that meets a newer one refuses it."""


class Status(StrEnum):
    """Where an operation stands. COMPLETED and FAILED are final until they are forgotten."""

    IN_PROGRESS = "IN_PROGRESS"
    """An attempt owns the key, until its lease is over and somebody takes over."""
    COMPLETED = "COMPLETED"
    """The effect happened; the result is replayed."""
    FAILED = "FAILED"
    """A failure that is an outcome, by ``remember`` or ``on_takeover="refuse"``; it is replayed."""
    RELEASED = "RELEASED"
    """Given back without an outcome, or recorded by a publisher; the next delivery runs at once."""
    UNKNOWN = "UNKNOWN"
    """It cannot be known whether the effect happened; only a person's verdict leaves this state."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One idempotency key and all that is known about it; never changed, only replaced."""

    key: str
    status: Status
    #: Made for every write and for no other; the only thing ``swap`` compares.
    revision: str
    #: Nonce of the attempt that owns or owned the key. Never the task id: a redelivery shares that. Empty where a
    #: publisher has written the record, and nobody has claimed it since.
    owner: str
    #: Grows with every claim, also across releases and purges.
    fencing_token: int
    #: Until when others must wait; of what a publisher wrote, until when other publishers take its word.
    lease_until: int
    #: Hash of the declared arguments; None where the policy declares none.
    fingerprint: str | None
    #: How many claims this operation took.
    attempts: int
    #: Attempts in a row that never ended; 0 again after one that did.
    takeovers: int = 0
    created_at: int
    updated_at: int
    task: str
    task_id: str
    worker: str
    #: Name of the app that made the claim, for people.
    app: str = ""
    #: The process that runs the body: its machine, pid and start, as the engine writes them; empty if not known.
    process: str = ""
    #: What the policy's ``label`` says of the first call, in clear; for people.
    label: str = ""
    #: The W3C trace context (``traceparent``) of the attempt, where telemetry is on; with its owner's mark.
    trace: str = ""
    #: Finished and started steps of the operation.
    steps: Mapping[str, Any] = field(default_factory=dict)
    #: An operator's last word on the operation, as ``given`` writes it; empty: nobody has judged it.
    verdict: Mapping[str, Any] = field(default_factory=dict)
    #: The encoded outcome, and how it is encoded. None on COMPLETED: the result was lost.
    result: str | bytes | None = None
    content_type: str | None = None
    #: For people: why FAILED, UNKNOWN, or COMPLETED without a result.
    error: str | None = None
    #: Seconds since the epoch; only on COMPLETED and FAILED.
    expires_at: int | None = None
    schema: int = SCHEMA

    def but(self, **changes: Any) -> Self:
        """The record with these fields changed.

        As ``dataclasses.replace``, which takes longer than all the rest of a write: no field depends on another.
        """
        held = vars(self) | changes
        if len(held) != len(_FIELDS):
            raise TypeError(f"a record has no field {min(changes.keys() - set(_FIELDS))!r}")
        changed = object.__new__(type(self))
        object.__setattr__(changed, "__dict__", held)
        return changed

    def to_fields(self) -> dict[str, Any]:
        """All fields that hold something, as plain values; what a store writes."""
        return {name: value for name, value in vars(self).items() if value != _NOTHING.get(name)}

    @classmethod
    def from_fields(
        cls, values: Mapping[str, Any], *, store: str, decode: Callable[[str, Any], Any] | None = None
    ) -> Self:
        """The record that ``to_fields`` described.

        Args:
            values: Field names and values; unknown names are ignored. ``steps`` and ``verdict`` may be their JSON.
            store: Name of the store, for the error.
            decode: Gives the plain value of a field, by its name; may raise one of :data:`UNREADABLE`. None: all
                values are plain.

        Raises:
            RecordUnreadable: The record was written by a newer version of this library, or is not one
                of its records, or a field of it cannot be what was written. It is left as it is.
        """
        _check_schema(values, store, decode)
        try:
            known = {name: value for name, value in values.items() if name in _TYPES}
            if decode:
                known = {name: decode(name, value) for name, value in known.items()}
            for name in _JSON & known.keys():
                if isinstance(known[name], str | bytes):
                    known[name] = json.loads(known[name])
            _check(known)
            known["status"] = _STATUSES.get(known["status"]) or Status(known["status"])
            return cls._of(known)
        except UNREADABLE as error:
            raise damaged(values.get("key"), error, store=store) from error

    @classmethod
    def _of(cls, known: Mapping[str, Any]) -> Self:
        """As ``Record(**known)``, in a third of the time, and None for a fingerprint that is not there."""
        if not known.keys() >= _NEEDED:
            raise KeyError(min(_NEEDED - known.keys()))
        record = object.__new__(cls)
        vars(record).update(_DEFAULTS, **known)
        return record


BLANK = Record(
    key="",
    status=Status.UNKNOWN,
    revision="",
    owner="",
    fencing_token=0,
    lease_until=0,
    fingerprint=None,
    attempts=0,
    created_at=0,
    updated_at=0,
    task="",
    task_id="",
    worker="",
)
"""What others are made of, by :meth:`Record.but`."""

UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
"""What Python raises over data that are not what they should be."""

_MOST_TOLD = 200
"""Characters of what is wrong with a record; Python likes to quote all of what it could not read."""


class RecordUnreadable(StoreMisconfigured):
    """A record cannot be read: a newer version wrote it, or somebody else did, or it is damaged."""


def damaged(key: object, error: Exception, *, store: str) -> RecordUnreadable:
    """The error for a record that is not what was written; ``error`` is one of :data:`UNREADABLE`."""
    told = f"{type(error).__name__}: {error}"[:_MOST_TOLD]
    return RecordUnreadable(
        store,
        "read",
        f"the record {_legible(key)!r} is damaged: {told}; look at it, and know that without it the operation "
        "runs again",
    )


def _legible(key: object) -> object:
    return bytes(key).decode(errors="backslashreplace") if isinstance(key, bytes | bytearray | memoryview) else key


def _check_schema(values: Mapping[str, Any], store: str, decode: Callable[[str, Any], Any] | None) -> None:
    """Look at the version before anything that it could have changed."""
    key = _legible(values.get("key"))
    try:
        schema = decode("schema", values["schema"]) if decode else values["schema"]
    except UNREADABLE:
        schema = None
    if type(schema) is not int or schema < 0:
        problem = f"{key!r} holds no record, or a damaged one: its schema cannot be read; look at it"
    elif schema > SCHEMA:
        problem = (
            f"the record {key!r} has schema {schema} and this version of celery-idempotent knows up to {SCHEMA}; "
            "upgrade this worker"
        )
    else:
        return
    raise RecordUnreadable(store, "read", f"{problem}, or point idempotency_store at a table of its own")


def _check(known: Mapping[str, Any]) -> None:
    """Refuse a field that is not of its type: what follows from a record counts on them."""
    for name, value in known.items():
        kind = type(value)
        if kind not in _TYPES[name]:
            raise TypeError(f"{name} is a {kind.__name__}")
        if kind is int and not 0 <= value < END_OF_NUMBERS:
            raise ValueError(f"{name} is {value}")
    if not known["key"] or not known["revision"]:
        raise ValueError("key or revision is empty")
    if known.get("expires_at") is not None and known["status"] not in _OUTCOMES:
        raise ValueError(f"expires_at is set on {known['status']}, which never expires")


END_OF_NUMBERS = 2**63 - 1
"""Every store holds 64 bits, and the next claim adds one."""

_OUTCOMES = (Status.COMPLETED, Status.FAILED)

_STATUSES = {str(each): each for each in Status}
"""By their texts; to ask the class takes five times as long."""

_FIELDS = tuple(each.name for each in fields(Record))

_JSON = frozenset({"steps", "verdict"})

_NEEDED = frozenset(
    each.name for each in fields(Record) if each.default is MISSING and each.default_factory is MISSING
) - {"fingerprint"}

_DEFAULTS: Mapping[str, Any] = {
    each.name: None if each.default is MISSING else each.default for each in fields(Record)
} | {"steps": {}, "verdict": {}}
"""By field, its value where a store has none."""

_NOTHING: Mapping[str, Any] = {
    "takeovers": 0,
    "app": "",
    "process": "",
    "label": "",
    "trace": "",
    "steps": {},
    "verdict": {},
}
"""By field, the value that says nothing and is not written; of every other field it is None."""

_MAX_NAME = 255
"""Characters of a name that is kept for people: a publisher may choose any task id, and an item has room for 400 KB."""


ENCRYPTED_TEXT = "encrypted:"
"""How a text of a record begins that a store around the store has encrypted."""


def keepable(text: str) -> str:
    """``text`` as every store can keep it: valid UTF-8 without NUL, and anything else as its escape in Python."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def bounded(name: str) -> str:
    """``name`` as a record keeps it, cut where it is too long for that; different names stay different."""
    is_plain = name.isascii() and "\0" not in name
    if len(name) <= _MAX_NAME and (is_plain or name == keepable(name)):
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{keepable(name)[: _MAX_NAME - 17]}…{digest}"


ITEM = "[]"
"""How the task id of an item of ``map`` or ``starmap`` ends: what stands before it is the id of the whole list."""


def marked(text: str, owner: str) -> str:
    """``text``, a process or a trace, as a claim of ``owner`` writes it."""
    return f"{text}#{owner[:_MARK]}" if text else ""


def process_of(record: Record) -> str:
    """The process that the record's owner, or its publisher, has named; empty where that has not named one."""
    return _by_owner(record.process, record)


def trace_of(record: Record) -> str:
    """The trace context of the attempt that owns or owned the record; empty where that has not told one."""
    return _by_owner(record.trace, record)


def _by_owner(text: str, record: Record) -> str:
    """What ``marked`` was given, if by the record's owner.

    A worker of a version that does not know the field claims without it, and leaves what an earlier owner wrote there.
    """
    value, _, owner = text.partition("#")
    return value if owner == record.owner[:_MARK] else ""


_MARK = 8
"""Characters of an owner's nonce that tell it from the one before it."""


def message_of(record: Record) -> str:
    """The id of the message by which the operation was asked for last; empty where it is not known."""
    name = record.task_id
    return "" if _CUT.search(name) or name.endswith(ITEM) else name


_CUT = re.compile("…[0-9a-f]{16}$")
"""How a name ends that :func:`bounded` has changed."""


_TYPES: Mapping[str, tuple[type, ...]] = {
    **{name: get_args(hint) or (hint,) for name, hint in get_type_hints(Record).items()},
    "status": (str, Status),
    **dict.fromkeys(_JSON, (dict,)),
}
"""By field, the types its plain value may have. A bool is not a number here, whatever Python says."""
