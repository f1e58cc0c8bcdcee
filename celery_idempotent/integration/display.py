"""Records as people read them: times in UTC, JSON indented, everything else described and never decoded."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from celery_idempotent.printable import one_line
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, from_plain

_MOST_CHARACTERS = 100_000
"""Of JSON on a page; browsers get slow long before a store is full."""

_DIGITS = 12
"""Of a key in a list."""


def utc(milliseconds: int) -> str:
    """A time of a record, in ms: ``2026-11-21 02:10:33.123 UTC``; as it is stored if it is not a time."""
    moment = _moment(milliseconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{milliseconds % 1000:03} UTC" if moment else one_line(milliseconds)


def utc_short(milliseconds: int) -> str:
    """The same to the second and without its zone, for a column that names it."""
    moment = _moment(milliseconds)
    return f"{moment:%Y-%m-%d %H:%M:%S}" if moment else one_line(milliseconds)


def _moment(milliseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def duration(milliseconds: int) -> str:
    """A length of time in the two largest units that say something, such as ``3 h 20 min``."""
    seconds = milliseconds // 1000
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


def step_states(steps: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What has become of each step, by its name."""
    return [(name, _state(plain)) for name, plain in steps.items()]


def _state(plain: Any) -> str:
    try:
        state = from_plain(plain)
    except ValueError:
        return "not readable by this version"
    if isinstance(state, Begun):
        return f"began at {utc(state.at)} in attempt {state.attempt}, and did not end"
    return "ended"


def names_of_effects(record: Record, policy: Policy) -> list[str]:
    """The names under which the operation may have called a receiver: of its steps, and what its policy declares."""
    # What cannot be encoded somebody has put there by hand: no step was ever called that, nor any receiver with it.
    steps = [each for each in record.steps if each.encode(errors="replace").decode() == each]
    return [*dict.fromkeys([*steps, *(each for each in policy.effects if "*" not in each)])]


def size(result: str | bytes | None) -> int:
    """Bytes of an encoded outcome."""
    return len(result.encode() if isinstance(result, str) else result or b"")


def short_key(key: str) -> str:
    """Enough of a key's hash to tell records apart; its scope is nearly always the name of its task."""
    identity = key.rpartition(":")[2]
    return identity if len(identity) <= _DIGITS else f"{identity[:_DIGITS]}…"


def outcome(result: str | bytes, content_type: str | None) -> str:
    """An encoded outcome: JSON indented; of anything else only its type, as decoding it could run code."""
    if content_type == "application/json":
        return json_text(result)
    return f"not shown: {content_type or 'of unknown type'} is never decoded here"


def verdicts(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each verdict says, in a sentence."""
    return [one_line(_verdict(each)) for each in told]


def _verdict(told: Mapping[str, Any]) -> str:
    about = f"{told.get('status', '?')}: {told['error']}" if told.get("error") else told.get("status", "?")
    reason = f", because: {told['reason']}" if told.get("reason") else ""
    return f"{utc(told.get('at', 0))}: {told.get('action', '?')} by {told.get('by') or '?'}{reason} (it was {about})"
