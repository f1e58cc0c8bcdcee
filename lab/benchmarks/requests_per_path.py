"""How many requests each path costs, counted where botocore hands them to the network."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import boto3
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

from lab.benchmarks.contenders import Powertools, dynamodb_store
from lab.benchmarks.environment import Servers
from lab.benchmarks.paths import LEASE, PATHS, Body, Failure, Found, expect_failure, library_paths
from lab.benchmarks.report import Goal, Grid, Section

__all__ = ["measure"]


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


def measure(servers: Servers) -> Section:
    """Count the requests of every path, for the library and for Powertools."""
    wire = _Wire(servers.session())
    ours, theirs = library_paths(dynamodb_store(servers, wire.session), wire.during), _powertools_paths(servers)
    rows = [
        (path, _cell(ours[path]), _cell(theirs[path]), f"{'exactly' if most < 3 else 'at most'} {most}")
        for path, most in PATHS.items()
    ]
    goals = [
        Goal(path, f"at most {most} requests", str(len(ours[path])), len(ours[path]) <= most)
        for path, most in PATHS.items()
    ]
    return Section(
        "1. Requests per path",
        "Counted by a botocore `before-send` hook on the client of each library: what goes to the network, "
        "resends included. Powertools' cache is off and a Lambda context is registered, without which it has no "
        "lease. `failure` is one after which the next delivery runs again; a `remembered` one is replayed.",
        [Grid("DynamoDB requests", ("Path", "celery-idempotent", "Powertools", "Wanted"), rows)],
        goals,
        {"celery-idempotent": ours, "powertools": theirs},
    )


def _cell(sent: list[str]) -> str:
    return f"{len(sent)} ({', '.join(sent)})" if sent else "not offered"


def _powertools_paths(servers: Servers) -> Found:
    wire, body, start = _Wire(servers.session()), Body(), time.time_ns()
    call = Powertools(servers, wire.session, body, lease_ms=round(LEASE * 1000))
    found = {
        "new key": wire.during(call.delivery(start)),
        "completed duplicate": wire.during(call.delivery(start)),
        "remembered failure": [],
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
    time.sleep(LEASE * 1.2)
    found["takeover of a dead lease"] = wire.during(call.delivery(start + 2))
    found["failure"] = wire.during(lambda: expect_failure(body, call.delivery(start + 3), Failure))
    return found


def _exit() -> None:
    raise SystemExit
