"""How many requests each path costs, counted on the wire."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

from lab.benchmarks import wire
from lab.benchmarks.contenders import Powertools, dynamodb_store
from lab.benchmarks.environment import Servers
from lab.benchmarks.paths import LEASE, PATHS, Body, Count, Failure, Found, expect_failure, library_paths
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.wire import Tap, trips_during

__all__ = ["measure"]


def measure(servers: Servers) -> Section:
    """Count the requests of every path, for the library and for Powertools."""
    with Tap(urlsplit(servers.dynamodb).port or 0, wire.aws) as tap:
        tapped = replace(servers, dynamodb=f"http://127.0.0.1:{tap.port}")
        count = partial(trips_during, [tap])
        ours, theirs = library_paths(dynamodb_store(tapped), count), _powertools_paths(tapped, count)
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
        "Counted by a proxy in front of the server: what goes over the wire, resends included. Powertools' cache is "
        "off and a Lambda context is registered, without which it has no lease. `failure` is one after which the next "
        "delivery runs again; a `remembered` one is replayed.",
        [Grid("DynamoDB requests", ("Path", "celery-idempotent", "Powertools", "Wanted"), rows)],
        goals,
        {"celery-idempotent": ours, "powertools": theirs},
    )


def _cell(sent: list[str]) -> str:
    return f"{len(sent)} ({', '.join(sent)})" if sent else "not offered"


def _powertools_paths(servers: Servers, count: Count) -> Found:
    body, start = Body(), time.time_ns()
    call = Powertools(servers, servers.session(), body, lease_ms=round(LEASE * 1000))
    found = {
        "new key": count(call.delivery(start)),
        "completed duplicate": count(call.delivery(start)),
        "remembered failure": [],
    }

    def meet_the_first_in_flight() -> None:
        def conflict() -> None:
            with suppress(IdempotencyAlreadyInProgressError):
                call.delivery(start + 1)()
                raise AssertionError("Powertools did not notice the conflict")

        found["conflict"] = count(conflict)

    body.during(meet_the_first_in_flight, call.delivery(start + 1))
    with suppress(SystemExit):  # which Powertools does not catch: its record stays as a killed process leaves it
        body.during(_exit, call.delivery(start + 2))
    time.sleep(LEASE * 1.2)
    found["takeover of a dead lease"] = count(call.delivery(start + 2))
    found["failure"] = count(lambda: expect_failure(body, call.delivery(start + 3), Failure))
    return found


def _exit() -> None:
    raise SystemExit
