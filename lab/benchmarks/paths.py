"""The paths that a delivery can take, driven by hand and counted by whoever can count."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery_idempotent import Policy
from celery_idempotent.engine.claim import claim
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.protocol.store import Store
from lab.benchmarks.contenders import GuardedCall
from lab.benchmarks.payloads import order, result_of

__all__ = ["LEASE", "PATHS", "Body", "Count", "Failure", "Found", "expect_failure", "library_paths"]

LEASE = 0.5
"""Seconds; the shortest that a policy allows, so that the benchmark waits no longer than it must."""

PATHS: Mapping[str, int] = {
    "new key": 2,
    "completed duplicate": 1,
    "conflict": 1,
    "takeover of a dead lease": 3,
    "failure": 2,
    "remembered failure": 2,
}
"""By path, the most requests that the library wants to pay."""

_WARM_UP = 12
"""New keys before the first count: drivers connect, load scripts and, after a few runs, prepare statements."""

Count = Callable[[Callable[[], object]], list[str]]
"""Does something and names the requests that it made."""

Found = dict[str, list[str]]
"""By path, the requests."""


class Failure(Exception):
    """What a failing body raises; the next delivery runs again."""


class _FinalFailure(Exception):
    """A failure that the policy remembers."""


@dataclass(slots=True)
class Body:
    """A body that does on demand what a path needs."""

    act: Callable[[], object] = lambda: None

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        """Act, then charge the order."""
        self.act()
        return result_of(order)

    def during(self, act: Callable[[], object], deliver: Callable[[], object]) -> object:
        """``deliver()`` with a body that calls ``act`` first."""
        self.act = act
        try:
            return deliver()
        finally:
            self.act = lambda: None


def library_paths(store: Store, count: Count) -> Found:
    """Take every path once on ``store``, which is provisioned."""
    body, start = Body(), time.time_ns()
    policy = Policy(scope="requests", lease=LEASE, remember=(_FinalFailure,))
    call = GuardedCall(store, policy, body)
    for number in range(_WARM_UP):
        call.delivery(start - 1 - number)()
        call.delivery(start - 1 - number)()
    found = {
        "new key": count(call.delivery(start)),
        "completed duplicate": count(call.delivery(start)),
    }

    def meet_the_first_in_flight() -> None:
        found["conflict"] = count(lambda: _expect_conflict(call.delivery(start + 1)()))

    body.during(meet_the_first_in_flight, call.delivery(start + 1))
    claim(call.store, call.operation(order(start + 2)))  # and never a word again, as if the process had been killed
    time.sleep(LEASE * 1.2)
    found["takeover of a dead lease"] = count(call.delivery(start + 2))
    found["failure"] = count(lambda: expect_failure(body, call.delivery(start + 3), Failure))
    found["remembered failure"] = count(lambda: expect_failure(body, call.delivery(start + 4), _FinalFailure))
    return found


def expect_failure(body: Body, deliver: Callable[[], object], kind: type[Exception]) -> None:
    """Deliver while the body raises ``kind``.

    Raises:
        AssertionError: It did not come out.
    """

    def failing() -> None:
        raise kind

    with suppress(kind):
        body.during(failing, deliver)
        raise AssertionError("the failure did not come out")


def _expect_conflict(outcome: object) -> None:
    if not isinstance(outcome, Conflict):
        raise AssertionError(f"expected a conflict, got {outcome!r}")
