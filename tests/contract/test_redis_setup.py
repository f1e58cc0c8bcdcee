"""What a server of Redis answers, as the error that it is; and what a worker learns of it before it takes a message."""

import logging
import re
import ssl
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis
from redis.exceptions import MaxConnectionsError, ResponseError

from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.failures import NO_RULE
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.client import trouble_of
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from tests.support.redis_servers import HOST, a_user, administrator, opened, replica_of, settings
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A server set up as it should be, whose settings tests change for a while."""
    with EmbeddedRedis() as server:
        yield server


def verify(url: str) -> None:
    with opened(url) as store:
        store.verify()


def warnings_of(url: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verify(url)
    assert all(each.category is IdempotencyWarning for each in caught)
    return [str(each.message) for each in caught]


Setting: Any = Callable[[EmbeddedRedis], AbstractContextManager[str]]


def may(rules: str) -> Setting:
    return lambda server: a_user(server, rules)


def with_(url: str = "redis://{host}:{port}", **values: str | int) -> Setting:
    """The URL where the server has these settings."""

    @contextmanager
    def given(server: EmbeddedRedis) -> Iterator[str]:
        with settings(server, **values):
            yield url.format(host=HOST, port=server.port)

    return given


@contextmanager
def cut_off(server: EmbeddedRedis) -> Iterator[str]:
    """The URL of a server that is lost in the middle of the check: no refusal to tell its settings."""
    with TcpProxy(server.port) as proxy:
        proxy.cut_request(b"CONFIG", times=10)
        yield f"redis://{HOST}:{proxy.port}"


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        (may("~* +@all -hset"), StoreMisconfigured, r"grant it .*\+hset.*'hset'"),
        (may("~* +@all -eval"), StoreMisconfigured, r"\+eval .*'eval'"),  # only a restarted server would ask for it
        (may("~other:* +@all"), StoreMisconfigured, "prefix"),
        (with_("redis://nobody:wrong@{host}:{port}"), StoreMisconfigured, "password"),
        (with_(requirepass="wrong"), StoreMisconfigured, "password"),
        (with_("redis://{host}:{port}/99"), StoreMisconfigured, "no database with this number"),
        (with_(maxmemory=1), StoreUnavailable, "maxmemory"),  # it gets free when outcomes expire
        (with_("redis://{host}:{port}?wait_replicas=1&wait_timeout=0.05"), StoreUnavailable, r"0 of 1 .* 0\.05 s"),
        (cut_off, StoreUnavailable, "Connection"),
    ],
)
def test_check_tells_what_a_person_must_change_from_what_may_pass(
    server: EmbeddedRedis, setting: Setting, error: type[Exception], words: str
) -> None:
    """Each command that a claim or an outcome needs is tried; no password is repeated, and nothing stays."""
    with setting(server) as url, pytest.raises(StoreUnavailable, match=words) as raised:
        verify(url)
    assert type(raised.value) is error
    assert "wrong" not in f"{raised.value} {raised.value.__cause__}"
    with administrator(server) as client:
        assert error is StoreUnavailable or client.dbsize() == 0
        client.flushdb()


@pytest.mark.parametrize(
    ("error", "word"),
    [  # Texts of Redis 6.2 and 7.0, which the server of these tests words otherwise.
        (ResponseError("Error running script (call to f_e96): @user_script: 44: -OOM command"), "maxmemory"),
        (ResponseError("Error running script: @user_script: 44: -READONLY You can't write against"), "replica"),
        (ResponseError("@user_script: 44: The user executing the script can't run this command"), "grant"),
        (ResponseError("unknown command `EVALSHA`, with args beginning with: `e96`"), "Redis 6.2 or later"),
        (ssl.SSLCertVerificationError("certificate verify failed"), "ssl_ca_certs"),
        *((MaxConnectionsError("Too many connections"), "raise it"), (redis.BusyLoadingError("it is loading"), None)),
    ],
)
def test_errors_of_older_servers_are_understood(error: Exception, word: str | None) -> None:
    """What an error asks for does not depend on how a version of the server words it."""
    trouble = trouble_of(error)
    assert trouble is NO_RULE if word is None else word in trouble.remedy


def test_replica_is_a_wrong_address_at_the_start_and_an_outage_later() -> None:
    """A fail-over ends by itself."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica, opened(replica.url) as store:
        with pytest.raises(StoreMisconfigured, match="name its primary"):
            store.verify()
        with pytest.raises(StoreUnavailable, match="name its primary") as raised:
            store.swap(a_record(), None)
        assert type(raised.value) is StoreUnavailable


def test_cluster_and_server_are_not_mixed_up(server: EmbeddedRedis, redis_cluster: EmbeddedRedisCluster) -> None:
    """The scheme decides, and the error says which is right."""
    with (
        opened(f"redis://{redis_cluster.address}") as store,
        pytest.raises(StoreMisconfigured, match=r"write redis\+cluster://"),
    ):
        [store.swap(a_record(), None) for _ in range(50)]  # a third of the keys are the node's own
    with pytest.raises(StoreMisconfigured, match="write redis://"):
        verify(f"redis+cluster://{HOST}:{server.port}")


