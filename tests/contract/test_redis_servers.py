"""Redis behind TLS and sockets, with replicas, under fail-over, and in a cluster whose slots move."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from redis.cluster import RedisCluster

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.testing.contract import a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from lab.embedded.redis import DURABLE
from tests.support.certificates import Certificates, new_certificates
from tests.support.redis_servers import (
    GROUP,
    HOST,
    EmbeddedSentinel,
    administrator,
    node_id,
    paused,
    replica_of,
    replicas_in_cluster,
    replicas_online,
)
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


def opened(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


def works(url: str) -> None:
    """Claim and replace a record through `url`."""
    store = opened(url)
    try:
        record = a_record()
        assert store.swap(record, None) == record
        assert store.get(record.key) == record
        assert store.swap(a_rival(record), None) == record
    finally:
        store.close()


# -- TLS and sockets


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return new_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls(redis_server: EmbeddedRedis, certificates: Certificates) -> Iterator[TcpProxy]:
    """A Redis that speaks TLS. (The embedded server is built without; what ends the TLS stands before it.)"""
    with TcpProxy(redis_server.port, tls=certificates.for_server()) as proxy:
        yield proxy


def test_tls_with_a_trusted_authority_works(tls: TcpProxy, certificates: Certificates) -> None:
    """The authority is named as for a broker; certificate and host are checked."""
    works(f"rediss://{HOST}:{tls.port}/0?ssl_ca_certs={certificates.authority}")
    works(f"rediss://{HOST}:{tls.port}/0?ssl_ca_certs={certificates.authority}&ssl_cert_reqs=CERT_REQUIRED")


def test_certificate_that_is_not_trusted_is_refused(tls: TcpProxy) -> None:
    """By default nobody is trusted who is not certified; the error says what to set."""
    store = opened(f"rediss://{HOST}:{tls.port}/0")
    with pytest.raises(StoreMisconfigured, match="name the authority by ssl_ca_certs"):
        store.verify()
    store.close()
    works(f"rediss://{HOST}:{tls.port}/0?ssl_cert_reqs=none")


def test_certificate_of_another_host_is_refused(tls: TcpProxy, certificates: Certificates) -> None:
    """A certificate is for a name; the check of the name alone can be left out."""
    store = opened(f"rediss://localhost:{tls.port}/0?ssl_ca_certs={certificates.authority}")
    with pytest.raises(StoreMisconfigured, match="the host as certified"):
        store.verify()
    store.close()
    works(f"rediss://localhost:{tls.port}/0?ssl_ca_certs={certificates.authority}&ssl_check_hostname=false")


def test_client_shows_its_own_certificate(redis_server: EmbeddedRedis, certificates: Certificates) -> None:
    """Where the server asks clients for a certificate, the URL names it."""
    with TcpProxy(redis_server.port, tls=certificates.for_server(asks_clients=True)) as proxy:
        url = f"rediss://{HOST}:{proxy.port}/0?ssl_ca_certs={certificates.authority}"
        works(f"{url}&ssl_certfile={certificates.certificate}&ssl_keyfile={certificates.key}")
        store = opened(url)
        with pytest.raises(StoreUnavailable):
            store.verify()
        store.close()


def test_plain_text_towards_tls_and_the_reverse_are_outages(tls: TcpProxy, redis_server: EmbeddedRedis) -> None:
    """Neither hangs."""
    for url in (f"redis://{HOST}:{tls.port}", f"rediss://{HOST}:{redis_server.port}"):
        store = opened(f"{url}?socket_timeout=0.3")
        with pytest.raises(StoreUnavailable):
            store.verify()
        store.close()


def test_unix_socket_works(tmp_path: Path) -> None:
    """In both spellings, with a database and a password."""
    path = tmp_path / "redis.sock"
    with EmbeddedRedis(options=(*DURABLE, "--unixsocket", str(path))) as server:
        for url in (f"redis+socket://{path}?virtual_host=3", f"unix://{path}?db=3"):
            works(url)
        with administrator(server) as client:
            assert set(client.info("keyspace")) == {"db3"}
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">pass")
        works(f"redis+socket://:pass@{path}")
        works(f"unix://default@{path}?password=pass")


# -- replicas


def test_record_that_counts_is_on_the_replica() -> None:
    """With wait_replicas a swap returns when the replica has the record, so its promotion forgets nothing."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica:
        store = opened(f"{primary.url}?wait_replicas=1")
        records = [a_record() for _ in range(50)]
        for record in records:
            store.swap(record, None)
        primary.kill()
        store.close()
        with administrator(replica) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        promoted = opened(replica.url)

        assert [promoted.get(each.key) for each in records] == records
        promoted.close()


