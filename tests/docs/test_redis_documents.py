"""The how-to and the reference of Redis against the store and a real server: URLs, options, permissions, sizes."""

import re
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import redis

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis import client as redis_client
from celery_idempotent.testing.contract import a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from tests.support.documents import DOCS, code, table
from tests.support.operator import operate, refused
from tests.support.redis_servers import GROUP, HOST, EmbeddedSentinel, a_user, administrator

PAGE = DOCS / "how-to/redis.md"
REFERENCE = DOCS / "reference/redis.md"
RULES = {row["user"]: " ".join(re.findall("`([^`]+)`", row["rules"])) for row in table(PAGE, "user")}
WORKER = RULES["worker"]


def opened(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


@pytest.mark.parametrize("row", table(REFERENCE, "form"), ids=lambda row: row["form"])
def test_documented_urls_can_be_opened(row: dict[str, str], tmp_path: Path) -> None:
    """Every form of a URL is understood as it stands there."""
    file = tmp_path / "ca.pem"
    file.touch()
    opened(row["form"].strip("`").replace("/etc/ssl/ca.pem", str(file)))


def test_options_are_those_that_urls_know() -> None:
    """Every option is documented, for what it is for, and no other."""
    documented: dict[str, set[str]] = {}
    for row in table(REFERENCE, "option"):
        documented.setdefault(row["for"], set()).update(re.findall("`([^`]+)`", row["option"]))
    assert documented == {
        "all": set(redis_client._OPTIONS),
        "all but a cluster": {"db", "virtual_host"},
        "TLS": set(redis_client._OPTIONS_OF_TLS),
        "Sentinel": set(redis_client._OPTIONS_OF_SENTINEL),
    }


def claims_and_completes(url: str) -> Record:
    """Does what a worker does; gives the outcome."""
    store = opened(url)
    store.now()
    claimed = replace(a_record(), error="gone afterwards")
    outcome = replace(claimed, revision="2", status=Status.COMPLETED, error=None, expires_at=4_000_000_000)
    assert store.swap(claimed, None) == claimed
    assert store.swap(a_rival(claimed), None) == claimed
    assert store.swap(outcome, claimed.revision) == outcome
    store.close()
    return outcome


def test_documented_permissions_are_enough(redis_server: EmbeddedRedis) -> None:
    """A worker with these rules and no others claims, completes, and starts."""
    with administrator(redis_server) as client:
        client.script_flush()
    with a_user(redis_server, f"-@all {WORKER}") as url:
        claims_and_completes(url)
        opened(url).verify()
    with a_user(redis_server, f"-@all {WORKER} {RULES['with a database other than 0']}") as url:
        claims_and_completes(f"{url.removesuffix('/0')}/5")


def test_line_for_the_server_is_the_workers_rules(redis_server: EmbeddedRedis) -> None:
    """The line to copy grants what the table says, and the server takes it."""
    (line,) = [text for _, text in code(PAGE, "text") if text.startswith("ACL")]
    with administrator(redis_server) as client:
        client.execute_command(*line.split())
        assert line.split() == ["ACL", "SETUSER", "shop", "on", ">password", *WORKER.split()]
        claims_and_completes(f"redis://shop:password@{HOST}:{redis_server.port}/0")
        client.execute_command("ACL", "DELUSER", "shop")


@pytest.mark.parametrize("rule", WORKER.split())
def test_no_documented_permission_is_needless(redis_server: EmbeddedRedis, rule: str) -> None:
    """Without any one of them a worker does not start, not even on a server that knows the script already."""
    opened(redis_server.url).verify()
    rules = " ".join(each for each in WORKER.split() if each != rule)
    with a_user(redis_server, f"-@all {rules}") as url, pytest.raises(StoreMisconfigured, match="grant"):
        opened(url).verify()


def test_permission_to_wait_is_needed_where_it_is_said(redis_server: EmbeddedRedis) -> None:
    """Waiting for replicas takes one more command."""
    options = "?wait_replicas=1&wait_timeout=0.01"
    with a_user(redis_server, f"-@all {WORKER}") as url, pytest.raises(StoreMisconfigured, match="wait"):
        opened(f"{url}{options}").swap(a_record(), None)
    with a_user(redis_server, f"-@all {WORKER} {RULES['with `wait_replicas`']}") as url:
        store = opened(url + options)
        record = a_record()
        opened(url).swap(record, None)
        assert store.swap(a_rival(record), None) == record


def test_permissions_to_be_warned_are_enough(redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    """With them nothing is left unchecked."""
    more = RULES["to be warned of settings that lose records"]
    with a_user(redis_server, f"-@all {WORKER} {more}") as url:
        opened(url).verify()
    assert caplog.messages == []


OPERATOR = next(each for user, each in RULES.items() if user.startswith("operator"))


def operated(server: EmbeddedRedis, rules: str) -> set[str]:
    """The commands that somebody with ``rules`` is refused."""
    prefix = f"?prefix=celery-idempotent:{uuid4().hex}:"
    ours = opened(f"{server.url.removesuffix('?')}{prefix}")
    with a_user(server, f"-@all {rules}") as url:
        theirs = opened(f"{url}{prefix}")
        found = refused(operate(theirs, ours))
        theirs.close()
    ours.close()
    return found


def test_permissions_of_an_operator_are_enough(redis_server: EmbeddedRedis) -> None:
    """For every command."""
    assert operated(redis_server, f"{WORKER} {OPERATOR}") == set()


@pytest.mark.parametrize(
    ("rule", "command"), [("+scan", {"list", "stats", "purge"}), ("+hmget", {"list", "purge"}), ("+del", {"purge"})]
)
def test_no_permission_of_an_operator_is_needless(redis_server: EmbeddedRedis, rule: str, command: set[str]) -> None:
    """Each is for a command, which names what to grant."""
    assert rule in OPERATOR.split()
    rules = " ".join(each for each in OPERATOR.split() if each != rule)

    assert operated(redis_server, f"{WORKER} {rules}") == command


def test_permissions_in_a_cluster_are_enough(redis_cluster: EmbeddedRedisCluster) -> None:
    """Finding the nodes takes one more command, on each of them."""
    rules = f"-@all {WORKER} {RULES['in a cluster']}"
    first, second, third = redis_cluster.nodes
    with a_user(first, rules) as url, a_user(second, rules), a_user(third, rules):
        cluster_url = url.replace("redis://", "redis+cluster://")
        for _ in range(10):
            claims_and_completes(cluster_url)
        opened(cluster_url).verify()


def test_permission_on_sentinels_is_enough(redis_server: EmbeddedRedis) -> None:
    """The sentinels' own user needs a single command."""
    (rule,) = re.findall(r"user of the sentinels needs `([^`]+)`", PAGE.read_text())
    with EmbeddedSentinel(redis_server) as sentinel:
        with redis.Redis(port=sentinel.port) as client:
            client.execute_command("ACL", "SETUSER", "looker", "on", ">pass", "-@all", rule)
        claims_and_completes(
            f"sentinel://{HOST}:{sentinel.port}?master_name={GROUP}&sentinel_username=looker&sentinel_password=pass"
        )
