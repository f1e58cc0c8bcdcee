"""Records as people read them, in a terminal and on pages: times in UTC, JSON indented, the rest described."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from celery_idempotent.engine.search import FORGOTTEN, status_of
from celery_idempotent.engine.verdicts import fitting
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import Encoded, as_bytes
from celery_idempotent.protocol.contents import ENCRYPTED, pointer_in
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import shown_status
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, Finished, from_plain
from celery_idempotent.protocol.verdicts import Action

_MOST_CHARACTERS = 100_000
"""Of JSON on a page; browsers get slow long before a store is full."""

_DIGITS = 12
"""Of a key's hash: among a million keys, the odds that two begin alike are 1 in 500."""


def status(record: Record, now: int) -> str:
    """The status as people read it: whether an outcome still counts, and what became of a publisher's message."""
    if status_of(record, now) == FORGOTTEN:
        return FORGOTTEN
    return shown_status(record.status, record.owner, record.lease_until, now)


def state(record: Record, *, grace: int, now: int) -> str:
    """As :func:`status`, and whether a person may give the claim back, ``grace`` milliseconds after its lease."""
    if Action.RELEASE in fitting(record, grace=grace, now=now):
        return f"{record.status}, lease over"
    return status(record, now)


def iso(milliseconds: Any, precision: str = "milliseconds", *, between: str = "T", zone: str = "Z") -> str:
    """A time of a record, in ms, by ISO 8601: ``2026-11-21T02:10:33.123Z``; as it is stored if it is no time."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError, OSError):
        return one_line(milliseconds)
    return f"{moment.isoformat(between, precision)}{zone}"


utc = partial(iso, between=" ", zone=" UTC")
"""The same for people: ``2026-11-21 02:10:33.123 UTC``."""

utc_short = partial(iso, precision="seconds", between=" ", zone="")
"""The same to the second and without its zone, for a column that names it."""


def duration(milliseconds: int) -> str:
    """A length of time in the two largest units that say something, such as ``3 h 20 min``; 0 s if it is negative."""
    seconds = max(milliseconds, 0) // 1000
    units = {"d": seconds // 86_400, "h": seconds // 3_600 % 24, "min": seconds // 60 % 60, "s": seconds % 60}
    return " ".join([f"{count} {unit}" for unit, count in units.items() if count][:2]) or "0 s"


def json_text(text: str | bytes) -> str:
    """JSON indented for reading; unchanged if it is not JSON, described by its size if it is too long."""
    if len(text) > _MOST_CHARACTERS:
        return f"too long to show: {len(text)} bytes"
    try:
        laid_out = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        return "\n".join(map(one_line, laid_out.split("\n")))
    except (ValueError, RecursionError):
        return repr(text)


def step_state(plain: Any, time: Callable[[int], str] = utc) -> str:
    match step_of(plain):
        case Begun(at, attempt):
            return f"began at {time(at)} in attempt {attempt}, and did not end"
        case Finished(None, lost):
            return f"finished; its result is lost: {lost}"
        case Finished(Encoded(data, content_type) as encoded) if pointer_in(encoded):
            return f"finished; its result is {outcome(data, content_type)}"
        case Finished():
            return "finished"
        case _:
            return "not readable by this version"


def step_of(plain: Any) -> Begun | Finished | None:
    """The state of a step, as its record has it; None if it cannot be read."""
    try:
        return from_plain(plain)
    except ValueError:
        return None


def names_of_effects(record: Record, policy: Policy) -> list[str]:
    """The names under which the operation may have called a receiver: of its steps, and what its policy declares."""
    # What cannot be encoded somebody has put there by hand: no step was ever called that, nor any receiver with it.
    steps = [each for each in record.steps if each.encode(errors="replace").decode() == each]
    return [*dict.fromkeys([*steps, *(each for each in policy.effects if "*" not in each)])]


def size(result: str | bytes | None) -> int:
    return len(as_bytes(result or b""))


def beginning(key: str) -> str:
    """As much of a key as names it: its task, as two have one hash for one value, and the beginning of its hash."""
    identity = key.rpartition(":")[2]
    return key[: _DIGITS - len(identity)] if len(identity) >= 64 else key


def outcome(result: str | bytes, content_type: str | None) -> str:
    """An encoded outcome: JSON indented, or where it is kept; of anything else, which could run code, only its type."""
    pointer = pointer_in(Encoded(result, content_type or ""))
    if pointer:
        kept = f"{pointer.size} bytes of {pointer.content_type}, SHA-256 {pointer.sha256}"
        return one_line(f"kept as the object {pointer.name}: {kept}")
    if content_type == "application/json":
        return json_text(result)
    if content_type == ENCRYPTED:
        return "not shown: it is encrypted, and this app has no key that opens it"
    return f"not shown: {content_type or 'of unknown type'} is never decoded here"


def verdict(told: Mapping[str, Any], time: Callable[[Any], str] = utc) -> str:
    """What a record's verdict says, in a sentence."""
    reason, error = told.get("reason"), told.get("error")
    return one_line(
        f"{time(told.get('at'))} {told.get('action')} by {told.get('by') or 'nobody named'}, "
        f"on {told.get('status')} after attempt {told.get('attempt')}"
        f"{f', because: {reason}' if reason else ''}{f' (it had said: {error})' if error else ''}"
    )
