"""What a Redis store looks into before a worker uses it."""

from collections.abc import Iterator, Mapping
from typing import Any

import redis

from celery_idempotent.stores.exposure import leaves_machine, weakness_of
from celery_idempotent.stores.redis.url import Client


def losses_of(info: Mapping[str, Any], fsync: Mapping[str, Any], wait_replicas: int) -> Iterator[str]:
    """What a server's ``INFO`` and its ``CONFIG`` of fsync say that it may forget, and what to set instead."""
    if info.get("aof_enabled") == 0:
        yield "appendonly is no: a restart forgets; set appendonly yes and appendfsync always."
    else:
        when = fsync.get("appendfsync", "always")
        if when != "always":
            yield f"appendfsync is {when}: a power failure forgets the last second or more; set appendfsync always."
        if fsync.get("no-appendfsync-on-rewrite", "no") != "no":
            yield "no-appendfsync-on-rewrite is yes: a power failure during a rewrite forgets; set it to no."
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        yield f"maxmemory-policy is {policy}: a full memory evicts records; set maxmemory-policy noeviction."
    if info.get("connected_slaves") and not wait_replicas:
        yield (
            "Replicas are attached and none is waited for: a fail-over forgets what they did not have yet; "
            "add wait_replicas=1 to the URL."
        )


def prove_permissions(client: Client, name: bytes) -> None:
    """Do what does nothing where there is no key: a refusal then names its command, and no check is left half done."""
    with client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("EVAL", "return 1", 1, name)  # as long as the script is known, only EVALSHA is used
        pipeline.hgetall(name)
        pipeline.hdel(name, b"")
        pipeline.persist(name)
        pipeline.pexpireat(name, 1)
        raised(pipeline.execute(raise_on_error=False))


def exposure_of(server: redis.Redis, client: Client) -> str:
    """What is weak about a connection to ``server`` on another machine; empty if nothing is."""
    # Not server.client(), which makes another of the user's own class.
    with redis.Redis(connection_pool=server.connection_pool, single_connection_client=True) as single:
        link: Any = getattr(single.connection, "_sock", None)
        return weakness_of(link) if link is not None and leaves_machine(link.fileno()) else ""


def raised(replies: list[Any]) -> list[Any]:
    """The replies of a pipeline; raises the first of them that is an error."""
    for each in replies:
        if isinstance(each, Exception):
            raise each
    return replies
