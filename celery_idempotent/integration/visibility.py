"""What a worker must extend so that nobody else gets it, when, and for how long. Pure: the time is an argument.

A message that a worker has and has not acknowledged is invisible to others for the visibility timeout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

SHARE = 3
"""A message is extended when that part of its visibility timeout is over: two more tries fit in before the rest is."""

_LOOKS = 12
"""Looks within a visibility timeout: a message is extended at most that part later than it is due."""

_LONGEST_PAUSE = 1.0
"""Seconds; looking costs no request."""

_SHORTEST = 1.0
"""Seconds that count as a visibility timeout where somebody has set less."""

_FIRST_PAUSE = 1.0

WARNED_BEFORE = 3600.0
"""Seconds before the end of what a broker allows at which people are told."""


@dataclass(frozen=True, slots=True)
class Held:
    """A message that a worker has and has not acknowledged; times are seconds on one clock that never jumps.

    Args:
        tag: What the broker knows this delivery by.
        queue: What its visibility timeout belongs to.
        received: When it came.
        extended: When its visibility timeout began to run again; at first, when it came.
        is_warned: Whether people were told that its broker will extend it no further.
    """

    tag: str
    queue: str
    received: float
    extended: float
    is_warned: bool = False


def effective(visibility: float) -> float:
    """The visibility timeout that is worked with."""
    return max(visibility, _SHORTEST)


def due(held: Iterable[Held], visibility: float, now: float, size: int) -> Sequence[Held]:
    """What to extend now, the oldest first; where that leaves room in a request of ``size``, what is soon due, too.

    A request costs the same with one message in it as with ten.
    """
    every = visibility / SHARE
    oldest_first = sorted(held, key=lambda each: each.extended)
    requests = -(-sum(now - each.extended >= every for each in oldest_first) // size)
    soon = [each for each in oldest_first if now - each.extended >= every / 2]
    return soon[: requests * size]


def extension(held: Held, visibility: float, now: float, longest: float) -> int:
    """Seconds from now for which ``held`` can be made invisible; 0: no more.

    Args:
        held: The message.
        visibility: Its visibility timeout.
        now: The time.
        longest: Seconds after it was received that its broker allows in all.
    """
    return max(0, int(min(visibility, held.received + longest - now)))


def ends_soon(held: Held, now: float, longest: float) -> bool:
    """Whether it is time to tell people that the broker will extend ``held`` no further, and nobody has."""
    return not held.is_warned and now >= held.received + longest - WARNED_BEFORE


def pause(visibilities: Iterable[float]) -> float:
    """Seconds until the next look."""
    return min(_LONGEST_PAUSE, *(each / _LOOKS for each in visibilities), _LONGEST_PAUSE)


def pause_after(failures: int, visibility: float) -> float:
    """Seconds until a broker is asked again that failed as often as that in a row."""
    return float(min(_FIRST_PAUSE * 2 ** min(failures - 1, 30), visibility / SHARE / 2))


class Refusal(Enum):
    """What it means that a broker did not extend one message of several."""

    GONE = "gone"
    """It is nobody's, or somebody else's: acknowledged meanwhile, or its visibility timeout was over."""
    LATER = "later"
    """Ask again."""


_GONE = {"InvalidParameterValue", "MessageNotInflight", "ReceiptHandleIsInvalid"}


def refusal(code: str) -> Refusal:
    """What SQS means by the code of an entry that failed."""
    return Refusal.GONE if _bare(code) in _GONE else Refusal.LATER


def is_expired_receipt(error: BaseException) -> bool:
    """Whether ``error`` is what SQS says of a message that is no longer this worker's."""
    return _bare(code_of(error)) in _GONE


def code_of(error: BaseException) -> str:
    """The code in a refusal of AWS; empty where it is something else, such as a connection that broke."""
    response: Any = getattr(error, "response", None)
    told = response.get("Error") if isinstance(response, Mapping) else None
    return str(told.get("Code", "")) if isinstance(told, Mapping) else ""


def _bare(code: str) -> str:
    # Both protocols of SQS put a namespace before some codes: "AWS.SimpleQueueService.", "com.amazonaws.sqs#".
    return code.replace("#", ".").rpartition(".")[2]
