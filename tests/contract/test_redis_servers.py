"""Redis behind TLS and sockets, with replicas, under fail-over, and in a cluster whose slots move."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster, EmbeddedSentinel
from lab.embedded.redis import DURABLE, GROUP
from tests.support import redis_servers
from tests.support.certificates import Certificates, new_certificates
from tests.support.redis_servers import HOST, a_user, administrator, node_id, opened, paused, redis_key, replica_of
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


def works(url: str) -> None:
    """Claim a record through `url`."""
    with opened(url) as store:
        record = a_record()
        assert store.swap(record, None) == record == store.get(record.key)


def is_refused(url: str, word: str, error: type[Exception] = StoreMisconfigured) -> None:
    with opened(url) as store, pytest.raises(StoreUnavailable, match=word) as raised:
        store.verify()
    assert type(raised.value) is error


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return new_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls(redis_server: EmbeddedRedis, certificates: Certificates) -> Iterator[TcpProxy]:
    """A Redis that speaks TLS. (The embedded server is built without; what ends the TLS stands before it.)"""
    with TcpProxy(redis_server.port, tls=certificates.for_server()) as proxy:
        yield proxy


def test_certificate_and_host_are_checked_unless_url_says_otherwise(tls: TcpProxy, certificates: Certificates) -> None:
    """The authority is named as for a broker; an error says what to set."""
    ours, other, trusted = f"{HOST}:{tls.port}/0", f"localhost:{tls.port}/0", f"ssl_ca_certs={certificates.authority}"
    works(f"rediss://{ours}?{trusted}")
    works(f"rediss://{ours}?ssl_cert_reqs=none")
    works(f"rediss://{other}?{trusted}&ssl_check_hostname=false")
    is_refused(f"rediss://{ours}", "ssl_ca_certs")
    is_refused(f"rediss://{other}?{trusted}", "the host as certified")


def test_unix_socket_works(tmp_path: Path) -> None:
    """In both spellings, with a database and a password."""
    path = tmp_path / "redis.sock"
    with EmbeddedRedis(options=(*DURABLE, "--unixsocket", str(path))) as server, administrator(server) as client:
        works(f"redis+socket://{path}?virtual_host=3")
        works(f"unix://{path}?db=3")
        assert set(client.info("keyspace")) == {"db3"}
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">pass")
        works(f"redis+socket://:pass@{path}")
        works(f"unix://default@{path}?password=pass")


def test_record_that_too_few_replicas_have_does_not_count() -> None:
    """Written, but not where it would survive: the outcome is unknown, and the next try settles it."""
    with EmbeddedRedis() as primary, replica_of(primary) as replica:
        url = f"{primary.url}?wait_replicas=1&wait_timeout=0.2"
        record = a_record()
        with paused(replica):
            # Only a connection that has written waits; on a new one it is the resend's own write that is waited for.
            for _ in range(2):
                with opened(url) as store:
                    with pytest.raises(StoreUnavailable, match=r"0 of 1 replicas .* 0\.2 s") as raised:
                        store.swap(record, None)
                    assert raised.value.__cause__ is not None
                    assert store.get(record.key) == record
        wait_until(lambda: redis_servers.replicas_online(primary) == 1, "the replica did not come back")
        with opened(url) as store, administrator(replica) as client:
            assert store.swap(record, None) == record
            assert client.hget(redis_key(record), "revision") == record.revision


def test_loser_is_told_without_waiting_for_anybody(redis_server: EmbeddedRedis) -> None:
    """A swap that wrote nothing has nothing to confirm."""
    record = a_record()
    with opened(redis_server.url) as store:
        store.swap(record, None)
    with opened(f"{redis_server.url}?wait_replicas=1&wait_timeout=0.05") as store:
        assert store.swap(a_rival(record), None) == record
        assert store.swap(a_record(), "no such revision") is None
        assert store.delete(record.key, "no such revision") is False


@pytest.mark.parametrize("missing", ["wait", "hset"])
def test_errors_of_the_script_and_of_waiting_quote_no_request(redis_server: EmbeddedRedis, missing: str) -> None:
    """A refused swap is logged: what the task returned is nobody's business there, and the script tells nobody much."""
    with a_user(redis_server, f"~* +@all -{missing}") as url, opened(f"{url}?wait_replicas=1") as store:
        with pytest.raises(StoreMisconfigured, match="grant") as raised:
            store.swap(replace(a_record(), result="private"), None)
        assert not re.search("private|EVAL|pipeline", f"{raised.value} {raised.value.__cause__}")


