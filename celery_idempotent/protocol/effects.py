"""The kinds of effect a body can have, and what each is promised.

A policy declares them by name, ``Policy(effects={"charge": Keyed(window=timedelta(hours=24))})``. A step of that
name then does what its declaration says, and ``task.guarantee()`` tells it to people. For names that are made in a loop
there are patterns, in which ``*`` stands for any text: ``effects={"text to *": AtMostOnce()}``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Literal, assert_never, get_args

from celery_idempotent.errors import PolicyError

Duration = float | timedelta
"""Seconds, or a timedelta."""


def in_words(duration: Duration) -> str:
    """A duration as people say it: in the largest unit that is whole."""
    seconds = milliseconds(duration) / 1000
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = round(seconds / length)
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} s"


def milliseconds(duration: Duration) -> int:
    return round((duration.total_seconds() if isinstance(duration, timedelta) else duration) * 1000)


def is_duration(value: object) -> bool:
    """Whether ``value`` is a finite duration that is not negative."""
    if isinstance(value, timedelta):
        return value >= timedelta(0)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


OnTakeover = Literal["rerun", "refuse"]
"""What happens to what an attempt that never ended may have begun."""


@dataclass(frozen=True)
class Case:
    """A value without fields, equal to every other of its class."""


class Committed(Case):
    """Rows or items in the store's own database, by ``attempt.commit()`` or ``attempt.transaction()``."""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A receiver that honours idempotency keys, by ``attempt.step()``."""

    #: Seconds, or a timedelta, from the first call, for which it does; None: without limit.
    window: Duration | None = None
    #: What happens to a call past the window that may have been made before.
    on_takeover: OnTakeover = "rerun"

    def __post_init__(self) -> None:
        if self.window is not None and (not is_duration(self.window) or not milliseconds(self.window)):
            raise PolicyError("window", repr(self.window), "must be seconds or a timedelta, more than 0")
        if self.on_takeover not in get_args(OnTakeover):
            raise PolicyError("on_takeover", repr(self.on_takeover), f"must be one of {get_args(OnTakeover)}")


class Fenced(Case):
    """A receiver that checks fencing tokens, by ``attempt.fenced_step()``."""


class AtLeastOnce(Case):
    """A receiver that can do neither, by ``attempt.step()``: called again if the call raised or a worker died."""


class AtMostOnce(Case):
    """The same, never called again: the operation ends UNKNOWN if the call raised or a worker died."""


Effect = Committed | Keyed | Fenced | AtLeastOnce | AtMostOnce

_KINDS = "Committed(), Keyed(), Fenced(), AtLeastOnce() or AtMostOnce()"


def check_effects(effects: Mapping[str, Any]) -> None:
    """Refuse what does not map names to kinds of effect."""
    if not isinstance(effects, Mapping):
        raise PolicyError("effects", repr(effects), f"must map names of steps to {_KINDS}")
    for name, effect in effects.items():
        if not isinstance(name, str) or not name:
            raise PolicyError("effects", f"{{{name!r}: ...}}", "the name of a step must be a text that is not empty")
        if isinstance(effect, type) and issubclass(effect, get_args(Effect)):
            raise PolicyError(f"effects[{name!r}]", effect.__name__, f"is the class; write {effect.__name__}()")
        if not isinstance(effect, Effect):
            raise PolicyError(f"effects[{name!r}]", repr(effect), f"must be {_KINDS}")
    names = list(effects)
    for position, name in enumerate(names):
        hidden_by = next((each for each in names[:position] if _fits(name, each)), None)
        if hidden_by is not None and "*" in name:
            raise PolicyError("effects", repr(name), f"is never reached behind {hidden_by!r}; write it before that")


def _fits(name: str, pattern: str) -> bool:
    # What else fnmatch takes for special is part of a name: "charge [EUR]".
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))


def declared(effects: Mapping[str, Effect], name: str) -> Effect | None:
    """What is declared of the step called ``name``: under its own name, or by the first pattern that fits."""
    exact = effects.get(name)
    if exact is not None:
        return exact
    return next((effect for pattern, effect in effects.items() if _fits(name, pattern)), None)


def promise(effect: Effect) -> str:
    """What happens to the effect however often the task is delivered and whenever its workers die."""
    match effect:
        case Committed():
            return "exactly once: it is committed together with the record of the operation"
        case Keyed(window=None):
            return "exactly once, as long as the receiver honours the step's key"
        case Keyed(window, on_takeover):
            assert window is not None
            return (
                f"exactly once within {in_words(window)} of the first call, while the receiver honours the step's key; "
                f"after that {_PAST_WINDOW[on_takeover]}"
            )
        case Fenced():
            return "exactly once: earlier attempts are fenced off, and their effect is looked for before acting"
        case AtLeastOnce():
            return (
                "at least once: it is repeated if the call raises, or a worker dies between the effect and its record"
            )
        case AtMostOnce():
            return (
                "at most once: if the call raises, or a worker dies between the records of its beginning and its end, "
                "the operation ends UNKNOWN and a person decides"
            )
        case unreachable:
            assert_never(unreachable)


_PAST_WINDOW: Mapping[OnTakeover, str] = {
    "rerun": "at least once",
    "refuse": "at most once, and if in doubt the operation ends UNKNOWN",
}
