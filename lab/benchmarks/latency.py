"""What a task waits for its store, by how far away that is: in milliseconds, and in round trips."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from statistics import quantiles
from urllib.parse import urlsplit

from celery_idempotent.stores import open_store
from lab.benchmarks.contenders import Tracers
from lab.benchmarks.environment import DynamoDB
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.timing import sample
from lab.embedded import EmbeddedPostgres, EmbeddedRedis
from lab.proxy import Proxy

_AWAY = (0, 1, 5, 20)  # ms, half of them each way
_MOST = {"new key": (2.1, 2.4), "duplicate": (1.1, 1.3)}
"""By call, the round trips that the library wants to wait at most, at p50 and at p99."""

_WARM_UP = 10


class Process:
    """A worker's process, as far as it asks a store that is so many milliseconds away; its first task is done."""

    def __init__(self, url: str, away: int, running: ExitStack) -> None:
        self.line = running.enter_context(Proxy(urlsplit(url).port or 0, delay=away / 2000))
        self._tracers = Tracers(running.enter_context(closing(open_store(self.line.on_the_way_to(url)))))
        self._known = time.time_ns()  # no earlier run on a lasting server can have used that number, or the next ones
        self._numbers = count(self._known)
        self.ms("new key")

    def ms(self, call: str, _: int = 0) -> float:
        number = self._known if call == "duplicate" else next(self._numbers)
        deliver = self._tracers.delivery("plain" if call == "plain" else "idempotent", number)
        begin = time.perf_counter()
        deliver()
        return (time.perf_counter() - begin) * 1000


def measure(dynamodb: DynamoDB, rounds: int) -> Section:
    with ExitStack() as running:
        redis = running.enter_context(EmbeddedRedis(options=("--save", "", "--appendonly", "no")))
        postgres = running.enter_context(EmbeddedPostgres(settings={"fsync": "off"}))
        urls = {"Redis": redis.url, "PostgreSQL": postgres.url, "DynamoDB": dynamodb.store_url("latency")}
        for url in urls.values():
            open_store(url).provision()
        processes = {(name, away): Process(url, away, running) for name, url in urls.items() for away in _AWAY}
        first = {of: each.line.round_trips for of, each in processes.items()}
        takes = {(*of, call): partial(each.ms, call) for of, each in processes.items() for call in ("plain", *_MOST)}
        samples = sample(takes, rounds, warm_up=_WARM_UP)
        later = {of: (each.line.round_trips - first[of]) / (_WARM_UP + rounds) for of, each in processes.items()}
    found = {of: quantiles(times, n=100, method="inclusive")[49::49] for of, times in samples.items()}  # p50, p99

    def added(name: str, away: int, call: str) -> Sequence[float]:
        return [each - found[name, away, "plain"][0] for each in found[name, away, call]]

    def trips(name: str, away: int, call: str) -> Sequence[float]:
        return [(each - added(name, 0, call)[0]) / away for each in added(name, away, call)] if away else []

    def row(name: str, away: int, call: str) -> tuple[str, ...]:
        cells = [f"{each:.2f}" for each in (*added(name, away, call), *trips(name, away, call))]
        return (f"{name}, {away} ms", *cells, *[""] * (4 - len(cells)))

    columns = ("Store, injected", "p50, ms", "p99, ms", "p50, round trips", "p99, round trips")
    counted = [(name, str(first[name, 0]), f"{later[name, 0]:.2f}") for name in urls]
    return Section(
        "11. Latency",
        "Time on the clock of one message through Celery's tracer, as in section 8, beside the median plain task. A "
        "proxy in this process holds back all bytes for half of the injected round trip, each way; no server waits "
        f"for a disk. {rounds} rounds after {_WARM_UP} to warm up, in random order. `round trips`: what is more than "
        "at the median with nothing injected, by what was injected. The first task of a process connects, without "
        "TLS or password; TCP's own round trip is not counted.",
        [
            *(
                Grid(f"{call}: added to the plain task", columns, [row(*of, call) for of in processes])
                for call in _MOST
            ),
            Grid("Round trips that a proxy counted", ("", "first task", "later: new key and duplicate"), counted),
        ],
        [
            Goal.at_most(f"{name}, {away} ms, {call}, {at}", most, measured, " round trips", digits=2)
            for name, away in processes
            for call in _MOST
            for at, most, measured in zip(("p50", "p99"), _MOST[call], trips(name, away, call), strict=False)
        ],
    )
