"""A primary and its replica, which change places at each fail-over: Valkey under a sentinel, and PostgreSQL."""

from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from lab.embedded.postgres import EmbeddedPostgres
from lab.embedded.redis import DURABLE, GROUP, EmbeddedRedis, EmbeddedSentinel
from lab.embedded.server import HOST, Server
from lab.fleet import Freezer, until

PATIENCE = 120.0
"""Seconds, for each step of a fail-over. A sentinel demotes only a server that has answered for eight in a row."""

_until = partial(until, timeout=PATIENCE)

S = TypeVar("S", bound=Server)


class Pair(Generic[S]):
    """Two servers of which the second has what the first has acknowledged, as far as it gets there.

    ``urls`` are how two clients reach whichever is the primary; they may differ in whom they ask first.
    """

    urls: tuple[str, str]

    def __init__(self, running: ExitStack, primary: S, replica: S) -> None:
        self.primary, self.replica = primary, replica
        self._stopped_primary, self._stopped_replica = Freezer(), Freezer()
        running.callback(self._stopped_primary.thaw)
        running.callback(self._stopped_replica.thaw)

    def cut_off_replica(self) -> None:
        """From now on what the primary writes stays with it alone."""
        self._stopped_replica.freeze(PATIENCE, *self.replica.pids)

    def stop_primary(self) -> None:
        """It answers nobody, and does not know, until :meth:`rejoin`."""
        self._stopped_primary.freeze(PATIENCE, *self.primary.pids)

    def promote(self) -> None:
        """The replica goes on; when this returns, it is the primary."""
        self._stopped_replica.thaw()
        self.primary, self.replica = self.replica, self.primary

    def rejoin(self) -> None:
        """The old primary comes back; when this returns, it is a replica, without what it alone had."""
        self._stopped_primary.thaw()


class RedisPair(Pair[EmbeddedRedis]):
    """Valkey; a sentinel promotes after a second's silence. A write waits for the replica, or not."""

    def __init__(self, running: ExitStack, waits: bool) -> None:
        options = (*DURABLE, "--repl-diskless-sync-delay", "0")
        super().__init__(running, *(running.enter_context(EmbeddedRedis(options=options)) for _ in range(2)))
        _ask(self.replica, "REPLICAOF", HOST, self.primary.port)
        _until(partial(_follows, self.replica), "the replica")
        self._sentinel = running.enter_context(
            EmbeddedSentinel(self.primary, f"sentinel down-after-milliseconds {GROUP} 1000")
        )
        _until(lambda: bool(_ask(self._sentinel, "SENTINEL SLAVES", GROUP)), "the sentinel to see the replica")
        url = f"sentinel://{HOST}:{self._sentinel.port}/0?master_name={GROUP}&wait_replicas={int(waits)}"
        self.urls = url, url

    def cut_off_replica(self) -> None:
        super().cut_off_replica()
        _ask(self.primary, "CLIENT KILL", "TYPE", "replica")

    def promote(self) -> None:
        super().promote()
        _until(lambda: _ask(self._sentinel, "SENTINEL MASTER", GROUP)["port"] == self.primary.port, "the promotion")

    def rejoin(self) -> None:
        super().rejoin()
        if not self.replica.pids:
            self.replica.revive()
        _until(partial(_follows, self.replica), "the old primary to follow the new one")


def _ask(server: EmbeddedRedis, *command: str | int) -> Any:
    import redis

    with redis.Redis(port=server.port, socket_timeout=5, protocol=2, decode_responses=True) as client:
        return client.execute_command(*command)


def _follows(server: EmbeddedRedis) -> bool:
    return bool(_ask(server, "INFO", "replication").get("master_link_status") == "up")


class PostgresPair(Pair[EmbeddedPostgres]):
    """PostgreSQL. A commit waits for the standby, or not.

    Clients take the first server that is writable: by the first URL the first is asked first, by the second the other.
    """

    def __init__(self, running: ExitStack, waits: bool) -> None:
        settings = {"cluster_name": "pair", "synchronous_standby_names": "pair" if waits else ""}
        primary = running.enter_context(EmbeddedPostgres(settings=settings))
        super().__init__(running, primary, running.enter_context(EmbeddedPostgres(settings=settings, copy_of=primary)))
        first, second = (f"host={HOST}:{each.port}" for each in (self.primary, self.replica))
        base = "postgresql+psycopg://postgres@/postgres?target_session_attrs=read-write"
        self.urls = f"{base}&{first}&{second}", f"{base}&{second}&{first}&application_name=second"
        self._wait_for_standby()

    def cut_off_replica(self) -> None:
        super().cut_off_replica()
        _execute(self.primary, "SELECT pg_terminate_backend(pid) FROM pg_stat_replication")

    def promote(self) -> None:
        super().promote()
        _execute(self.primary, "SELECT pg_promote(wait => false)")  # one that waits can conflict with recovery
        _until(lambda: _execute(self.primary, "SELECT WHERE NOT pg_is_in_recovery()") == 1, "the promotion")

    def move_second(self) -> None:
        """Break the connections that were made by the second URL to the old primary."""
        named = "application_name = 'second'"
        _execute(self.replica, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {named}")

    def rejoin(self) -> None:
        self.replica.kill()
        self.replica.copy(self.primary)
        self.replica.revive()
        self._wait_for_standby()

    def _wait_for_standby(self) -> None:
        streaming = "SELECT FROM pg_stat_replication WHERE application_name = 'pair' AND state = 'streaming'"
        _until(lambda: _execute(self.primary, streaming) == 1, "the standby")


def _execute(server: EmbeddedPostgres, statement: str) -> int:
    import psycopg

    place = f"host={HOST} port={server.port} user=postgres dbname=postgres"
    with psycopg.connect(place, autocommit=True) as connection:
        return connection.execute(statement).rowcount
