"""How many requests each path costs, counted where botocore hands them to the network."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import boto3
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

from benchmarks.contenders import GuardedCall, Powertools
from benchmarks.environment import Servers
from benchmarks.payloads import order, result_of
from benchmarks.report import Goal, Grid, Section
from celery_idempotent import Policy
from celery_idempotent.attempt import claim, new_nonce
from celery_idempotent.guard import Conflict
from celery_idempotent.protocol import Request

__all__ = ["measure"]

_LEASE = 0.5
"""Seconds; the shortest that a policy allows, so that the benchmark waits no longer than it must."""

_PATHS = {
    "new key": 2,
    "completed duplicate": 1,
    "conflict": 1,
    "takeover of a dead lease": 3,
    "failure": 2,
}
"""By path, the most requests that the library wants to pay."""


class _Failure(Exception):
    """What a failing body raises."""


@dataclass(slots=True)
class _Wire:
    """Counts the requests of every client made from :attr:`session`, resends included."""

    session: boto3.session.Session
    sent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session.events.register("before-send.dynamodb", self._count)

    def during(self, path: Callable[[], object]) -> list[str]:
        """The operations that ``path`` sends."""
        self.sent.clear()
        path()
        return list(self.sent)

    def _count(self, request: Any, **_: Any) -> None:
        target = request.headers["X-Amz-Target"]
        name = target.decode() if isinstance(target, bytes) else target
        self.sent.append(name.rpartition(".")[2])


@dataclass(slots=True)
class _Body:
    """A body that does on demand what a path needs."""

    act: Callable[[], object] = lambda: None

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        self.act()
        return result_of(order)

    def during(self, act: Callable[[], object], deliver: Callable[[], object]) -> object:
        """``deliver()`` with a body that calls ``act`` first."""
        self.act = act
        try:
            return deliver()
        finally:
            self.act = lambda: None


def measure(servers: Servers) -> Section:
    """Count the requests of every path, for the library and for Powertools."""
    ours, theirs = _library_paths(servers), _powertools_paths(servers)
    rows = [
        (path, _cell(ours[path]), _cell(theirs[path]), f"{'exactly' if most < 3 else 'at most'} {most}")
        for path, most in _PATHS.items()
    ]
    goals = [
        Goal(path, f"at most {most} requests", str(len(ours[path])), len(ours[path]) <= most)
        for path, most in _PATHS.items()
    ]
    return Section(
        "1. Requests per path",
        "Counted by a botocore `before-send` hook on the client of each library: what goes to the network, "
        "resends included. Powertools' cache is off and a Lambda context is registered, without which it has no "
        "lease.",
        [Grid("DynamoDB requests", ("Path", "celery-idempotent", "Powertools", "Wanted"), rows)],
        goals,
        {"celery-idempotent": ours, "powertools": theirs},
    )


def _cell(sent: list[str]) -> str:
    return f"{len(sent)} ({', '.join(sent)})"


def _library_paths(servers: Servers) -> dict[str, list[str]]:
    wire, body, start = _Wire(servers.session()), _Body(), time.time_ns()
    call = GuardedCall(servers, wire.session, Policy(scope="requests", lease=_LEASE, grace=0), body)
    found = {
        "new key": wire.during(call.delivery(start)),
        "completed duplicate": wire.during(call.delivery(start)),
    }

    def meet_the_first_in_flight() -> None:
        found["conflict"] = wire.during(lambda: _expect_conflict(call.delivery(start + 1)()))

    body.during(meet_the_first_in_flight, call.delivery(start + 1))
    claim(call.store, _request(call, start + 2))  # and never a word again, as if the process had been killed
    time.sleep(_LEASE * 1.2)
    found["takeover of a dead lease"] = wire.during(call.delivery(start + 2))
    found["failure"] = wire.during(lambda: _fail(body, call.delivery(start + 3)))
    return found


def _powertools_paths(servers: Servers) -> dict[str, list[str]]:
    wire, body, start = _Wire(servers.session()), _Body(), time.time_ns()
    call = Powertools(servers, wire.session, body, lease_ms=round(_LEASE * 1000))
    found = {
        "new key": wire.during(call.delivery(start)),
        "completed duplicate": wire.during(call.delivery(start)),
    }

    def meet_the_first_in_flight() -> None:
        def conflict() -> None:
            with suppress(IdempotencyAlreadyInProgressError):
                call.delivery(start + 1)()
                raise AssertionError("Powertools did not notice the conflict")

        found["conflict"] = wire.during(conflict)

    body.during(meet_the_first_in_flight, call.delivery(start + 1))
    with suppress(SystemExit):  # which Powertools does not catch: its record stays as a killed process leaves it
        body.during(_exit, call.delivery(start + 2))
    time.sleep(_LEASE * 1.2)
    found["takeover of a dead lease"] = wire.during(call.delivery(start + 2))
    found["failure"] = wire.during(lambda: _fail(body, call.delivery(start + 3)))
    return found


def _expect_conflict(outcome: object) -> None:
    if not isinstance(outcome, Conflict):
        raise AssertionError(f"expected a conflict, got {outcome!r}")


def _fail(body: _Body, deliver: Callable[[], object]) -> None:
    def failing() -> None:
        raise _Failure

    with suppress(_Failure):
        body.during(failing, deliver)
        raise AssertionError("the failure did not come out")


def _exit() -> None:
    raise SystemExit


def _request(call: GuardedCall, number: int) -> Request:
    operation = call.operation(order(number))
    return Request(
        key=operation.identity.key,
        fingerprint=operation.identity.fingerprint,
        owner=new_nonce(),
        revision="",
        lease=call.policy.lease_ms,
        grace=call.policy.grace_ms,
        on_takeover=call.policy.on_takeover,
        task=operation.task,
        task_id=operation.task_id,
        worker=operation.worker,
    )
