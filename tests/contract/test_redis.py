"""The contract on Redis, alone and in company, and what only this store can get wrong."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any
from uuid import uuid4

import pytest
import redis
from redis.cluster import RedisCluster

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store, VerifiableStore
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.testing import OutageContract, StoreContract
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from tests.support.redis_servers import GROUP, HOST, EmbeddedSentinel, administrator, replica_of, settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


def opened(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


def redis_key(record: Record) -> str:
    return f"celery-idempotent:{record.key}"


class RedisContract(StoreContract):
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        self._url = url
        store = opened(url)
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return opened(self._url)


class TestRedisStore(RedisContract):
    """The whole contract on one server."""

    @pytest.fixture
    def url(self, redis_server: EmbeddedRedis) -> str:
        return redis_server.url


class TestRedisCluster(RedisContract):
    """The whole contract on three primaries, each with a third of the keys."""

    @pytest.fixture
    def url(self, redis_cluster: EmbeddedRedisCluster) -> str:
        return f"redis+cluster://{redis_cluster.address}"


@pytest.fixture(scope="module")
def primary() -> Iterator[EmbeddedRedis]:
    """A server with a replica."""
    with EmbeddedRedis() as primary, replica_of(primary):
        yield primary


class TestRedisStoreWithAReplica(RedisContract):
    """The whole contract on a primary whose replica must have every record before it counts."""

    @pytest.fixture
    def url(self, primary: EmbeddedRedis) -> str:
        return f"{primary.url}?wait_replicas=1"


class TestRedisBehindSentinel(RedisContract):
    """The whole contract on the primary that a sentinel names."""

    @pytest.fixture
    def url(self, primary: EmbeddedRedis) -> Iterator[str]:
        with EmbeddedSentinel(primary) as sentinel:
            yield f"sentinel://{HOST}:{sentinel.port}/0?master_name={GROUP}&wait_replicas=1"


class TestRedisRefused(OutageContract):
    """Nobody listens."""

    answers_within = 10.0

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        yield from _closing(opened("redis://127.0.0.1:1/0"))


class TestRedisSocketGone(OutageContract):
    """A server takes its socket away when it stops; that is an outage, and no wrong path."""

    answers_within = 10.0

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        yield from _closing(opened("unix:///no/such/redis.sock"))


class TestClusterRefused(OutageContract):
    """No node listens."""

    answers_within = 10.0

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        yield from _closing(opened("redis+cluster://127.0.0.1:1;127.0.0.1:2"))


class TestSentinelRefused(OutageContract):
    """No sentinel listens."""

    answers_within = 10.0

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        yield from _closing(opened("sentinel://127.0.0.1:1;127.0.0.1:2?master_name=orders"))


class TestRedisSilent(OutageContract):
    """The server accepts connections and never answers: what a lost network looks like."""

    answers_within = 5.0

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        import socket

        with socket.create_server((HOST, 0)) as silent:
            yield from _closing(opened(f"redis://{HOST}:{silent.getsockname()[1]}/0?socket_timeout=0.3"))


def _closing(store: RedisStore) -> Iterator[RedisStore]:
    yield store
    store.close()


def test_a_call_with_the_usual_timeouts_ends_well_within_a_lease() -> None:
    """All tries of the driver, each waiting as long as it may, take less than half of the default lease."""
    client = opened("redis://localhost")._connected()
    assert isinstance(client, redis.Redis)
    options = client.connection_pool.connection_kwargs

    at_most = (1 + options["retry"]._retries) * (options["socket_connect_timeout"] + options["socket_timeout"])

    assert at_most == 15
    assert client.connection_pool.max_connections == 10_000


@pytest.fixture
def store(redis_server: EmbeddedRedis) -> Iterator[RedisStore]:
    store = opened(redis_server.url)
    yield store
    store.close()


@pytest.fixture
def proxy(redis_server: EmbeddedRedis) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def distant(proxy: TcpProxy) -> Iterator[RedisStore]:
    """The store, its server behind the proxy, connected."""
    store = opened(f"redis://{HOST}:{proxy.port}/0")
    store.swap(a_record(), None)
    yield store
    store.close()


# -- how it is kept


def test_record_is_one_hash_with_the_documented_fields(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """Field names and forms are an interface: people, scripts and other versions read them."""
    record = replace(
        a_record(),
        takeovers=2,
        steps={"charge": {"result": "ch_1"}},
        verdict={"by": "ann"},
        result='"x"',
        content_type="application/json",
        error="e",
        expires_at=4_000_000_000,
    )
    store.swap(record, None)

    with administrator(redis_server) as client:
        stored = client.hgetall(redis_key(record))

    assert stored == {
        "status": "IN_PROGRESS",
        "revision": record.revision,
        "owner": record.owner,
        "fencing_token": "1800000000000",
        "lease_until": "1800000060000",
        "fingerprint": "f" * 64,
        "attempts": "1",
        "takeovers": "2",
        "created_at": "1800000000000",
        "updated_at": "1800000000000",
        "task": "orders.charge",
        "task_id": record.task_id,
        "worker": "celery@example",
        "app": "shop",
        "process": record.process,
        "label": "acme/1001",
        "trace": record.trace,
        "steps": '{"charge": {"result": "ch_1"}}',
        "verdict": '{"by": "ann"}',
        "result": '"x"',
        "content_type": "application/json",
        "error": "e",
        "expires_at": "4000000000",
        "schema": "1",
    }
    assert set(stored) == {each.name for each in fields(Record)} - {"key"}


def test_result_in_bytes_is_marked(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """Redis cannot tell text from bytes, so a field of its own does; it goes with the result."""
    record = replace(a_record(), result=b"\xff", content_type="x/y")
    store.swap(record, None)
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        stored = client.hgetall(redis_key(record))
        store.swap(replace(record, revision="2", result="text"), record.revision)
        later = client.hgetall(redis_key(record))

    assert (stored[b"result"], stored[b"result_is_binary"]) == (b"\xff", b"1")
    assert later[b"result"] == b"text"
    assert b"result_is_binary" not in later


def test_any_text_of_python_is_kept(store: RedisStore) -> None:
    """Halves of surrogate pairs and NUL, which UTF-8 or C know not, come back as they were."""
    for text in ("\ud83d", "a\x00b"):
        record = replace(a_record(), key=f"{text}{uuid4().hex}", worker=text, error=text, result=text)
        assert store.swap(record, None) == record
        assert store.get(record.key) == record
        assert record in list(store.scan())


def test_server_forgets_outcomes_and_nothing_else(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """The server's expiry is the record's, to the second, and is gone with it: a live record never has one."""
    record = a_record()
    outcome = replace(record, revision=new_nonce(), status=Status.COMPLETED, expires_at=4_000_000_000)
    live = replace(record, revision=new_nonce())
    with administrator(redis_server) as client:
        expiries = []
        for new, expected in ((record, None), (outcome, record.revision), (live, outcome.revision)):
            assert store.swap(new, expected) == new
            expiries.append(client.execute_command("PEXPIRETIME", redis_key(record)))

    assert expiries == [-1, 4_000_000_000_000, -1]


def test_outcome_past_its_expiry_is_gone_by_itself(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """Nobody reads it: the server deletes it all the same."""
    record = replace(a_record(), status=Status.COMPLETED, expires_at=store.now() // 1000 + 1)
    with administrator(redis_server) as client:
        client.flushdb()
        assert store.swap(record, None) == record
        wait_until(lambda: client.dbsize() == 0, "the server kept an expired outcome")


def test_value_beyond_the_servers_limit_is_refused_before_it_is_sent(store: RedisStore) -> None:
    """A record that Redis cannot take is certainly not written."""
    record = a_record()
    store.swap(record, None)

    with pytest.raises(RecordTooLarge, match="of result; Redis's limit is 512 MB"):
        store.swap(replace(record, revision="2", result=bytes(512 * 1024 * 1024 + 1)), record.revision)

    assert store.get(record.key) == record


def test_prefixes_keep_two_apps_of_one_database_apart(redis_server: EmbeddedRedis) -> None:
    """Neither sees, lists or deletes what the other has under the same key; special characters are nothing special."""
    base = uuid4().hex
    stores = [
        opened(f"{redis_server.url}?prefix={base}{suffix}") for suffix in ("%5B12%5D%3F%2A%5C:", "1x:", "%5B12%5D:")
    ]
    records = [replace(a_record(), key="one key") for _ in stores]
    for store, record in zip(stores, records, strict=True):
        assert store.swap(record, None) == record

    assert [list(store.scan()) for store in stores] == [[record] for record in records]
    assert stores[0].delete("one key", records[0].revision) is True
    assert [store.get("one key") for store in stores] == [None, *records[1:]]
    for store in stores:
        store.close()


def test_scan_reads_in_pages_and_passes_over_what_has_gone(redis_server: EmbeddedRedis) -> None:
    """More records than a page are all found; one that expires between its listing and its reading is not missed."""

    class Listing(redis.Redis):
        def scan_iter(self, *args: object, **kwargs: object) -> Iterator[bytes]:
            yield b"scan:gone meanwhile"
            yield from super().scan_iter(*args, **kwargs)  # type: ignore[arg-type]

    store = RedisStore(lambda: Listing(port=redis_server.port), prefix="scan:")
    records = [a_record() for _ in range(1001)]
    for record in records:
        store.swap(record, None)

    found = list(store.scan())

    assert sorted(each.key for each in found) == sorted(each.key for each in records)
    store.close()


# -- requests


def test_every_swap_is_one_round_trip(proxy: TcpProxy, distant: RedisStore) -> None:
    """Won, lost, resent or in vain: one message there, one back."""
    record = a_record()
    before = proxy.round_trips

    distant.swap(record, None)
    distant.swap(record, None)
    distant.swap(a_rival(record), None)
    distant.swap(replace(record, revision="b", expires_at=4_000_000_000), record.revision)
    distant.swap(a_record(), "nothing there")

    assert proxy.round_trips - before == 5


def test_waiting_for_replicas_is_in_the_same_round_trip() -> None:
    """The write and the waiting travel together."""
    with EmbeddedRedis() as primary, replica_of(primary), TcpProxy(primary.port) as proxy:
        store = opened(f"redis://{HOST}:{proxy.port}/0?wait_replicas=1")
        store.swap(a_record(), None)
        before = proxy.round_trips

        store.swap(a_record(), None)

        assert proxy.round_trips - before == 1
        store.close()


def test_forgotten_script_is_sent_again(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """A server that restarted, or whose scripts were flushed, is given the script with the next swap."""
    record = a_record()
    store.swap(record, None)
    with administrator(redis_server) as client:
        client.script_flush()

        assert store.swap(replace(record, revision="2"), record.revision) == replace(record, revision="2")
        client.script_flush()
        assert store.delete(record.key, "2") is True


def test_lost_reply_is_healed_by_the_resend(proxy: TcpProxy, distant: RedisStore) -> None:
    """The driver sends again, and the swap reports its own revision: written twice, won once."""
    record = a_record()
    second = replace(record, revision=new_nonce(), lease_until=7)
    third = replace(second, revision=new_nonce(), status=Status.COMPLETED, expires_at=4_000_000_000)
    for new, expected in ((record, None), (second, record.revision), (third, second.revision)):
        cut = proxy.cut_reply(new.revision.encode(), times=2)
        connections = proxy.connections

        assert distant.swap(new, expected) == new
        assert cut.struck == 2
        assert proxy.connections == connections + 2
        assert distant.get(record.key) == new


def test_lost_request_is_sent_again(proxy: TcpProxy, distant: RedisStore) -> None:
    """A request that never arrived is simply sent again."""
    record = a_record()
    cut = proxy.cut_request(record.revision.encode(), times=2)

    assert distant.swap(record, None) == record
    assert cut.struck == 2


def test_resend_that_meets_a_successor_loses(proxy: TcpProxy, distant: RedisStore, store: RedisStore) -> None:
    """Between the lost reply and the resend somebody took over: the resend overwrites nothing."""
    record = a_record()
    theirs = a_rival(record)
    proxy.cut_reply(record.revision.encode(), times=3)
    with pytest.raises(StoreUnavailable):
        distant.swap(record, None)
    store.swap(theirs, record.revision)

    assert distant.swap(record, None) == theirs


def test_unanswered_swap_has_an_unknown_outcome(proxy: TcpProxy, distant: RedisStore, store: RedisStore) -> None:
    """When every try is lost the caller is told so, whether or not the record was written, with the driver's error."""
    record = a_record()
    cut = proxy.cut_reply(record.revision.encode(), times=3)

    with pytest.raises(StoreUnavailable) as raised:
        distant.swap(record, None)

    assert cut.struck == 3
    assert isinstance(raised.value.__cause__, redis.ConnectionError)
    assert store.get(record.key) == record


