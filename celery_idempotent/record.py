"""The record: everything a store keeps about one idempotency key.

Times are integers, milliseconds since the epoch in UTC on the *store's* clock. ``expires_at`` is the one
exception: whole seconds, because DynamoDB's TTL attribute must be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from hashlib import sha256
from typing import Any, Self

from celery_idempotent.errors import StoreMisconfigured

__all__ = ["SCHEMA", "Record", "Status", "bounded"]

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
    """Given back without an outcome; the next delivery runs at once."""
    UNKNOWN = "UNKNOWN"
    """It cannot be known whether the effect happened; only a person's verdict leaves this state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One idempotency key and all that is known about it; never changed, only replaced."""

    key: str
    status: Status
    #: Fresh random nonce on every write; the only thing ``swap`` compares.
    revision: str
    #: Nonce of the attempt that holds or held the key. Never the task id: a redelivery shares that.
    owner: str
    #: Grows with every claim, also across releases and purges.
    fencing_token: int
    #: Until when others must wait.
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
    #: Finished and started steps of the operation.
    steps: Mapping[str, Any] = field(default_factory=dict)
    #: The encoded outcome, and how it is encoded. None on COMPLETED: the result was lost.
    result: str | bytes | None = None
    content_type: str | None = None
    #: For people: why FAILED, UNKNOWN, or COMPLETED without a result.
    error: str | None = None
    #: Seconds since the epoch; only on COMPLETED and FAILED.
    expires_at: int | None = None
    schema: int = SCHEMA

    def to_fields(self) -> dict[str, Any]:
        """All fields that hold something, as plain values; what a store writes."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) != _NOTHING.get(name)}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any], *, store: str) -> Self:
        """The record that ``to_fields`` described.

        Args:
            values: Field names and plain values; unknown names are ignored.
            store: Name of the store, for the error.

        Raises:
            StoreMisconfigured: The record was written by a newer version of this library, or is not one
                of its records. It is left as it is.
        """
        schema = values.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA:
            raise StoreMisconfigured(
                store,
                "read",
                f"the record {values.get('key')!r} has schema {schema!r} and this version of celery-idempotent "
                f"knows up to {SCHEMA}; upgrade this worker, or point idempotency_store at a table of its own",
            )
        known = {name: values[name] for name in _FIELDS if name in values}
        try:
            return cls(**{**known, "status": Status(known["status"]), "fingerprint": known.get("fingerprint")})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreMisconfigured(
                store, "read", f"the record {values.get('key')!r} is damaged: {error!r}; look at it and delete it"
            ) from error


_FIELDS = tuple(each.name for each in fields(Record))

_NOTHING: Mapping[str, Any] = {"takeovers": 0, "app": "", "steps": {}}
"""By field, the value that says nothing and is not written; of every other field it is None."""

_MAX_NAME = 255
"""Characters of a name that is kept for people: a publisher may choose any task id, and an item has room for 400 KB."""


def bounded(name: str) -> str:
    """``name``, cut where it is too long to be kept; different names stay different."""
    if len(name) <= _MAX_NAME:
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{name[: _MAX_NAME - 17]}…{digest}"
