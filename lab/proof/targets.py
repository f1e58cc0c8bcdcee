"""The stores that are attacked, each with a real server where it needs one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis, Server
from lab.folders import temporary_folder
from lab.servers import Servers

__all__ = ["ALL", "TARGETS", "Site", "Target", "start", "why_not"]


@dataclass(frozen=True, slots=True)
class Site:
    """A store that can be reached.

    Args:
        url: Its address for :func:`celery_idempotent.open_store`.
        server: What can be killed and comes back with all that it has acknowledged; None where there is no such.
    """

    url: str
    server: Server | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of store.

    Args:
        label: As the table prints it.
        needs: The server that must be installed, if any.
        calls: The system calls by which a process changes what others see of the store, or learns from it.
    """

    label: str
    needs: type[Server] | None = None
    calls: Sequence[str]


_TALKING = ("connect", "sendto", "sendmsg", "recvfrom", "recvmsg")
"""``strace`` kills before the call is made: dying at a receive is dying after the send, before the reply is read."""

_WRITING = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "fcntl")
"""What SQLite does to its files: dying at a sync is dying after the write; locks are taken and let go by ``fcntl``."""

TARGETS: Mapping[str, Target] = {
    "dynamodb": Target(label="DynamoDB (MiniStack)", calls=_TALKING),
    "redis": Target(label="Redis (Valkey)", needs=EmbeddedRedis, calls=_TALKING),
    "redis-cluster": Target(label="Redis Cluster (Valkey)", needs=EmbeddedRedis, calls=_TALKING),
    "postgres": Target(label="PostgreSQL", needs=EmbeddedPostgres, calls=_TALKING),
    "mariadb": Target(label="MariaDB", needs=EmbeddedMariaDB, calls=_TALKING),
    "sqlite": Target(label="SQLite", calls=_WRITING),
}
"""By name, as options and :class:`lab.servers.Servers` know it."""

ALL = tuple(TARGETS)


@contextmanager
def start(name: str) -> Iterator[Site]:
    """A new and empty store of that kind."""
    with (
        temporary_folder() as folder,
        Servers(name, "", folder) as servers,
    ):
        yield Site(servers.store_url, servers.durable_store)


def why_not(name: str) -> str | None:
    """Why there can be no such store on this machine, or None if there can."""
    needs = TARGETS[name].needs if name in TARGETS else None
    return needs.missing() if needs else None
