"""The audit of an operation under attack: each of its rules is noticed when it alone is broken."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from celery_idempotent.protocol.record import Status
from lab.proof.course import Plan, Task, World, _problems
from lab.proof.verdicts import PROMISES, Told

DONE, OTHER, UNKNOWN = Told("finished", "receipt"), Told("finished", "another"), Told("OutcomeUnknown")


@dataclass(frozen=True)
class Seen:
    """What was seen of an operation. As it stands here, a lease ended early, and nothing is wrong."""

    promise: str = "at most once"
    deliveries: int = 2
    moves: tuple[str, ...] = ("lease",)
    effects: tuple[tuple[str, int], ...] = (("receipt", 1),)
    begun: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = (1,)
    told: tuple[Told, ...] = (DONE,)
    clean: tuple[Told, ...] = (DONE,)
    status: Status | None = Status.COMPLETED

    def problems(self) -> list[str]:
        task = Task(
            cast("World", None), Plan(promise=PROMISES[self.promise], deliveries=self.deliveries, moves=self.moves)
        )
        task.effects, task.begun, task.told = list(self.effects), list(self.begun), list(self.told)
        task.claims = {number: (token, "somebody") for number, token in enumerate(self.tokens)}
        return list(_problems(task, list(self.clean), len(self.effects), self.status))


TWICE: dict[str, Any] = {"effects": (("receipt", 1), ("receipt", 2)), "begun": (1, 2), "tokens": (1, 2)}


def test_nothing_is_wrong_where_nothing_is() -> None:
    """Also with what a promise allows: an effect that was repeated with a cause, and an end in doubt."""
    assert Seen().problems() == []
    assert Seen(promise="at least once", **TWICE).problems() == []
    assert Seen(told=(UNKNOWN,), clean=(UNKNOWN,), status=Status.UNKNOWN).problems() == []


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("2 effects", Seen(**TWICE)),
        ("deliveries were told different outcomes", Seen(told=(DONE, OTHER))),
        ("an outcome was reported and there was no effect", Seen(effects=())),
        ("an outcome was reported and the record says UNKNOWN", Seen(status=Status.UNKNOWN)),
        ("clean deliveries were told", Seen(clean=(DONE, OTHER))),
        ("clean deliveries were told", Seen(clean=(Told("InFlight"),))),
        ("the operation has no end", Seen(status=None)),
        ("UNKNOWN where it may run again", Seen(promise="at least once", told=(UNKNOWN,), status=Status.UNKNOWN)),
        ("UNKNOWN without a cause", Seen(moves=(), told=(UNKNOWN,), clean=(UNKNOWN,), status=Status.UNKNOWN)),
        ("the effect was repeated without a cause", Seen(promise="at least once", moves=(), **TWICE)),
        ("two bodies ran under one fencing token", Seen(begun=(1, 1))),
        ("a body ran without a stored claim", Seen(begun=(1, 2))),
        ("fencing tokens did not grow", Seen(tokens=(2, 1))),
        ("a fault that a resend outlives left a trace", Seen(deliveries=1, moves=(), told=(Told("InFlight"),))),
    ],
)
def test_a_broken_rule_is_noticed(rule: str, seen: Seen) -> None:
    """By that rule alone, so that none of them can be lost behind another."""
    (problem,) = seen.problems()
    assert problem.startswith(rule)
