"""The stores that are attacked, each with a real server where it needs one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.folders import temporary_folder
from lab.servers import Servers


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of store as the table prints it, and the system calls that change or see it."""

    label: str
    calls: Sequence[str]


_TALKING = ("connect", "sendto", "sendmsg", "recvfrom", "recvmsg")
"""``strace`` kills before the call is made: dying at a receive is dying after the send, before the reply is read."""

_WRITING = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink", "fcntl")
"""What SQLite does to its files: dying at a sync is dying after the write; locks are taken and let go by ``fcntl``."""

TARGETS: Mapping[str, Target] = {
    "dynamodb": Target("DynamoDB (MiniStack)", _TALKING),
    "redis": Target("Redis (Valkey)", _TALKING),
    "redis-cluster": Target("Redis Cluster (Valkey)", _TALKING),
    "postgres": Target("PostgreSQL", _TALKING),
    "mariadb": Target("MariaDB", _TALKING),
    "sqlite": Target("SQLite", _WRITING),
    "memory": Target("memory", ()),
}
"""By name, as options and :class:`lab.servers.Servers` know it; in memory there is no server."""

ALL = tuple(each for each in TARGETS if each != "memory")


@contextmanager
def start(name: str) -> Iterator[str]:
    """The address of a new and empty store of that kind; one in memory has none."""
    with temporary_folder() as folder, Servers(name, "", folder) as servers:
        yield servers.store_url


def why_not(name: str) -> str | None:
    """Why there can be no such store on this machine, or None if there can."""
    return Servers(name, "", Path()).missing