def test_record_that_too_few_replicas_have_does_not_count() -> None:
    """Written, but not where it would survive: the outcome is unknown, and the next try settles it."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica:
        url = f"{primary.url}?wait_replicas=1&wait_timeout=0.2"
        record = a_record()
        with paused(replica):
            store = opened(url)
            with pytest.raises(StoreUnavailable, match=r"0 of 1 replicas have the record after 0\.2 s") as raised:
                store.swap(record, None)
            assert raised.value.__cause__ is not None
            assert store.get(record.key) == record
            store.close()

            # Only a connection that has written waits; on a new one it is the resend's own write that is waited for.
            store = opened(url)
            with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
                store.swap(record, None)
            store.close()
        store = opened(url)
        wait_until(lambda: replicas_online(primary) == 1, "the replica did not come back")

        assert store.swap(record, None) == record
        with administrator(replica) as client:
            assert client.hget(f"celery-idempotent:{record.key}", "revision") == record.revision
        store.close()


def test_loser_is_told_without_waiting_for_anybody() -> None:
    """A swap that wrote nothing has nothing to confirm."""
    with EmbeddedRedis() as primary:
        record = a_record()
        opened(primary.url).swap(record, None)
        store = opened(f"{primary.url}?wait_replicas=1&wait_timeout=0.05")

        assert store.swap(a_rival(record), None) == record
        assert store.swap(a_record(), "no such revision") is None
        assert store.delete(record.key, "no such revision") is False
        store.close()


def test_errors_of_the_script_and_of_waiting_quote_no_request(redis_server: EmbeddedRedis) -> None:
    """A refused swap is logged: what the task returned is nobody's business there, and the script tells nobody much."""
    with administrator(redis_server) as client:
        client.execute_command("ACL", "SETUSER", "nowait", "reset", "on", ">p", "~*", "+@all", "-wait")
        client.execute_command("ACL", "SETUSER", "noset", "reset", "on", ">p", "~*", "+@all", "-hset")
        for user in ("nowait", "noset"):
            store = opened(f"redis://{user}:p@{HOST}:{redis_server.port}/0?wait_replicas=1&wait_timeout=0.05")
            with pytest.raises(StoreMisconfigured, match="grant") as raised:
                store.swap(replace(a_record(), result="private"), None)
            assert not re.search("private|EVAL|pipeline", f"{raised.value} {raised.value.__cause__}")
            store.close()
            client.execute_command("ACL", "DELUSER", user)


@pytest.mark.parametrize("way", ["on the direct path", "through redis-py's execute_command"])
def test_connections_to_a_demoted_primary_are_given_up(way: str) -> None:
    """Behind one name another server is the primary now: the connections to the old one do not stay in use."""
    with EmbeddedRedis() as old, replica_of(old) as new, TcpProxy(old.port) as name:
        url = f"redis://{HOST}:{name.port}"
        store = opened(url) if way == "on the direct path" else RedisStore(lambda: redis.Redis.from_url(url))
        record = a_record()
        store.swap(record, None)
        with administrator(old) as client:
            client.execute_command("WAIT", 1, 5000)
        with administrator(new) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        with administrator(old) as client:
            client.execute_command("REPLICAOF", HOST, new.port)
        name.upstream = new.port

        with pytest.raises(StoreUnavailable, match="replica"):
            store.swap(a_record(), None)
        outcome = replace(record, revision=new_nonce(), status=Status.COMPLETED)
        assert store.swap(outcome, record.revision) == outcome
        assert store.way == way
        store.close()


# -- Sentinel