def test_full_memory_refuses_claims_and_takes_outcomes(server: EmbeddedRedis) -> None:
    """No operation begins that could not be recorded; one that has begun can be, and its lost reply be confirmed."""
    claimed = a_record()
    outcome = replace(a_completion(claimed), result="x" * 1000)
    with opened(server.url) as store:
        store.swap(claimed, None)
        with settings(server, maxmemory=1):
            with pytest.raises(StoreUnavailable, match="maxmemory"):
                store.swap(a_record(), None)
            for _ in range(2):
                assert store.swap(outcome, claimed.revision) == outcome
            assert store.swap(a_rival(claimed), None) == outcome == store.get(claimed.key)
        store.delete(outcome.key, outcome.revision)


@pytest.mark.parametrize("missing", ["hset", "persist", "pexpireat"])
def test_missing_permission_leaves_the_record_whole(server: EmbeddedRedis, missing: str) -> None:
    """Redis does not undo half a script, so its order is such that the record is the old one or the new one."""
    record = replace(a_record(), error="gone afterwards", takeovers=2)
    new = replace(a_completion(record), error=None, takeovers=0)
    with opened(server.url) as store, a_user(server, f"~* +@all -{missing}") as url, opened(url) as restricted:
        store.swap(record, None)
        with pytest.raises(StoreMisconfigured, match="grant"):
            restricted.swap(new, record.revision)
        left = store.get(record.key)
        assert left == (new if missing == "pexpireat" else record)
        store.delete(record.key, left.revision)


def test_check_that_is_cut_off_leaves_what_expires(server: EmbeddedRedis) -> None:
    """A worker killed in the middle of its check leaves nothing for ever."""

    class Dying(RedisStore):
        def _swap(self, operation: str, new: Record, expected: str | None) -> Record | None:
            super()._swap(operation, new, expected)
            raise KeyboardInterrupt

    store = Dying.from_url(server.url)
    with pytest.raises(KeyboardInterrupt):
        store.verify()
    with administrator(server) as client:
        (name,) = client.keys()
        assert 0 < client.pttl(name) <= 11_000
        client.delete(name)
    store.close()


EVICTION = "set maxmemory-policy noeviction"


@pytest.mark.parametrize(
    ("wrong", "remedies"),
    [
        ({}, []),
        ({"appendonly": "no"}, ["appendonly is no: .* set appendonly yes and appendfsync always"]),
        ({"maxmemory": "1gb", "maxmemory_policy": "allkeys-lru"}, [f"policy is allkeys-lru: .* {EVICTION}"]),
        (
            {"appendfsync": "everysec", "no_appendfsync_on_rewrite": "yes"},
            ["set appendfsync always", "rewrite is yes: .* set it to no"],
        ),
        ({"maxmemory": "1gb", "maxmemory_policy": "noeviction"}, []),  # it refuses claims instead
    ],
)
def test_settings_that_lose_records_are_warned_of_at_once(
    server: EmbeddedRedis, wrong: dict[str, str], remedies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names each setting that is wrong, and what to set instead; of a good server there is no word."""
    with settings(server, **wrong):
        found = warnings_of(server.url)

    assert (len(found), caplog.records) == (bool(remedies), [])
    for warning in found:
        assert warning.startswith(f"idempotency_store={server.url.removesuffix('?')}: ")
        assert all(re.search(remedy, warning) for remedy in remedies)
        assert warning.count("set ") == len(remedies)


def test_provisioning_is_the_same_check_by_any_class_of_client(server: EmbeddedRedis) -> None:
    """There is nothing to create; and nobody but the user makes a client of a class of the user's."""

    class Tenant(redis.Redis):
        def __init__(self, tenant: str, **options: Any) -> None:
            super().__init__(**options)

    with (
        settings(server, appendfsync="everysec"),
        Tenant("a", host=HOST, port=server.port) as client,
        pytest.warns(IdempotencyWarning, match="appendfsync"),
    ):
        RedisStore(client).provision()


def test_replicas_that_nobody_waits_for_are_warned_of(server: EmbeddedRedis) -> None:
    """Where there is a replica there is a fail-over, and it forgets what the replica did not have."""
    with replica_of(server):
        (warning,) = warnings_of(server.url)
        assert "wait_replicas=1" in warning
        assert warnings_of(f"{server.url}?wait_replicas=1") == []


def test_every_primary_of_a_cluster_is_checked(redis_cluster: EmbeddedRedisCluster) -> None:
    """Permissions, memory and settings are each node's own."""
    url = f"redis+cluster://{redis_cluster.address}"
    assert warnings_of(url) == []
    for node in redis_cluster.nodes:
        with settings(node, maxmemory=1), pytest.raises(StoreUnavailable, match="maxmemory"):
            verify(url)
        with settings(node, appendfsync="everysec"):
            (warning,) = warnings_of(url)
        assert "appendfsync is everysec" in warning


@pytest.mark.parametrize(("rules", "refused"), [("-config", "CONFIG GET"), ("-config -info", "CONFIG GET and INFO")])
def test_server_that_does_not_tell_its_settings_is_noted_once(
    server: EmbeddedRedis, rules: str, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed services forbid CONFIG: the log says what could not be checked; the worker starts, and INFO counts."""
    with caplog.at_level(logging.WARNING), a_user(server, f"~* +@all {rules}") as url:
        assert warnings_of(url) == []
        (line,) = caplog.messages
        with settings(server, appendonly="no"):
            assert ["appendonly is no" in each for each in warnings_of(url)] == [True] * ("info" not in rules)

    assert line.startswith("event=idempotency.store_unchecked ")
    assert (f"refuses {refused}, so" in line, "pass" in line) == (True, False)
