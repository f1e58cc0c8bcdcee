"""Every store on a server of its own, and what reaches that server."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from sqlalchemy import event
from sqlalchemy.engine import Engine

from lab.benchmarks import wire
from lab.benchmarks.environment import Servers
from lab.benchmarks.wire import Protocol, Tap, trips_during
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis, EmbeddedRedisCluster, Server

__all__ = ["Place", "Watched", "places"]

Count = Callable[[Callable[[], object]], list[str]]
"""Does something and names the requests that it made."""

_TABLE = "benchmark-stores"
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Watched:
    """An address of a store at which everything is counted."""

    url: str
    count: Count


@dataclass(frozen=True, slots=True)
class Place:
    """Where one store keeps its records.

    Args:
        name: How it is called in the tables.
        url: The address for ``idempotency_store``.
        watch: Gives the place another address, and counts what comes that way.
    """

    name: str
    url: str
    watch: Callable[[], AbstractContextManager[Watched]]


@contextmanager
def places(
    servers: Servers, folder: Path, wanted: Collection[str] | None = None
) -> Iterator[tuple[list[Place], dict[str, str]]]:
    """Every store, as long as the ``with`` block lasts; and, by name, what is missing for those that cannot run.

    Args:
        servers: Where DynamoDB is.
        folder: Where SQLite may keep its file.
        wanted: Their names; None: all.
    """
    known: Mapping[str, tuple[type[Server] | None, Callable[[str], AbstractContextManager[Place]]]] = {
        "memory": (None, _memory),
        "DynamoDB": (None, partial(_dynamodb, servers)),
        "Redis": (EmbeddedRedis, _redis),
        "Redis Cluster": (EmbeddedRedis, _redis_cluster),
        "PostgreSQL": (EmbeddedPostgres, _postgresql),
        "MariaDB": (EmbeddedMariaDB, _mariadb),
        "SQLite": (None, partial(_sqlite, folder)),
    }
    kinds = {name: kind for name, kind in known.items() if wanted is None or name in wanted}
    missing = {name: lack for name, (server, _) in kinds.items() if server is not None and (lack := server.missing())}
    with ExitStack() as stack:
        yield [stack.enter_context(kinds[name][1](name)) for name in kinds if name not in missing], missing


@contextmanager
def _memory(name: str) -> Iterator[Place]:
    yield Place(name, "memory://", partial(_unwatched, "memory://"))


@contextmanager
def _dynamodb(servers: Servers, name: str) -> Iterator[Place]:
    url = servers.store_url(_TABLE)

    yield Place(name, url, partial(_tapped, url, wire.aws))


@contextmanager
def _redis(name: str) -> Iterator[Place]:
    with EmbeddedRedis() as server:
        yield Place(name, server.url, partial(_tapped, server.url, wire.redis))


@contextmanager
def _redis_cluster(name: str) -> Iterator[Place]:
    with EmbeddedRedisCluster() as cluster:
        yield Place(name, f"redis+cluster://{cluster.address}", partial(_tapped_cluster, cluster))


@contextmanager
def _postgresql(name: str) -> Iterator[Place]:
    with EmbeddedPostgres() as server:
        yield Place(name, server.url, partial(_tapped, server.url, wire.postgresql))


@contextmanager
def _mariadb(name: str) -> Iterator[Place]:
    with EmbeddedMariaDB() as server:
        yield Place(name, server.url, partial(_tapped, server.url, wire.mysql))


@contextmanager
def _sqlite(folder: Path, name: str) -> Iterator[Place]:
    url = f"sqlite:///{folder / 'benchmark.sqlite3'}"
    yield Place(name, url, partial(_traced_sqlite, url))


@contextmanager
def _unwatched(url: str) -> Iterator[Watched]:
    def nothing(act: Callable[[], object]) -> list[str]:
        act()
        return []

    yield Watched(url, nothing)


@contextmanager
def _tapped(url: str, protocol: Protocol) -> Iterator[Watched]:
    port = urlsplit(url).port
    assert port is not None
    with Tap(port, protocol) as tap:
        yield Watched(url.replace(f":{port}", f":{tap.port}"), partial(trips_during, [tap]))


@contextmanager
def _tapped_cluster(cluster: EmbeddedRedisCluster) -> Iterator[Watched]:
    """Clients learn from a cluster where its nodes are, so the nodes must name the taps."""
    with ExitStack() as stack:
        taps = [stack.enter_context(Tap(node.port, wire.redis)) for node in cluster.nodes]
        _announce(cluster, [tap.port for tap in taps])
        stack.callback(_announce, cluster, [0] * len(taps))
        yield Watched(f"redis+cluster://127.0.0.1:{taps[0].port}", partial(trips_during, taps))


def _announce(cluster: EmbeddedRedisCluster, ports: Sequence[int]) -> None:
    """Have every node tell clients that the nodes are at ``ports``; 0 for where they really are."""
    clients = [redis.Redis(port=node.port, decode_responses=True) for node in cluster.nodes]
    wanted = {port or node.port for node, port in zip(cluster.nodes, ports, strict=True)}
    for client, port in zip(clients, ports, strict=True):
        client.config_set("cluster-announce-port", port)
    deadline = time.monotonic() + _PATIENCE
    while any(_announced(client) != wanted for client in clients):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the nodes of the cluster did not agree on the ports {wanted}")
        time.sleep(0.05)
    for client in clients:
        client.close()


def _announced(client: redis.Redis) -> set[int]:
    shards: Any = client.execute_command("CLUSTER SLOTS")
    return {int(port) for port in _ports(shards)}


def _ports(slots: Any) -> Iterator[Any]:
    for _, _, *nodes in slots:
        yield from (node[1] for node in nodes)


@contextmanager
def _traced_sqlite(url: str) -> Iterator[Watched]:
    """There is no wire: SQLite itself tells every statement that it executes."""
    statements: list[str] = []

    def trace(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.set_trace_callback(lambda text: statements.append(text.split(maxsplit=1)[0].upper()))

    def count(act: Callable[[], object]) -> list[str]:
        statements.clear()
        act()
        return list(statements)

    event.listen(Engine, "connect", trace)
    try:
        yield Watched(url, count)
    finally:
        event.remove(Engine, "connect", trace)