def test_clock_is_the_servers(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """Asked first or learned from a swap, the clock is within the server's millisecond and the way there."""
    learned = opened(redis_server.url)
    learned.swap(a_record(), None)
    for each in (store, learned):
        with administrator(redis_server) as client:
            seconds, microseconds = client.time()
            before = seconds * 1000 + microseconds // 1000
            now = each.now()
            seconds, microseconds = client.time()
            after = seconds * 1000 + microseconds // 1000
        assert before - 100 <= now <= after + 100
    learned.close()


def test_every_swap_tells_the_time(proxy: TcpProxy) -> None:
    """After a swap the clock needs no request of its own."""
    store = opened(f"redis://{HOST}:{proxy.port}/0")
    store.swap(a_record(), None)
    before = proxy.round_trips

    store.now()

    assert proxy.round_trips == before
    store.close()


# -- what survives


def test_acknowledged_records_survive_a_killed_server() -> None:
    """With the settings that are asked for, kill -9 loses nothing that was acknowledged, and the store finds back."""
    with EmbeddedRedis() as server:
        store = opened(server.url)
        records = []
        for _ in range(3):
            record = a_record()
            store.swap(record, None)
            outcome = replace(record, revision=new_nonce(), status=Status.COMPLETED, expires_at=4_000_000_000)
            records += [record := outcome, a_record()]
            store.swap(outcome, store.get(outcome.key).revision)  # type: ignore[union-attr]
            store.swap(records[-1], None)
            server.restart()
            assert [store.get(each.key) for each in records] == records
        with administrator(server) as client:
            assert [client.execute_command("PEXPIRETIME", redis_key(each)) for each in records] == [
                4_000_000_000_000,
                -1,
            ] * 3
        store.close()


def test_full_memory_refuses_claims_and_takes_outcomes() -> None:
    """No new operation begins that could not be recorded; one that has begun can still be recorded."""
    with EmbeddedRedis() as server:
        store = opened(server.url)
        record = a_record()
        outcome = replace(record, revision=new_nonce(), status=Status.COMPLETED, result="x" * 1000, content_type="t")
        store.swap(record, None)
        with settings(server, maxmemory=1):
            with pytest.raises(StoreUnavailable, match="raise maxmemory") as raised:
                store.swap(a_record(), None)
            assert not isinstance(raised.value, StoreMisconfigured)
            assert store.swap(outcome, record.revision) == outcome
            assert store.swap(a_rival(record), None) == outcome
        assert store.get(record.key) == outcome
        store.close()


@pytest.mark.parametrize("missing", ["hset", "hdel", "persist", "pexpireat"])
def test_missing_permission_leaves_the_record_whole(redis_server: EmbeddedRedis, missing: str) -> None:
    """Redis does not undo half a script, so its order is such that the record is the old one or the new one."""
    store = opened(redis_server.url)
    record = replace(a_record(), error="gone afterwards", takeovers=2)
    new = replace(a_completion(record), error=None, takeovers=0)
    store.swap(record, None)
    with administrator(redis_server) as client:
        client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">pass", "~*", "+@all", f"-{missing}")
        restricted = opened(f"redis://shop:pass@{HOST}:{redis_server.port}/0")

        with pytest.raises(StoreMisconfigured, match="grant"):
            restricted.swap(new, record.revision)

        assert store.get(record.key) == (new if missing == "pexpireat" else record)
        client.execute_command("ACL", "DELUSER", "shop")
    restricted.close()
    store.close()