@pytest.mark.parametrize("way", ["on the direct path", "through redis-py's execute_command"])
def test_connections_to_a_demoted_primary_are_given_up(way: str) -> None:
    """Behind one name another server is the primary now: the connections to the old one do not stay in use."""
    with EmbeddedRedis() as old, replica_of(old) as new, TcpProxy(old.port) as name:
        url = f"redis://{HOST}:{name.port}"
        is_direct = way == "on the direct path"
        store = RedisStore.from_url(url) if is_direct else RedisStore(lambda: redis.Redis.from_url(url))
        record = a_record()
        store.swap(record, None)
        with administrator(old) as demoted, administrator(new) as promoted:
            demoted.execute_command("WAIT", 1, 5000)
            promoted.execute_command("REPLICAOF", "NO", "ONE")
            demoted.execute_command("REPLICAOF", HOST, new.port)
        name.upstream = new.port

        with pytest.raises(StoreUnavailable, match="replica"):
            store.swap(a_record(), None)
        outcome = a_completion(record)
        assert store.swap(outcome, record.revision) == outcome
        assert store.way == way
        store.close()


def test_connections_to_a_primary_without_its_replicas_are_given_up() -> None:
    """It may not know yet that behind its name another server is the primary, with all replicas."""
    with (
        EmbeddedRedis() as old,
        EmbeddedRedis() as new,
        replica_of(new),
        TcpProxy(old.port) as name,
        opened(f"redis://{HOST}:{name.port}?wait_replicas=1&wait_timeout=0.2") as store,
    ):
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas") as raised:
            store.swap(a_record(), None)
        assert raised.value.is_stored
        name.upstream, record = new.port, a_record()
        assert store.swap(record, None) == record


def test_fail_over_by_sentinel_is_followed() -> None:
    """The sentinel promotes the replica; the store finds it by itself, with all that was acknowledged."""
    records = [a_record() for _ in range(20)]
    outcomes = [a_completion(each) for each in records]
    with EmbeddedRedis() as primary, replica_of(primary) as replica, EmbeddedSentinel(primary) as sentinel:
        url = f"sentinel://127.0.0.1:1;{HOST}:{sentinel.port}/0?master_name={GROUP}"
        with administrator(sentinel) as client:
            wait_until(lambda: len(client.sentinel_slaves(GROUP)) == 1, "the sentinel never saw the replica")
        with opened(f"{url}&wait_replicas=1") as store:
            for record in records:
                assert store.swap(record, None) == record
            primary.kill()
            with pytest.raises(StoreUnavailable):
                store.swap(outcomes[0], records[0].revision)

        with opened(url) as store, administrator(replica) as client:
            first = outcomes[0], records[0].revision
            wait_until(lambda: _holds(store.swap, outcomes[0], *first), "the store never found the primary")
            assert [store.swap(each, old.revision) for each, old in zip(outcomes, records, strict=True)] == outcomes
            assert client.info("replication")["role"] == "master"


def _holds(ask: Callable[..., Record | None], record: Record, *asked: object) -> bool:
    """Whether there is an answer, and it is this record."""
    with suppress(StoreUnavailable):
        return ask(*asked) == record
    return False


def test_group_and_password_of_sentinels_are_their_own(redis_server: EmbeddedRedis) -> None:
    """A misspelt group cannot be told from a primary that is down, so it is an outage that says where to look."""
    with EmbeddedSentinel(redis_server, "requirepass watching") as sentinel:
        base = f"sentinel://{HOST}:{sentinel.port}?sentinel_password"
        works(f"{base}=watching&master_name={GROUP}")
        is_refused(f"{base}=watching&master_name=order", "check master_name", StoreUnavailable)
        with opened(f"{base}=sleeping&master_name={GROUP}") as store, pytest.raises(StoreUnavailable) as raised:
            store.verify()
        assert "sleeping" not in f"{raised.value} {raised.value.__cause__}"


