"""What a call costs the client in CPU time, against bare boto3 and Powertools."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from celery_idempotent import Policy
from lab.benchmarks.contenders import (
    LIBRARY_CONFIG,
    BareBoto3,
    Contender,
    GuardedCall,
    GuardedTask,
    Powertools,
    dynamodb_store,
    recorded_requests,
)
from lab.benchmarks.environment import Servers
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.stats import Spread, ratios, shuffled, spread

__all__ = ["WARM_UP", "collecting_by_hand", "measure"]

_MOST = 1.03
"""Times bare boto3: what the library wants to cost at most."""

_MOST_TO_POWERTOOLS = {"new key": 0.40, "duplicate": 0.45}
"""By path, the same of `Delivery.run` times Powertools."""

_PATHS = ("new key", "duplicate")
WARM_UP = 50
_COLLECT_EVERY = 20

Samples = dict[str, dict[str, list[float]]]
"""By path and contender, microseconds of each call."""


def measure(servers: Servers, rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` interleaved rounds, calling ``progress`` after each."""
    requests = recorded_requests(servers)
    bare = BareBoto3("bare boto3", servers.session().client("dynamodb", endpoint_url=servers.dynamodb), requests)
    bare_tuned = BareBoto3(
        "bare boto3, our settings",
        servers.session().client("dynamodb", endpoint_url=servers.dynamodb, config=LIBRARY_CONFIG),
        requests,
    )
    guard = GuardedCall(dynamodb_store(servers))
    task = GuardedTask(dynamodb_store(servers))
    by_boto3 = GuardedCall(
        dynamodb_store(servers, transport="boto3"),
        Policy(scope="charge-by-boto3"),
        name="celery-idempotent, Delivery.run, transport=boto3",
    )
    powertools = Powertools(servers, servers.session())
    contenders: Sequence[Contender] = (bare, bare_tuned, guard, task, by_boto3, powertools)
    samples = _sample(contenders, rounds, progress)
    ours = (guard.name, task.name)
    return Section(
        "2. Client CPU per call",
        f"Thread CPU time of one call, the server in another process; {rounds} rounds after {WARM_UP} to warm up. "
        "In a round every contender makes one new key and one duplicate, all in random order; a ratio is that of "
        f"two calls of one round. Garbage is collected every {_COLLECT_EVERY} rounds, never inside a call. `bare "
        "boto3` replays the library's own requests (same items, same expressions, keys ready made) plus one "
        "json.dumps or json.loads, on a client with no settings but region and endpoint, as one writes it; `our "
        "settings` is the same on a client with the library's settings, which spare botocore the validation of "
        "parameters and the composing of a user agent. `Delivery.run` includes key derivation and codec; `task` is "
        "the task's `__call__` as the worker calls it, logging at WARNING, signals without receivers. `Delivery.run` "
        "is what compares to the others; `task` adds the way into Celery, and `transport=boto3` sends the same through "
        "a boto3 client. Powertools: `idempotent_function`, DynamoDB layer, cache off, default client; it writes fewer "
        "attributes than the library, whose two items "
        f"have {len(requests.claim['Item'])} and {len(requests.complete['Item'])}, so its own requests carry less "
        "than those of `bare boto3`.",
        [_grid(path, contenders, samples[path], bare, bare_tuned, powertools) for path in _PATHS],
        [goal for path in _PATHS for goal in _goals(path, samples[path], ours, bare.name, powertools.name)],
        _data(samples, bare.name, bare_tuned.name, powertools.name),
    )


def _sample(contenders: Sequence[Contender], rounds: int, progress: Callable[[], None]) -> Samples:
    samples: Samples = {path: {each.name: [] for each in contenders} for path in _PATHS}
    known = time.time_ns()  # no earlier run on a lasting server can have used this number, or one of the next
    for each in contenders:
        each.delivery(known)()
    calls = [(path, each) for path in _PATHS for each in contenders]
    with collecting_by_hand() as collect:
        for index in range(-WARM_UP, rounds):
            if index % _COLLECT_EVERY == 0:
                collect()
            fresh = known + 1 + WARM_UP + index
            for path, each in shuffled(calls, WARM_UP + index):
                cost = _cpu_of(each, fresh if path == "new key" else known)
                if index >= 0:
                    samples[path][each.name].append(cost)
            progress()
    return samples


def _cpu_of(contender: Contender, number: int) -> float:
    deliver = contender.delivery(number)
    begin = time.thread_time_ns()
    deliver()
    return (time.thread_time_ns() - begin) / 1000


@contextmanager
def collecting_by_hand() -> Iterator[Callable[[], object]]:
    """No garbage is collected inside, except by what this gives."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()


def _grid(
    path: str,
    contenders: Sequence[Contender],
    samples: dict[str, list[float]],
    bare: Contender,
    bare_tuned: Contender,
    powertools: Contender,
) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        cost = spread(samples[name])
        against = [_cell(samples, name, other.name) for other in (bare, bare_tuned, powertools)]
        return (name, f"{cost.median:.0f}", f"{cost.p25:.0f}-{cost.p75:.0f}", *against)

    columns = ("", "CPU us", "p25-p75", "to bare boto3", "to bare, our settings", "to Powertools")
    return Grid(f"{path}: CPU and ratio per pair, median [p25-p75]", columns, [row(each.name) for each in contenders])


def _cell(samples: dict[str, list[float]], name: str, other: str) -> str:
    return "1" if name == other else ratio(ratios(samples[name], samples[other]))


def _goals(
    path: str, samples: dict[str, list[float]], ours: Sequence[str], bare: str, powertools: str
) -> Iterator[Goal]:
    for name in ours:
        to_bare, to_powertools = ratios(samples[name], samples[bare]), ratios(samples[name], samples[powertools])
        most = _MOST_TO_POWERTOOLS[path] if name == ours[0] else 1.0
        yield Goal(
            f"{path}, {name}, to bare boto3", f"at most {_MOST}", f"{to_bare.median:.3f}", to_bare.median <= _MOST
        )
        yield Goal(
            f"{path}, {name}, to Powertools",
            f"at most {most:.2f}",
            f"{to_powertools.median:.3f}",
            to_powertools.median <= most,
        )


def _data(samples: Samples, *references: str) -> dict[str, object]:
    def described(path: str, name: str) -> dict[str, object]:
        own = samples[path][name]
        compared: dict[str, Spread] = {f"to {other}": ratios(own, samples[path][other]) for other in references}
        return {"cpu_us": asdict(spread(own)), **{what: asdict(each) for what, each in compared.items()}}

    return {path: {name: described(path, name) for name in samples[path]} for path in samples}
