"""What a worker learns about its Redis before it takes a message: what cannot work, and what can be lost."""

import logging
import re
import ssl
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores import open_store
from celery_idempotent.stores.failures import NO_RULE
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.client import trouble_of
from celery_idempotent.testing.contract import a_completion, a_record
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from lab.embedded.redis import DURABLE
from tests.support.redis_servers import HOST, a_user, administrator, paused, replica_of, settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A server of the test's own, set up as it should be."""
    with EmbeddedRedis() as server:
        yield server


def opened(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


def verify(url: str) -> None:
    store = opened(url)
    try:
        store.verify()
    finally:
        store.close()


def warnings_of(url: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verify(url)
    assert all(each.category is IdempotencyWarning for each in caught)
    return [str(each.message) for each in caught]


# -- what cannot work


def test_good_server_passes_without_a_word_and_keeps_nothing(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is set up as documented gives no warning and no log line, and the check leaves nothing behind."""
    verify(server.url)

    assert caplog.records == []
    with administrator(server) as client:
        assert client.dbsize() == 0


def test_client_of_a_class_of_the_users_passes(server: EmbeddedRedis) -> None:
    """Its constructor may take what it likes; nobody but the user makes one."""

    class Tenant(redis.Redis):
        def __init__(self, tenant: str, **options: Any) -> None:
            super().__init__(**options)
            self.tenant = tenant

    store = RedisStore(Tenant("a", host=HOST, port=server.port))
    try:
        store.verify()
    finally:
        store.close()


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
    store.close()


COMMANDS = ("evalsha", "time", "hgetall", "hset", "hdel", "persist", "pexpireat")


@pytest.mark.parametrize("missing", COMMANDS)
def test_missing_permission_is_named(server: EmbeddedRedis, missing: str) -> None:
    """Each command that a claim or an outcome needs is tried, and its refusal says which it is and what to grant."""
    with (
        a_user(server, f"~* +@all -{missing}") as url,
        pytest.raises(StoreMisconfigured, match=rf"grant it .*\+{missing}.*'{missing}'"),
    ):
        verify(url)
    with administrator(server) as client:
        assert client.dbsize() == 0


def test_missing_permission_to_load_the_script_is_named(server: EmbeddedRedis) -> None:
    """Without EVAL a server that restarted could never be given the script again."""
    with a_user(server, "~* +@all -eval") as url, pytest.raises(StoreMisconfigured, match=r"\+eval .*'eval'"):
        verify(url)


def test_forbidden_keys_are_told(server: EmbeddedRedis) -> None:
    """A user whose keys begin otherwise cannot claim."""
    with a_user(server, "~other:* +@all") as url:
        with pytest.raises(StoreMisconfigured, match="keys that begin with the store's prefix"):
            verify(url)
        verify(f"{url}?prefix=other:")


@pytest.mark.parametrize("login", ["shop:wrong@", ":wrong@", "nobody:pass@"])
def test_wrong_login_is_told_without_the_password(server: EmbeddedRedis, login: str) -> None:
    """A login that the server refuses needs somebody to change it; the error does not repeat it."""
    with a_user(server, "~* +@all"), pytest.raises(StoreMisconfigured, match="does not accept user and password") as it:
        verify(f"redis://{login}{HOST}:{server.port}")
    assert "wrong" not in f"{it.value} {it.value.__cause__}"


def test_missing_login_is_told(server: EmbeddedRedis) -> None:
    """A server that wants a password and is given none."""
    with settings(server, requirepass="wanted"), pytest.raises(StoreMisconfigured, match="user and password"):
        verify(server.url)


def test_database_that_is_not_there_is_told(server: EmbeddedRedis) -> None:
    """Redis has sixteen databases by default."""
    with pytest.raises(StoreMisconfigured, match="no database with this number"):
        verify(f"redis://{HOST}:{server.port}/99")


def test_read_only_replica_is_told() -> None:
    """At the start a replica is a wrong address; a fail-over later is an outage, which ends by itself."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica:
        store = opened(replica.url)
        with pytest.raises(StoreMisconfigured, match="replica; name its primary"):
            store.verify()
        with pytest.raises(StoreUnavailable, match="replica; name its primary") as raised:
            store.swap(a_record(), None)
        assert not isinstance(raised.value, StoreMisconfigured)
        store.close()


def test_full_memory_is_an_outage(server: EmbeddedRedis) -> None:
    """Memory gets free when outcomes expire: a worker may start and wait."""
    with settings(server, maxmemory=1), pytest.raises(StoreUnavailable, match="memory is full") as raised:
        verify(server.url)
    assert not isinstance(raised.value, StoreMisconfigured)


def test_write_whose_reply_was_lost_is_confirmed_though_memory_is_full_by_now(server: EmbeddedRedis) -> None:
    """What is stored takes no memory: the effect has happened, and its worker must not wait for memory to tell so."""
    store = opened(server.url)
    claimed = a_record()
    store.swap(claimed, None)
    completed = a_completion(claimed)
    store.swap(completed, claimed.revision)

    with settings(server, maxmemory=1):
        assert store.swap(completed, claimed.revision) == completed
        assert store.swap(claimed, None) == completed
    store.close()


def test_loading_server_is_an_outage() -> None:
    """A server that still reads its data will be there soon."""
    slowly = ("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")
    with EmbeddedRedis(options=(*DURABLE, *slowly)) as server:
        store = opened(server.url)
        for _ in range(100):
            store.swap(a_record(), None)
        with administrator(server) as client:
            client.bgrewriteaof()  # what is loaded with the delay
            wait_until(lambda: _is_rewritten(client), "the append-only file was not rewritten")
        restart = threading.Thread(target=server.restart)
        restart.start()
        with redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as client:
            wait_until(lambda: _is_loading(client), "the server was ready at once")

        with pytest.raises(StoreUnavailable, match="loading") as raised:
            store.verify()

        assert not isinstance(raised.value, StoreMisconfigured)
        restart.join()
        store.verify()
        store.close()


def _is_rewritten(client: Any) -> bool:
    info = client.info("persistence")
    return bool(info["aof_rewrites"] == 1 and not info["aof_rewrite_in_progress"])


def _is_loading(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass
    return False


def test_silent_server_is_an_outage(server: EmbeddedRedis) -> None:
    """A server that hangs may come back."""
    store = opened(f"{server.url}?socket_timeout=0.2")
    store.verify()
    with paused(server), pytest.raises(StoreUnavailable, match="Timeout"):
        store.verify()
    store.verify()
    store.close()


def test_missing_replica_is_an_outage(server: EmbeddedRedis) -> None:
    """Whoever waits for a replica that is not there claims nothing."""
    with pytest.raises(StoreUnavailable, match=r"0 of 1 replicas have the record after 0\.05 s"):
        verify(f"{server.url}?wait_replicas=1&wait_timeout=0.05")


def test_cluster_and_server_are_not_mixed_up(server: EmbeddedRedis, redis_cluster: EmbeddedRedisCluster) -> None:
    """The scheme decides, and the error says which is right."""
    store = opened(f"redis://{redis_cluster.address}")
    with pytest.raises(StoreMisconfigured, match=r"write redis\+cluster://"):
        [store.swap(a_record(), None) for _ in range(50)]  # a third of the keys are the node's own
    store.close()
    with pytest.raises(StoreMisconfigured, match="is not part of a cluster; write redis://"):
        verify(f"redis+cluster://{HOST}:{server.port}")


def test_every_primary_of_a_cluster_is_checked(redis_cluster: EmbeddedRedisCluster) -> None:
    """A node that accepts no claims is found, whichever it is; permissions and memory are each node's own."""
    verify(f"redis+cluster://{redis_cluster.address}")
    for node in redis_cluster.nodes:
        with settings(node, maxmemory=1), pytest.raises(StoreUnavailable, match="memory is full"):
            verify(f"redis+cluster://{redis_cluster.address}")


def test_server_without_scripts_is_told_without_quoting_the_request() -> None:
    """A server answers an unknown command with its arguments; the error leaves those out."""
    with EmbeddedRedis(options=(*DURABLE, "--rename-command", "EVALSHA", "")) as server:
        store = opened(server.url)
        with pytest.raises(StoreMisconfigured, match="must be Redis 6.2 or later") as raised:
            store.swap(a_record(), None)
        assert "celery-idempotent:" not in str(raised.value)
        store.close()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        # Texts of Redis 6.2 and 7.0, which the server of these tests words otherwise.
        (
            ResponseError("Error running script (call to f_e96): @user_script: 44: -OOM command not allowed"),
            "maxmemory",
        ),
        (ResponseError("Error running script: @user_script: 44: -READONLY You can't write against"), "replica"),
        (
            ResponseError("@user_script: 44: The user executing the script can't run this command or subcommand"),
            "grant",
        ),
        (ResponseError("The user executing the script can't run this command or subcommand script: e96"), "grant"),
        (ResponseError("unknown command `EVALSHA`, with args beginning with: `e96`"), "Redis 6.2 or later"),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "maxmemory"),
        (MaxConnectionsError("Too many connections"), None),
        (ssl.SSLCertVerificationError("certificate verify failed"), "ssl_ca_certs"),
    ],
)
def test_errors_of_older_servers_are_understood(error: Exception, remedy: str | None) -> None:
    """What an error asks for does not depend on how a version of the server words it."""
    trouble = trouble_of(error)

    if remedy is None:
        assert trouble is NO_RULE
    else:
        assert remedy in trouble.remedy


# -- what can be lost


@pytest.mark.parametrize(
    ("wrong", "remedies"),
    [
        ({"appendonly": "no"}, ["appendonly is no: .* set appendonly yes and appendfsync always"]),
        ({"appendfsync": "everysec"}, ["appendfsync is everysec: .* set appendfsync always"]),
        ({"appendfsync": "no"}, ["appendfsync is no: .* set appendfsync always"]),
        ({"no_appendfsync_on_rewrite": "yes"}, ["no-appendfsync-on-rewrite is yes: .* set it to no"]),
        (
            {"maxmemory": "1gb", "maxmemory_policy": "allkeys-lru"},
            ["maxmemory-policy is allkeys-lru: .* set maxmemory-policy noeviction"],
        ),
        (
            {"maxmemory": "1gb", "maxmemory_policy": "volatile-ttl"},
            ["maxmemory-policy is volatile-ttl: .* set maxmemory-policy noeviction"],
        ),
        (
            {
                "appendfsync": "everysec",
                "no_appendfsync_on_rewrite": "yes",
                "maxmemory": "1gb",
                "maxmemory_policy": "allkeys-random",
            },
            ["set appendfsync always", "set it to no", "set maxmemory-policy noeviction"],
        ),
    ],
)
def test_settings_that_lose_records_are_warned_of_at_once(
    server: EmbeddedRedis, wrong: dict[str, str], remedies: list[str]
) -> None:
    """One warning names each setting that is wrong, and what to set instead."""
    with settings(server, **wrong):
        (warning,) = warnings_of(server.url)

    assert warning.startswith(f"idempotency_store={server.url.removesuffix('?')}: the server can forget")
    assert all(re.search(remedy, warning) for remedy in remedies)
    assert warning.count("set ") == len(remedies)


@pytest.mark.parametrize(
    "harmless", [{"maxmemory": "1gb", "maxmemory_policy": "noeviction"}, {"maxmemory_policy": "allkeys-lru"}]
)
def test_settings_that_lose_nothing_are_not_warned_of(server: EmbeddedRedis, harmless: dict[str, str]) -> None:
    """A limit without eviction refuses claims instead; a policy without a limit does nothing."""
    with settings(server, **harmless):
        assert warnings_of(server.url) == []


def test_replicas_that_nobody_waits_for_are_warned_of(server: EmbeddedRedis) -> None:
    """Where there is a replica there is a fail-over, and it forgets what the replica did not have."""
    with replica_of(server):
        (warning,) = warnings_of(server.url)
        assert "add wait_replicas=1 to the URL" in warning
        assert warnings_of(f"{server.url}?wait_replicas=1") == []


def test_one_careless_node_of_a_cluster_is_warned_of(redis_cluster: EmbeddedRedisCluster) -> None:
    """Each primary's settings count."""
    url = f"redis+cluster://{redis_cluster.address}"
    assert warnings_of(url) == []
    with settings(redis_cluster.nodes[2], appendfsync="everysec"):
        (warning,) = warnings_of(url)
    assert "appendfsync is everysec" in warning


@pytest.mark.parametrize(
    ("rules", "refused"),
    [("-config", "CONFIG GET"), ("-info", "INFO"), ("-config -info", "CONFIG GET and INFO")],
)
def test_server_that_does_not_tell_its_settings_is_noted_once(
    server: EmbeddedRedis, rules: str, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Managed services forbid CONFIG: the log says, once, what could not be checked; the worker starts."""
    with caplog.at_level(logging.WARNING), a_user(server, f"~* +@all {rules}") as url:
        assert warnings_of(url) == []

    (line,) = caplog.messages
    assert line.startswith("event=idempotency.store_unchecked ")
    assert f"refuses {refused}, so" in line
    assert "pass" not in line


def test_what_is_told_counts_although_the_rest_is_refused(server: EmbeddedRedis) -> None:
    """Without CONFIG, INFO still tells whether there is an append-only file and what is evicted."""
    with settings(server, appendonly="no"), a_user(server, "~* +@all -config") as url:
        (warning,) = warnings_of(url)
    assert "appendonly is no" in warning


def test_outage_in_the_middle_of_the_check_is_an_outage(server: EmbeddedRedis) -> None:
    """A lost connection is no refusal to tell the settings."""
    with TcpProxy(server.port) as proxy:
        proxy.cut_request(b"CONFIG", times=10)
        with pytest.raises(StoreUnavailable):
            verify(f"redis://{HOST}:{proxy.port}")


def test_provisioning_is_the_same_check(server: EmbeddedRedis) -> None:
    """There is nothing to create, so the command says whether all is well."""
    store = opened(server.url)
    with settings(server, appendfsync="everysec"), pytest.warns(IdempotencyWarning, match="appendfsync"):
        store.provision()
    store.close()
