"""The rules of how-to/redis.md are enough for whom they are, and none is needless, on a real server."""

from contextlib import AbstractContextManager
from dataclasses import replace
from re import findall
from uuid import uuid4

import pytest

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores import open_store
from celery_idempotent.testing.contract import a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from tests.support.documents import DOCS, table
from tests.support.operator import operate, refused
from tests.support.redis_servers import a_user, administrator

PAGE = DOCS / "how-to/redis.md"
RULES = {row["user"]: " ".join(findall("`([^`]+)`", row["rules"])) for row in table(PAGE, "user")}
WORKER, REPLICAS, DATABASE, CLUSTER, WARNINGS, OPERATOR, _ = RULES.values()


def works(url: str) -> None:
    """Start, claim and complete."""
    store = open_store(url)
    store.verify()  # type: ignore[attr-defined]  # Redis has it
    claimed = replace(a_record(), error="gone afterwards")
    outcome = replace(claimed, revision="2", status=Status.COMPLETED, error=None, expires_at=4_000_000_000)
    assert store.swap(claimed, None) == claimed
    assert store.swap(a_rival(claimed), None) == claimed
    assert store.swap(outcome, claimed.revision) == outcome
    store.close()


def user(server: EmbeddedRedis, rules: str, without: str = "") -> AbstractContextManager[str]:
    return a_user(server, " ".join(["-@all", *(each for each in rules.split() if each != without)]))


def test_permissions_are_enough(redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    """For a worker on a server that knows no script, in another database, and to be warned."""
    with administrator(redis_server) as client:
        client.script_flush()
    with user(redis_server, WORKER) as url:
        works(url)
    with user(redis_server, f"{WORKER} {DATABASE}") as url:
        works(f"{url.removesuffix('/0')}/5")
    caplog.clear()
    with user(redis_server, f"{WORKER} {WARNINGS}") as url:
        works(url)
    assert caplog.messages == []


def test_no_permission_of_a_worker_is_needless(redis_server: EmbeddedRedis) -> None:
    """Without any one of them it does not start, not even on a server that knows the script already."""
    works(redis_server.url)
    for rule in WORKER.split():
        with user(redis_server, WORKER, rule) as url, pytest.raises(StoreMisconfigured, match="grant"):
            works(url)


def test_permission_to_wait_is_needed_where_it_is_said(redis_server: EmbeddedRedis) -> None:
    """Waiting for replicas takes one more command."""
    options, record = "?wait_replicas=1&wait_timeout=0.01", a_record()
    with user(redis_server, WORKER) as url, pytest.raises(StoreMisconfigured, match="wait"):
        open_store(f"{url}{options}").swap(record, None)
    with user(redis_server, f"{WORKER} {REPLICAS}") as url:
        open_store(url).swap(record, None)
        assert open_store(f"{url}{options}").swap(a_rival(record), None) == record


@pytest.mark.parametrize(
    ("rule", "commands"),
    [
        ("", set()),
        ("+scan", {"effects", "list", "stats", "purge"}),
        ("+hget", {"effects", "list", "purge"}),
        ("+del", {"purge"}),
    ],
)
def test_permissions_of_operators_are_for_commands(redis_server: EmbeddedRedis, rule: str, commands: set[str]) -> None:
    """All are enough for every one; a command that lacks its own names what to grant."""
    assert rule in f" {OPERATOR}"
    prefix = f"?prefix=celery-idempotent:{uuid4().hex}:"
    ours = open_store(f"{redis_server.url.removesuffix('?')}{prefix}")
    with user(redis_server, f"{WORKER} {OPERATOR}", rule) as url:
        theirs = open_store(f"{url}{prefix}")
        assert refused(operate(theirs, ours)) == commands
        theirs.close()
    ours.close()


@pytest.mark.nightly
def test_permissions_in_a_cluster_are_enough(redis_cluster: EmbeddedRedisCluster) -> None:
    """Finding the nodes takes one more command, on each of them."""
    first, second, third = redis_cluster.nodes
    rules = f"{WORKER} {CLUSTER}"
    with user(first, rules) as url, user(second, rules), user(third, rules):
        for _ in range(10):
            works(url.replace("redis://", "redis+cluster://"))
