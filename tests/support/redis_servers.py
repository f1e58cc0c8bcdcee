"""Redis servers in company: replicas, a paused one; and a look at them as their administrator."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.redis import RedisStore
from lab.embedded import EmbeddedRedis
from lab.embedded.redis import DURABLE
from tests.support.waiting import wait_until

HOST = "127.0.0.1"


@contextmanager
def opened(url: str) -> Iterator[RedisStore]:
    """The store that a URL names, until it is closed."""
    store = RedisStore.from_url(url)
    try:
        yield store
    finally:
        store.close()


def redis_key(record: Record) -> str:
    """Where a record stands by default."""
    return f"celery-idempotent:{record.key}"


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
        with administrator(primary) as client:
            client.config_set("repl-diskless-sync-delay", 0)
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


@contextmanager
def replicas_in_cluster(nodes: Sequence[EmbeddedRedis]) -> Iterator[list[EmbeddedRedis]]:
    """For each of `nodes` a node that joins its cluster, has what it has, and can take its place."""
    options = (*DURABLE, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    with ExitStack() as running:
        replicas = [running.enter_context(EmbeddedRedis(options=options)) for _ in nodes]
        pairs = list(zip(nodes, replicas, strict=True))
        for node, replica in pairs:
            with administrator(node) as client:
                client.config_set("repl-diskless-sync-delay", 0)
            with administrator(replica) as client:
                client.execute_command("CLUSTER MEET", HOST, node.port)
        wait_until(lambda: all(_knows(replica, node) for node, replica in pairs), "a replica never met its primary")
        for node, replica in pairs:
            with administrator(replica) as client:
                client.execute_command("CLUSTER REPLICATE", node_id(node))
        wait_until(lambda: all(map(is_in_sync, replicas)), "a replica never had its primary's data")
        wait_until(lambda: all(replicas_online(node) == 1 for node in nodes), "a primary never heard its replica")
        yield replicas


def _knows(one: EmbeddedRedis, other: EmbeddedRedis) -> bool:
    with administrator(one) as client:
        return node_id(other) in str(client.execute_command("CLUSTER NODES"))


def node_id(node: EmbeddedRedis) -> str:
    """The name of a node in its cluster."""
    with administrator(node) as client:
        return str(client.execute_command("CLUSTER MYID"))
