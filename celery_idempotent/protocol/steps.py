"""Steps: what a record keeps of the effects within one operation, and what an attempt does about each.

::

                    nothing recorded      begun, not finished                    finished
    rerun           call                  call                                   its result
    refuse          record begun, call    inside the window: call; else unknown  its result

Only ``refuse`` records the beginning, because only ``refuse`` needs to know that an effect may have happened.
Inside the window the receiver still honours the step's key, so calling again is safe, whoever called before.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.effects import (
    AtMostOnce,
    Case,
    Committed,
    Effect,
    Fenced,
    Keyed,
    OnTakeover,
    declared,
    milliseconds,
)

_MAX_NAME = 200
"""Characters of a step's name; it stands in every write of the record."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step's call is given, to hand on to the receiver."""

    #: The step's name.
    name: str
    #: An idempotency key of 64 hexadecimal digits: the same on every attempt of the operation, different for every
    #: other step and operation.
    key: str
    #: Larger than that of every earlier attempt; 0 where the body runs unprotected.
    fencing_token: int


class Begun(NamedTuple):
    """The call was about to be made, and may have been: first ``at``, in milliseconds on the store's clock."""

    at: int
    attempt: int


class Finished(NamedTuple):
    """The call returned; ``result`` is None if it could not be kept."""

    result: Encoded | None
    lost: str | None = None


class Call(Case):
    """Make the call."""


class Begin(Case):
    """Record that the call is about to be made; once that is certain, make it."""


class Recall(NamedTuple):
    """Do not call: the result is known."""

    finished: Finished


class Doubt(NamedTuple):
    """Do not call: nobody can tell whether an earlier call had its effect."""

    reason: str


class Terms(NamedTuple):
    """Under which promise a step is made.

    For ``window`` milliseconds from the first call it may be made again, whatever ``on_takeover`` says.
    """

    on_takeover: OnTakeover
    window: int | None


StepDecision = Call | Begin | Recall | Doubt


def terms_of(name: str, effects: Mapping[str, Effect], *, is_fenced: bool = False) -> Terms:
    """The terms of a step, by what the policy declares; where it declares nothing, a step in doubt is called again.

    ``is_fenced``: the call fences earlier attempts off and looks for their effect.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
        raise PolicyError("name", repr(name), f"a step's name is text of 1 to {_MAX_NAME} characters")
    if not effects:
        return Terms("rerun", None)
    match declared(effects, name):
        case None:
            nearest = get_close_matches(name, effects, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            declared_are = ", ".join(map(repr, effects))
            raise PolicyError(
                "step", repr(name), f"is not declared by Policy(effects=...), which has {declared_are}{hint}"
            )
        case Keyed(window, past_window):
            return Terms(past_window, None if window is None else milliseconds(window))
        case AtMostOnce():
            return Terms("refuse", None)
        # The declaration promises more than a bare step keeps.
        case Committed():
            raise PolicyError("step", repr(name), "is declared Committed(): use attempt.commit() or .transaction()")
        case Fenced() if not is_fenced:
            raise PolicyError("step", repr(name), "is declared Fenced(): use attempt.fenced_step()")
        case _:
            return Terms("rerun", None)


def decide_step(name: str, seen: Begun | Finished | None, *, terms: Terms, now: int) -> StepDecision:
    """What an attempt does about a step, given what the record says of it; the table above."""
    if isinstance(seen, Finished):
        return Recall(seen)
    if terms.on_takeover == "rerun":
        return Call()
    if seen is None:
        return Begin()
    window = terms.window
    if window is not None and now < seen.at + window:
        return Call()
    reason = f"step {name!r} began in attempt {seen.attempt} and did not end"
    return Doubt(reason if window is None else f"{reason}, and its window of {window / 1000:g} s is over")


def to_plain(state: Begun | Finished) -> dict[str, Any]:
    """The state as a record keeps it: plain JSON."""
    if isinstance(state, Begun):
        return {"begun_at": state.at, "attempt": state.attempt}
    if state.result is None:
        return {"lost": state.lost}
    data = state.result.data
    kept = {"text": data} if isinstance(data, str) else {"base64": b64encode(data).decode()}
    return {**kept, "content_type": state.result.content_type}


def from_plain(plain: Mapping[str, Any] | None) -> Begun | Finished | None:
    """The state that :func:`to_plain` wrote, or None where nothing is recorded; ``ValueError`` if it is not one."""
    match plain:
        case None:
            return None
        case {"begun_at": int(at), "attempt": int(attempt)}:
            return Begun(at, attempt)
        case {"text": str(text), "content_type": str(content_type)}:
            return Finished(Encoded(text, content_type))
        case {"base64": str(text), "content_type": str(content_type)}:
            return Finished(Encoded(b64decode(text, validate=True), content_type))
        case {"lost": str(reason)}:
            return Finished(None, reason)
        case _:
            raise ValueError("not a state of a step that this version knows")


def only_finished(steps: Mapping[str, Any]) -> dict[str, Any]:
    """The steps without those that began and did not end: who says that they had no effect may run them again."""
    return {name: plain for name, plain in steps.items() if not isinstance(from_plain(plain), Begun)}