def test_fail_over_by_sentinel_is_followed() -> None:
    """The sentinel promotes the replica; the store finds it by itself, with all that was acknowledged."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica, EmbeddedSentinel(primary) as sentinel:
        with administrator(sentinel) as client:
            wait_until(lambda: len(client.sentinel_slaves(GROUP)) == 1, "the sentinel never saw the replica")
        store = opened(f"sentinel://127.0.0.1:1;{HOST}:{sentinel.port}/0?master_name={GROUP}&wait_replicas=1")
        records = [a_record() for _ in range(20)]
        for record in records:
            assert store.swap(record, None) == record

        primary.kill()
        outcomes = [replace(each, revision=new_nonce(), status=Status.COMPLETED) for each in records]
        with pytest.raises(StoreUnavailable):
            store.swap(outcomes[0], records[0].revision)

        store.close()
        store = opened(f"sentinel://127.0.0.1:1;{HOST}:{sentinel.port}/0?master_name={GROUP}")
        wait_until(lambda: _swaps(store, outcomes[0], records[0].revision), "the store never found the new primary")
        assert [store.swap(each, old.revision) for each, old in zip(outcomes, records, strict=True)] == outcomes
        with administrator(replica) as client:
            assert client.info("replication")["role"] == "master"
        store.close()


def _swaps(store: RedisStore, new: Record, expected: str) -> bool:
    try:
        return store.swap(new, expected) == new
    except StoreUnavailable:
        return False


def test_unknown_group_of_sentinel_is_told(redis_server: EmbeddedRedis) -> None:
    """A misspelt name cannot be told from a primary that is down, so it is an outage that says where to look."""
    with EmbeddedSentinel(redis_server) as sentinel:
        store = opened(f"sentinel://{HOST}:{sentinel.port}?master_name=order")
        with pytest.raises(StoreUnavailable, match="check master_name"):
            store.verify()
        store.close()


def test_sentinel_with_a_password_is_asked_with_it(redis_server: EmbeddedRedis) -> None:
    """The sentinels' password is their own; a wrong one is told without being repeated."""
    with EmbeddedSentinel(redis_server, "requirepass watching") as sentinel:
        base = f"sentinel://{HOST}:{sentinel.port}?master_name={GROUP}"
        works(f"{base}&sentinel_password=watching")
        store = opened(f"{base}&sentinel_password=sleeping")
        with pytest.raises(StoreUnavailable) as raised:
            store.verify()
        assert "sleeping" not in f"{raised.value} {raised.value.__cause__}"
        store.close()


def test_sentinel_and_primary_over_tls(redis_server: EmbeddedRedis, certificates: Certificates) -> None:
    """The ssl options count for the primary, and for the sentinels where the URL says so."""
    context = certificates.for_server()
    with TcpProxy(redis_server.port, tls=context) as primary:
        stand_in = EmbeddedRedis()
        stand_in.port = primary.port
        with (
            EmbeddedSentinel(stand_in, f"sentinel down-after-milliseconds {GROUP} 600000") as sentinel,
            TcpProxy(sentinel.port, tls=context) as safe,
        ):
            options = f"master_name={GROUP}&ssl_ca_certs={certificates.authority}"
            works(f"sentinel://{HOST}:{sentinel.port}?{options}")
            works(f"sentinel://{HOST}:{safe.port}?{options}&sentinel_ssl=true")


# -- cluster


@dataclass(frozen=True)
class Company:
    """A cluster of three primaries, each with a replica."""

    url: str
    primaries: list[EmbeddedRedis]
    replicas: list[EmbeddedRedis]


def _founded() -> Iterator[Company]:
    with EmbeddedRedisCluster() as cluster, replicas_in_cluster(cluster.nodes) as replicas:
        yield Company(f"redis+cluster://{cluster.address}", cluster.nodes, replicas)


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    """A cluster whose nodes keep their roles; slots may move."""
    yield from _founded()


@pytest.fixture
def mortal_company() -> Iterator[Company]:
    """A cluster of the test's own."""
    yield from _founded()


@pytest.fixture
def waiting(company: Company) -> Iterator[RedisStore]:
    """A store that waits for one replica of the record's node, and knows the cluster as it is now."""
    store = opened(f"{company.url}?wait_replicas=1&wait_timeout=0.5")
    store.verify()
    yield store
    store.close()


def redis_key(record: Record) -> str:
    return f"celery-idempotent:{record.key}"


def _cluster_of(store: RedisStore) -> RedisCluster:
    client = store._connected()
    assert isinstance(client, RedisCluster)
    return client


def _record_on(store: RedisStore, node: EmbeddedRedis) -> Record:
    """A record whose key belongs to `node`, as far as the store knows."""
    records = (a_record() for _ in range(1000))
    return next(each for each in records if _cluster_of(store).get_node_from_key(redis_key(each)).port == node.port)


def _is_stored(node: EmbeddedRedis, record: Record) -> bool:
    """Whether a node, primary or replica, has the record."""
    with redis.Redis(port=node.port, decode_responses=True) as client:
        client.execute_command("READONLY")
        with client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("READONLY")
            pipeline.hget(redis_key(record), "revision")
            _, revision = pipeline.execute()
    return bool(revision == record.revision)


def test_replicas_of_the_records_own_node_are_waited_for(company: Company, waiting: RedisStore) -> None:
    """In a cluster each node has replicas of its own, and only those of the record's node count."""
    records = [_record_on(waiting, each) for each in company.primaries]
    assert [waiting.swap(each, None) for each in records] == records
    assert all(map(_is_stored, company.replicas, records))

    others = [_record_on(waiting, each) for each in company.primaries]
    with paused(company.replicas[1]):
        assert waiting.swap(others[0], None) == others[0]
        assert waiting.swap(others[2], None) == others[2]
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            waiting.swap(others[1], None)
        assert waiting.get(others[1].key) == others[1]
        assert waiting.swap(a_rival(records[1]), None) == records[1]
    wait_until(lambda: _swaps(waiting, others[1], "-"), "the replica never came back")
    assert _is_stored(company.replicas[1], others[1])


