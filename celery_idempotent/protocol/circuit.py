"""A circuit breaker's decisions: whether a claim is worth asking a store for that did not answer the last ones.

Pure: the time, in seconds on one clock that never jumps, and a random number are arguments.
"""

from typing import NamedTuple, assert_never

FAILURES = 5
"""Claims in a row without an answer after which no more are sent; those of one key in a row are one."""

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
"""Seconds before a trial, doubled by each that fails. It bounds for how long a store that is back stays unasked."""


class Closed(NamedTuple):
    """Every claim is sent; the last ``failures`` got no answer, the latest of them that of ``key``."""

    failures: int = 0
    key: str = ""


class Open(NamedTuple):
    """No claim is sent, but one trial after each pause."""

    #: When it opened.
    since: float
    #: When the next trial may be made. While one is under way it has the longest pause for its answer.
    trial_at: float
    #: How many have failed.
    trials: int = 0
    #: Claims since then that got no answer, most of them because they were not sent.
    unanswered: int = 0


Circuit = Closed | Open

CLOSED = Closed()
"""As it is while every claim is answered."""


def admitted(circuit: Circuit, now: float) -> tuple[Circuit, bool]:
    """The circuit after a claim has come to it, and whether that is sent."""
    match circuit:
        case Closed():
            return circuit, True
        case Open(trial_at=trial_at) if now >= trial_at:
            # A trial that hangs, or is killed before it can say so, must not be the last one.
            return circuit._replace(trial_at=now + _LONGEST_PAUSE), True
        case Open():
            return circuit._replace(unanswered=circuit.unanswered + 1), False
        case unreachable:
            assert_never(unreachable)


def failed(circuit: Circuit, now: float, key: str, *, is_trial: bool, draw: float) -> Circuit:
    """The circuit after the claim of ``key`` was sent and got no answer. ``draw`` is a random number from 0 to 1."""
    match circuit:
        case Closed(key=last) if key == last:
            return circuit  # somebody may hold that record alone, and would make all others wait, or run unprotected
        case Closed(failures) if failures + 1 < FAILURES:
            return Closed(failures + 1, key)
        case Closed():
            return Open(now, now + _pause(0, draw))
        case Open(trials=trials) if is_trial:
            paused = circuit._replace(trials=trials + 1, trial_at=now + _pause(trials + 1, draw))
            return paused._replace(unanswered=circuit.unanswered + 1)
        case Open():  # it was sent before it opened
            return circuit._replace(unanswered=circuit.unanswered + 1)
        case unreachable:
            assert_never(unreachable)


def interrupted(circuit: Circuit, now: float, *, is_trial: bool) -> Circuit:
    """The circuit after something else ended a claim, such as a time limit: the next one tries in its place."""
    return circuit._replace(trial_at=now) if is_trial and isinstance(circuit, Open) else circuit


def _pause(trials: int, draw: float) -> float:
    # Random, as all processes of a fleet have lost the store at one moment.
    longest: float = min(_FIRST_PAUSE * 2 ** min(trials, 30), _LONGEST_PAUSE)
    return longest * (1 + draw) / 2
