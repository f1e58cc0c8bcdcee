"""What the library's own code costs in a worker, without any store's: in calls of a plain task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from celery.app.trace import build_tracer, setup_worker_optimizations

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.stores.memory import MemoryStore
from lab.benchmarks.contenders import make_app
from lab.benchmarks.cpu_per_call import collecting_by_hand
from lab.benchmarks.payloads import order, result_of
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.stats import Spread, added, shuffled, spread

__all__ = ["WARM_UP", "Tracers", "measure"]

_MOST: Mapping[str, float] = {"new key": 2.4, "duplicate": 1.7}
"""By call, how many plain calls the library wants to add at most."""

_PLAIN = "plain task"
WARM_UP = 50
_COLLECT_EVERY = 50
_HOSTNAME = "celery@benchmark"

Samples = Mapping[str, Sequence[float]]
"""By call, microseconds."""


class Tracers:
    """A plain task and an idempotent one, as a worker's process executes them."""

    def __init__(self, store: Any = None) -> None:
        app = make_app(MemoryStore() if store is None else store)
        app.conf.task_ignore_result = True
        self.app = app
        app.task(name="plain", shared=False)(_charge)
        app.task(name="idempotent", base=IdempotentTask, idempotent=Policy(), shared=False)(_charge)
        app.finalize()
        setup_worker_optimizations(app, _HOSTNAME)
        self._tracers = {name: self._tracer(name) for name in ("plain", "idempotent")}

    def delivery(self, name: str, number: int, headers: Mapping[str, Any] | None = None) -> Callable[[], object]:
        """A message of order ``number``, taken off the queue and decoded."""
        task_id = f"0b8d1a5e-7c2f-4a52-9d0c-{number:012d}"
        kwargs = {"order": order(number)}
        request = {
            "id": task_id,
            "root_id": task_id,
            "task": name,
            "lang": "py",
            "args": [],
            "kwargs": kwargs,
            "argsrepr": "()",
            "kwargsrepr": "{}",
            "headers": {},
            "hostname": _HOSTNAME,
            "delivery_info": {},
            "properties": {},
            "ignore_result": True,
            "retries": 0,
            **(headers or {}),
        }
        trace = self._tracers[name]
        return lambda: trace(task_id, [], kwargs, request)

    def _tracer(self, name: str) -> Callable[..., object]:
        app = self.app
        tracer: Callable[..., object] = build_tracer(
            name, app.tasks[name], app=app, loader=app.loader, hostname=_HOSTNAME
        )
        return tracer


def _charge(order: dict[str, Any]) -> dict[str, Any]:
    return result_of(order)


def measure(rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` interleaved rounds, calling ``progress`` after each."""
    samples = _sample(Tracers(), rounds, progress)
    costs = {name: added(samples[name], samples[_PLAIN]) for name in _MOST}
    return Section(
        "8. Own code, in plain calls",
        "Thread CPU time of one message through Celery's own tracer (`celery.app.trace.build_tracer`), as a worker's "
        "process executes it once it is decoded; results are ignored, the records are in this process's memory, "
        "logging is at WARNING, and signals have no receivers. "
        f"{rounds} rounds after {WARM_UP} to warm up. In a round the plain task, a new key and a "
        "duplicate come in random order, each after some work of another kind, because between two tasks "
        "a worker does much else, and code that runs in a loop by itself finds every cache warm. "
        "`added` is (own - plain) / plain of the calls of one round. Garbage is collected every "
        f"{_COLLECT_EVERY} rounds, never inside a call.",
        [_grid(samples, costs)],
        list(_goals(costs)),
        {
            "cpu_us": {name: asdict(spread(each)) for name, each in samples.items()},
            "added, plain calls": {name: asdict(each) for name, each in costs.items()},
        },
    )


def _sample(tracers: Tracers, rounds: int, progress: Callable[[], None]) -> Samples:
    samples: dict[str, list[float]] = {_PLAIN: [], **{name: [] for name in _MOST}}
    known = 0
    tracers.delivery("idempotent", known)()
    with collecting_by_hand() as collect:
        for index in range(-WARM_UP, rounds):
            if index % _COLLECT_EVERY == 0:
                collect()
            fresh = 1 + WARM_UP + index
            calls = {
                _PLAIN: tracers.delivery("plain", fresh),
                "new key": tracers.delivery("idempotent", fresh),
                "duplicate": tracers.delivery("idempotent", known),
            }
            for name in shuffled(list(calls), fresh):
                _something_else()
                cost = _cpu_of(calls[name])
                if index >= 0:
                    samples[name].append(cost)
            progress()
    return samples


def _something_else() -> object:
    words = [str(number) * 3 for number in range(2_000)]
    return {word: len(word) for word in words}


def _cpu_of(deliver: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    deliver()
    return (time.thread_time_ns() - begin) / 1000


def _grid(samples: Samples, costs: Mapping[str, Spread]) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        own = spread(samples[name])
        return (name, f"{own.median:.1f}", f"{own.p25:.1f}-{own.p75:.1f}", ratio(costs[name]) if name in costs else "")

    return Grid(
        "A message through Celery's tracer: median, and of pairs median [p25-p75]",
        ("", "CPU us", "p25-p75", "added, plain calls"),
        list(map(row, samples)),
    )


def _goals(costs: Mapping[str, Spread]) -> Iterator[Goal]:
    for name, most in _MOST.items():
        measured = costs[name].median
        yield Goal(f"{name}, own code", f"at most {most} plain calls", f"{measured:.2f}", measured <= most)
