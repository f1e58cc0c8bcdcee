"""What a call costs in CPU time: on DynamoDB beside bare boto3 and Powertools, and the library's own code alone."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from celery_idempotent.stores.memory import MemoryStore
from lab.benchmarks.contenders import BareBoto3, GuardedCall, Powertools, Tracers, dynamodb_store
from lab.benchmarks.environment import DynamoDB
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.timing import COLLECT_EVERY, Spread, added, cpu_us, ratios, sample, spread

WARM_UP = 50

_MOST_TO_POWERTOOLS = {"new key": 0.38, "duplicate": 0.42}
_MOST_PLAIN_CALLS = {"new key": 2.4, "duplicate": 1.7}
"""What the library wants to cost at most, in calls of Powertools; and its own code, in plain calls."""

_PATHS = tuple(_MOST_PLAIN_CALLS)


def measure(dynamodb: DynamoDB, rounds: int) -> Section:
    bare, powertools = BareBoto3(dynamodb), Powertools(dynamodb)
    ours = GuardedCall(dynamodb_store(dynamodb, dynamodb.session()))
    contenders: Sequence[Any] = (bare, ours, powertools)
    known = time.time_ns()  # no earlier run on a lasting server can have used this number, or one of the next

    def take(contender: Any, path: str) -> Callable[[int], float]:
        return lambda number: cpu_us(contender.delivery(known + (1 + number if path == "new key" else 0)))

    for each in contenders:
        each.delivery(known)()
    takes = {(path, each.name): take(each, path) for path in _PATHS for each in contenders}
    samples = sample(takes, rounds, warm_up=WARM_UP)

    def to(path: str, name: str, other: str) -> Spread:
        return ratios(samples[path, name], samples[path, other])

    def row(path: str, name: str) -> tuple[str, ...]:
        cells = ("1" if name == other else to(path, name, other).shown for other in (bare.name, powertools.name))
        return (name, *_shown(samples[path, name], digits=0), *cells)

    columns = ("", "CPU us", "p25-p75", "to bare boto3", "to Powertools")
    title = "CPU and ratio per pair, median [p25-p75]"
    return Section(
        "2. Client CPU per call",
        f"Thread CPU time of one call, the server in another process; {_how(rounds)}. In a round every contender makes "
        "one new key and one duplicate, all in random order; a ratio is that of two calls of one round. `bare boto3` "
        "replays the library's own requests (same items, same expressions, keys ready made) plus one json.dumps or "
        "json.loads, on a client with no settings but region and endpoint. `Delivery.run` includes key derivation and "
        "codec. Powertools: `idempotent_function`, DynamoDB layer, cache off, default client; its items are smaller.",
        [Grid(f"{path}: {title}", columns, [row(path, each.name) for each in contenders]) for path in _PATHS],
        [
            Goal.at_most(f"{path}, to {powertools.name}", most, to(path, ours.name, powertools.name).median)
            for path, most in _MOST_TO_POWERTOOLS.items()
        ],
    )


def measure_own(_: DynamoDB, rounds: int) -> Section:
    """The same of what a worker's process executes, in calls of a plain task."""
    tracers, plain = Tracers(MemoryStore()), "plain task"
    tracers.delivery("idempotent", 0)()

    def take(task: str, is_new: bool) -> Callable[[int], float]:
        def taken(number: int) -> float:
            deliver = tracers.delivery(task, (1 + number) * is_new)
            _something_else()
            return cpu_us(deliver)

        return taken

    takes = {plain: take("plain", True), "new key": take("idempotent", True), "duplicate": take("idempotent", False)}
    samples = sample(takes, rounds, warm_up=WARM_UP)
    costs = {path: added(samples[path], samples[plain]) for path in _PATHS}
    rows = [(name, *_shown(samples[name], digits=1), costs[name].shown if name in costs else "") for name in samples]
    return Section(
        "8. Own code, in plain calls",
        "Thread CPU time of one message through Celery's own tracer (`celery.app.trace.build_tracer`), as a worker's "
        "process executes it once it is decoded; results are ignored, the records are in this process's memory, "
        f"logging is at WARNING, and signals have no receivers. {_how(rounds)}. In a round the plain task, a new key "
        "and a duplicate come in random order, each after some work of another kind, because between two tasks a "
        "worker does much else, and code that runs in a loop by itself finds every cache warm. `added` is (own - "
        "plain) / plain of the calls of one round.",
        [Grid("A message through Celery's tracer", ("", "CPU us", "p25-p75", "added, plain calls"), rows)],
        [
            Goal.at_most(f"{path}, own code", most, costs[path].median, " plain calls", digits=2)
            for path, most in _MOST_PLAIN_CALLS.items()
        ],
    )


def _how(rounds: int) -> str:
    collected = f"garbage is collected every {COLLECT_EVERY} rounds, never inside a call"
    return f"{rounds} rounds after {WARM_UP} to warm up; {collected}"


def _shown(values: Sequence[float], *, digits: int) -> tuple[str, str]:
    cost = spread(values)
    return f"{cost.median:.{digits}f}", f"{cost.p25:.{digits}f}-{cost.p75:.{digits}f}"


def _something_else() -> object:
    words = [str(number) * 3 for number in range(2_000)]
    return {word: len(word) for word in words}