def test_moved_slot_is_followed_and_waited_for(company: Company, waiting: RedisStore) -> None:
    """The slot has moved since the store last looked: the record is on the new node and on its replica."""
    source, target, _ = company.primaries
    record = _record_on(waiting, source)
    slot = _cluster_of(waiting).keyslot(redis_key(record))
    for node in (target, source, company.primaries[2]):
        with administrator(node) as client:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(target))

    assert waiting.swap(record, None) == record
    assert _is_stored(company.replicas[1], record)
    assert waiting.swap(a_rival(record), None) == record
    assert waiting.delete(record.key, record.revision) is True


def test_slot_on_its_way_is_an_outage_until_it_has_arrived(company: Company, waiting: RedisStore) -> None:
    """While a slot moves, a new record is written where it goes, but cannot be waited for; afterwards it can."""
    source, target, _ = company.primaries
    record = _record_on(waiting, source)
    slot = _cluster_of(waiting).keyslot(redis_key(record))
    with administrator(source) as old, administrator(target) as new:
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", node_id(source))
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", node_id(target))

        with pytest.raises(StoreUnavailable, match="still being moved"):
            waiting.swap(record, None)
        assert waiting.get(record.key) == record

        for node in (target, source, company.primaries[2]):
            with administrator(node) as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(target))
    assert waiting.swap(record, None) == record
    assert _is_stored(company.replicas[1], record)


def _takes_over(client: redis.Redis) -> bool:
    """Ask a replica to take its primary's place; a server that is not done in 5 s gives up, and is asked again."""
    client.execute_command("CLUSTER FAILOVER")
    with suppress(AssertionError):
        wait_until(lambda: client.info("replication")["role"] == "master", "not yet", timeout=6)
    return bool(client.info("replication")["role"] == "master")


def test_planned_fail_over_in_a_cluster_is_followed(mortal_company: Company) -> None:
    """Primary and replica change places, and stores, waiting or not, go on with all that was acknowledged."""
    primary, promoted = mortal_company.primaries[0], mortal_company.replicas[0]
    stores = [opened(f"{mortal_company.url}{options}") for options in ("", "?wait_replicas=1")]
    records = [_record_on(each, primary) for each in stores]
    assert [store.swap(each, None) for store, each in zip(stores, records, strict=True)] == records
    with administrator(promoted) as client:
        wait_until(lambda: _takes_over(client), "the replica was never promoted")
    wait_until(lambda: replicas_online(promoted) == 1, "the old primary never followed")

    for store, record in zip(stores, records, strict=True):
        outcome = replace(record, revision=new_nonce(), status=Status.COMPLETED)
        assert store.swap(outcome, record.revision) == outcome
        assert _is_stored(promoted, outcome)
        store.close()


def test_killed_primary_of_a_cluster_is_an_outage_until_its_replica_is_promoted(mortal_company: Company) -> None:
    """The other nodes serve on; the killed one's records are back, whole, when its replica has taken over."""
    plain, waiting = (opened(f"{mortal_company.url}{options}") for options in ("", "?wait_replicas=1&wait_timeout=0.3"))
    records = [_record_on(plain, each) for each in mortal_company.primaries]
    assert [waiting.swap(each, None) for each in records] == records
    outcomes = [replace(each, revision=new_nonce(), status=Status.COMPLETED) for each in records]
    assert plain.get(records[0].key) == records[0]
    mortal_company.primaries[0].kill()
    for store in (plain, waiting):
        with pytest.raises(StoreUnavailable) as raised:
            store.swap(a_rival(records[0]), None)
        assert not isinstance(raised.value, StoreMisconfigured)

    wait_until(lambda: _reads(plain, records[0]), "the replica was never promoted")
    assert waiting.swap(outcomes[1], records[1].revision) == outcomes[1]
    assert plain.swap(outcomes[2], records[2].revision) == outcomes[2]
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):  # the promoted one has none
        waiting.swap(outcomes[0], records[0].revision)
    assert plain.swap(outcomes[0], records[0].revision) == outcomes[0]
    for store in (plain, waiting):
        store.close()


def _reads(store: RedisStore, record: Record) -> bool:
    try:
        return store.get(record.key) == record
    except StoreUnavailable:
        return False