@dataclass(frozen=True)
class Company:
    """A cluster of three primaries, each with a replica."""

    url: str
    primaries: list[EmbeddedRedis]
    replicas: list[EmbeddedRedis]

    def give(self, slot: int, node: EmbeddedRedis) -> None:
        """All primaries hear that a slot is that node's, the node itself first."""
        for each in sorted(self.primaries, key=lambda each: each is not node):
            with administrator(each) as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", node_id(node))


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    """Its slots move; at last the nodes change their roles, and one dies."""
    with EmbeddedRedisCluster() as cluster, redis_servers.replicas_in_cluster(cluster.nodes) as replicas:
        yield Company(f"redis+cluster://{cluster.address}", cluster.nodes, replicas)


@pytest.fixture
def waiting(company: Company) -> Iterator[RedisStore]:
    """A store that waits for one replica of the record's node, and knows the cluster as it is now."""
    with opened(f"{company.url}?wait_replicas=1&wait_timeout=0.5") as store:
        store.verify()
        yield store


def _cluster_of(store: RedisStore) -> Any:
    return store._connected()


def _record_on(store: RedisStore, node: EmbeddedRedis) -> Record:
    """A record whose key belongs to `node`, as far as the store knows."""
    records = (a_record() for _ in range(1000))
    return next(each for each in records if _cluster_of(store).get_node_from_key(redis_key(each)).port == node.port)


def _is_stored(node: EmbeddedRedis, record: Record) -> bool:
    """Whether a node, primary or replica, has the record."""
    with administrator(node) as client, client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("READONLY")
        pipeline.hget(redis_key(record), "revision")
        return bool(pipeline.execute()[1] == record.revision)


def test_replicas_of_the_records_own_node_are_waited_for(company: Company, waiting: RedisStore) -> None:
    """In a cluster each node has replicas of its own, and only those of the record's node count."""
    records = [_record_on(waiting, each) for each in company.primaries]
    assert [waiting.swap(each, None) for each in records] == records
    assert all(map(_is_stored, company.replicas, records))

    others = [_record_on(waiting, each) for each in company.primaries]
    with paused(company.replicas[1]):
        assert [waiting.swap(others[each], None) for each in (0, 2)] == [others[0], others[2]]
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            waiting.swap(others[1], None)
        assert waiting.get(others[1].key) == others[1]
        assert waiting.swap(a_rival(records[1]), None) == records[1]
    wait_until(lambda: _holds(waiting.swap, others[1], others[1], "-"), "the replica never came back")
    assert _is_stored(company.replicas[1], others[1])


def test_moved_slot_is_followed_and_waited_for(company: Company, waiting: RedisStore) -> None:
    """The slot has moved since the store last looked: the record is on the new node and on its replica."""
    record = _record_on(waiting, company.primaries[0])
    company.give(_cluster_of(waiting).keyslot(redis_key(record)), company.primaries[1])

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
    assert record in waiting.scan(task=record.task)  # by the node that cannot tell whether it is meant

    company.give(slot, target)
    assert waiting.swap(record, None) == record
    assert _is_stored(company.replicas[1], record)


@pytest.mark.nightly
def test_killed_primary_of_a_cluster_is_an_outage_until_its_replica_is_promoted(company: Company) -> None:
    """The other nodes serve on; the killed one's records are back, whole, when its replica has taken over."""
    with opened(company.url) as plain, opened(f"{company.url}?wait_replicas=1&wait_timeout=0.3") as waiting:
        mine, other = (_record_on(plain, each) for each in company.primaries[:2])
        assert [waiting.swap(each, None) for each in (mine, other)] == [mine, other]
        assert plain.get(mine.key) == mine
        company.primaries[0].kill()
        for store in (plain, waiting):
            with pytest.raises(StoreUnavailable) as raised:
                store.swap(a_rival(mine), None)
            assert type(raised.value) is StoreUnavailable

        wait_until(lambda: _holds(plain.get, mine, mine.key), "the replica was never promoted")
        outcome, others = a_completion(mine), a_completion(other)
        assert waiting.swap(others, other.revision) == others
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):  # the promoted one has none
            waiting.swap(outcome, mine.revision)
        assert plain.swap(outcome, mine.revision) == outcome
