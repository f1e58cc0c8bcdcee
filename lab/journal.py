"""What a call makes a server write to its log, and compute: `python -m lab.journal`.

Bytes of the write-ahead log (PostgreSQL), of the redo log (MariaDB) or of the append-only file (Redis), counted by the
server itself; on SQLite all that its process writes, log and file. And CPU time of all of the server's processes. By a
new key, which is a claim and an end, and by a duplicate. Nobody else calls, and no checkpoint comes in so short a run:
after each, the first change of a page costs a copy of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
from redis import Redis
from sqlalchemy import create_engine, text

from celery_idempotent import open_store
from lab.benchmarks.contenders import GuardedCall
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis, Server
from lab.folders import temporary_folder

__all__ = ["SERVERS", "Cost", "measure", "measure_sqlite"]

CALLS = 1000
_WARM_UP = 50
"""Connections, scripts and prepared statements, and the first pages of a table."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call, on average; ``server_us`` is CPU time, None where the engine is in the caller's process."""

    store: str
    call: str
    bytes: float
    server_us: float | None


def _of_sql(question: str, url: str) -> int:
    engine = create_engine(url)
    with engine.connect() as connection:
        answer = connection.execute(text(question)).first()
    engine.dispose()
    assert answer is not None
    return int(answer[-1])


def _of_redis(url: str) -> int:
    with Redis.from_url(url) as client:
        told: Any = client.info("persistence")
        return int(told["aof_current_size"])


Counter = Callable[[str], int]
"""Bytes that the server at a URL has written to its log."""

SERVERS: Mapping[str, tuple[type[Server], Counter]] = {
    "Redis": (EmbeddedRedis, _of_redis),
    "PostgreSQL": (EmbeddedPostgres, partial(_of_sql, "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")),
    "MariaDB": (EmbeddedMariaDB, partial(_of_sql, "SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")),
}
"""By name, the server and how it counts."""


def measure(name: str, calls: int = CALLS) -> Iterator[Cost]:
    """Both calls on a server of their own."""
    kind, written = SERVERS[name]
    with kind() as server:
        url: str = server.url  # type: ignore[attr-defined]  # each of these has one
        yield from _costs(name, url, calls, lambda: written(url), lambda: _cpu(server))


def measure_sqlite(calls: int = CALLS) -> Iterator[Cost]:
    """Both calls on a file."""
    process = psutil.Process()
    with temporary_folder() as folder:
        url = f"sqlite:///{folder / 'records.sqlite3'}"
        yield from _costs("SQLite", url, calls, lambda: process.io_counters().write_chars, None)


def _cpu(server: Server) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in server.pids]
    return sum(each.user + each.system for each in times)


def _costs(
    name: str, url: str, calls: int, written: Callable[[], int], cpu: Callable[[], float] | None
) -> Iterator[Cost]:
    with closing(open_store(url)) as store:
        store.provision()
        call = GuardedCall(store)
        for number in range(_WARM_UP):
            call.delivery(-1 - number)()
        for kind in ("new key", "duplicate"):
            bytes_before, cpu_before = written(), cpu() if cpu else 0.0
            for number in range(calls):
                call.delivery(number)()
            took = (cpu() - cpu_before) / calls * 1e6 if cpu else None
            yield Cost(name, kind, (written() - bytes_before) / calls, took)


def main() -> None:
    """Print a row for each call."""
    for cost in (*(each for name in SERVERS for each in measure(name)), *measure_sqlite()):
        cpu = "" if cost.server_us is None else f"{cost.server_us:,.0f}"
        sys.stdout.write(f"| {cost.store} | {cost.call} | {cost.bytes:,.0f} | {cpu} |\n")


if __name__ == "__main__":
    main()