# -- what is not ours


def test_key_of_another_program_is_left_alone(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """A string, or a hash that is no record, under our key is an error that says so, and stays as it is."""
    text, other = a_record(), a_record()
    with administrator(redis_server) as client:
        client.set(redis_key(text), "theirs")
        client.hset(redis_key(other), mapping={"name": "Ada"})
        try:
            for record, told in ((text, "prefix"), (other, "no record")):
                with pytest.raises(StoreMisconfigured, match=told):
                    store.swap(record, None)
                with pytest.raises(StoreMisconfigured, match=told):
                    store.get(record.key)
            assert not {text.key, other.key} & {each.key for each in store.scan()}
            assert client.get(redis_key(text)) == "theirs"
            assert client.hgetall(redis_key(other)) == {"name": "Ada"}
        finally:
            client.delete(redis_key(text), redis_key(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts", "many"), ("steps", "{"), ("worker", b"\xff"), ("schema", "one"), ("status", "ODD")],
)
def test_damaged_record_is_named(
    store: RedisStore, redis_server: EmbeddedRedis, field: str, value: str | bytes
) -> None:
    """A field that somebody has spoilt is no reason to act as if there were no record."""
    record = a_record()
    store.swap(record, None)
    with administrator(redis_server) as client:
        client.hset(redis_key(record), field, value)
        with pytest.raises(StoreMisconfigured, match="damaged"):
            store.swap(a_rival(record), None)
        client.delete(redis_key(record))


def test_record_of_a_newer_version_is_refused_and_left_alone(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """A reader that meets a newer layout says so instead of rewriting what it does not know, odd as it may look."""
    record = a_record()
    store.swap(record, None)
    with administrator(redis_server) as client:
        client.hset(redis_key(record), mapping={"schema": "2", "attempts": "in another form"})
        with pytest.raises(StoreMisconfigured, match="schema 2.*upgrade"):
            store.swap(a_rival(record), None)
        with pytest.raises(StoreMisconfigured, match="schema 2.*upgrade"):
            store.get(record.key)
        assert client.hget(redis_key(record), "revision") == record.revision
        client.delete(redis_key(record))


def test_record_of_the_version_before_is_read(store: RedisStore, redis_server: EmbeddedRedis) -> None:
    """It has a flag where this one counts, and names no app."""
    record = replace(a_record(), takeovers=0, app="")
    store.swap(record, None)
    with administrator(redis_server) as client:
        client.hset(redis_key(record), "takeover", "1")

    assert store.get(record.key) == record
    successor = replace(a_rival(record), takeovers=1)
    assert store.swap(successor, record.revision) == successor == store.get(record.key)
    with administrator(redis_server) as client:
        assert not client.hexists(redis_key(record), "takeover")


# -- clients of one's own, threads and processes


def test_own_client_and_function_are_used_as_they_are(redis_server: EmbeddedRedis, store: RedisStore) -> None:
    """A user's client stays open when the store closes; what a function made is closed."""
    mine = redis.Redis(port=redis_server.port, client_name="mine")
    for given in (mine, lambda: redis.Redis(port=redis_server.port, client_name="made")):
        own = RedisStore(given)
        record = a_record()
        assert own.swap(record, None) == record
        assert store.get(record.key) == record
        own.close()
        own.close()

    with administrator(redis_server) as client:
        wait_until(lambda: "made" not in _names(client), "the connection that the function made stays open")
        assert "mine" in _names(client)
    assert repr(RedisStore(mine)) == "redis://(a client of your own)"
    assert repr(RedisStore(mine, name="the shop's Redis")) == "the shop's Redis"
    mine.close()


def _names(client: Any) -> set[str]:
    return {each["name"] for each in client.client_list()}


def test_own_cluster_client_is_used_as_it_is(redis_cluster: EmbeddedRedisCluster) -> None:
    """A user's cluster client, too."""
    host, port = redis_cluster.address.split(":")
    with RedisCluster(host=host, port=int(port)) as client:
        store = RedisStore(client)
        record = a_record()

        assert store.swap(record, None) == record
        assert store.get(record.key) == record
        assert record in list(store.scan())


def test_client_that_cannot_be_used_is_refused(redis_server: EmbeddedRedis) -> None:
    """A client that decodes, one that must not cross a fork, and what is no client at all, are told at once."""
    single = redis.Redis(port=redis_server.port, single_connection_client=True)
    for client, remedy in (
        (redis.Redis(decode_responses=True), "without decode_responses"),
        (single, "single connection"),
        ("redis://localhost", "neither a redis.Redis"),
    ):
        with pytest.raises(PolicyError, match=f"client=.*{remedy}"):
            RedisStore(client)  # type: ignore[arg-type]
    single.close()
    with pytest.raises(StoreMisconfigured, match="your function .* without decode_responses"):
        RedisStore(lambda: redis.Redis(decode_responses=True)).get("k")


@pytest.mark.parametrize(
    ("option", "value"),
    [("prefix", ""), ("wait_replicas", -1), ("wait_timeout", 0), ("wait_timeout", 61), ("wait_timeout", float("nan"))],
)
def test_unusable_option_is_refused(option: str, value: object) -> None:
    """An option that cannot work is told with its value and what to write instead."""
    with pytest.raises(PolicyError, match=f"^{option}="):
        RedisStore(redis.Redis(), **{option: value})  # type: ignore[arg-type]


def test_inherited_client_is_left_alone_by_a_child(store: RedisStore) -> None:
    """A child makes a client of its own and never touches its parent's, not even to destroy it."""
    store.swap(a_record(), None)
    parents = store._connected()
    read, write = os.pipe()
    pid = _fork()
    if pid == 0:
        mine = store._connected()
        record = a_record()
        won = store.swap(record, None) == record
        kept = parents in store._connected._values.values()
        os.write(write, f"{mine is not parents} {won} {kept}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as answers:
        os.close(write)
        assert answers.read() == b"True True True"
    assert store._connected() is parents


def test_own_client_works_on_both_sides_of_a_fork(
    redis_server: EmbeddedRedis, redis_cluster: EmbeddedRedisCluster
) -> None:
    """redis-py's pools notice a fork, so a client object may be given; replies are never mixed up."""
    host, port = redis_cluster.address.split(":")
    clients: list[redis.Redis | RedisCluster] = [
        redis.Redis(port=redis_server.port),
        RedisCluster(host=host, port=int(port)),
    ]
    for client in clients:
        store = RedisStore(client)
        store.swap(a_record(), None)
        pid = _fork()
        records = [a_record() for _ in range(100)]
        mixed_up = sum(store.swap(each, None) != each or store.get(each.key) != each for each in records)
        if pid == 0:
            os._exit(mixed_up)
        assert mixed_up == 0
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.close()


def _fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads: this is the point
        return os.fork()


def test_store_can_be_verified(store: RedisStore) -> None:
    """A worker finds the check."""
    assert isinstance(store, VerifiableStore)


def test_connections_have_a_name_in_the_list_of_the_server(redis_server: EmbeddedRedis) -> None:
    """By which an operator tells them from the broker's; another or none by the URL."""
    with redis.Redis(port=redis_server.port) as looking:
        for option, name in (("", "celery-idempotent"), ("?client_name=shop-7", "shop-7"), ("?client_name=", "")):
            before = {each["id"] for each in looking.client_list()}
            store = RedisStore.from_url(f"redis://127.0.0.1:{redis_server.port}/0{option}")
            store.now()
            assert name in {each["name"] for each in looking.client_list() if each["id"] not in before}
            store.close()
