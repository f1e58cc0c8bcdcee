"""The contract on Redis, alone and in company, and what only this store adds: its hashes, requests, lists, clients."""
# mypy: allow-untyped-decorators

import os
import socket
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
import redis
from redis.cluster import RedisCluster

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.stores.redis import RedisStore, hashes
from celery_idempotent.stores.redis.client import read_url
from celery_idempotent.testing import OutageContract, StoreContract
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster, EmbeddedSentinel
from lab.embedded.redis import GROUP
from tests.support.redis_servers import HOST, administrator, opened, redis_key, replica_of
from tests.support.stores import kept
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

LATER = 4_000_000_000
SENTINEL = f"sentinel://{HOST}:{{server.port}}/0?master_name={GROUP}&wait_replicas=1"


@pytest.fixture(scope="module")
def primary() -> Iterator[EmbeddedRedis]:
    """A server with a replica."""
    with EmbeddedRedis() as primary, replica_of(primary):
        yield primary


@pytest.fixture(scope="module")
def sentinel(primary: EmbeddedRedis) -> Iterator[EmbeddedSentinel]:
    """A sentinel that knows it."""
    with EmbeddedSentinel(primary) as sentinel:
        yield sentinel


class TestRedisStore(StoreContract):
    """The whole contract on one server, a cluster, one whose replica must have each record, and behind a sentinel."""

    @pytest.fixture(
        params=[
            ("redis_server", "{server.url}"),
            ("redis_cluster", "redis+cluster://{server.address}"),
            pytest.param(("primary", "{server.url}?wait_replicas=1"), marks=pytest.mark.nightly),
            pytest.param(("sentinel", SENTINEL), marks=pytest.mark.nightly),
        ],
        ids=["server", "cluster", "replica", "sentinel"],
    )
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        fixture, form = request.param
        self.url = form.format(server=request.getfixturevalue(fixture))
        with opened(self.url) as store:
            yield store

    def reopen(self, store: Store) -> Store:
        return RedisStore.from_url(self.url)


AWAY = (
    *("redis://127.0.0.1:1", "unix:///no/such.sock", "redis://127.0.0.1:{port}?socket_timeout=0.1"),
    *("redis+cluster://127.0.0.1:1;127.0.0.1:2", "sentinel://127.0.0.1:1;127.0.0.1:2?master_name=m"),
)


class TestRedisAway(OutageContract):
    """Nobody listens, or a server has taken its socket away, which is no wrong path; or one never answers."""

    answers_within = 10.0

    @pytest.fixture(params=AWAY)
    def unreachable_store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with (
            socket.create_server((HOST, 0)) as silent,
            opened(request.param.format(port=silent.getsockname()[1])) as store,
        ):
            yield store


@pytest.fixture
def store(redis_server: EmbeddedRedis) -> Iterator[RedisStore]:
    with opened(redis_server.url) as store:
        yield store


@pytest.fixture
def proxy(redis_server: EmbeddedRedis) -> Iterator[TcpProxy]:
    with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def distant(proxy: TcpProxy) -> Iterator[RedisStore]:
    """The store, its server behind the proxy, connected."""
    with opened(f"redis://{HOST}:{proxy.port}/0") as store:
        store.swap(a_record(), None)
        yield store


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Any]:
    with administrator(redis_server) as client:
        yield client


def test_record_is_one_hash_with_the_documented_fields(store: RedisStore, client: Any) -> None:
    """Field names and forms are an interface: people, scripts and other versions read them."""
    values: dict[str, Any] = {"takeovers": 2, "steps": {"charge": 1}, "verdict": {"by": "ann"}, "expires_at": LATER}
    values |= {"result": '"x"', "content_type": "application/json", "error": "e", "status": Status.COMPLETED}
    record = a_record().but(**values)
    store.swap(record, None)
    as_text = {name: str(value) for name, value in record.to_fields().items() if name != "key"}

    stored = client.hgetall(redis_key(record))

    assert stored == {**as_text, "status": "COMPLETED", "steps": '{"charge": 1}', "verdict": '{"by": "ann"}'}
    assert (stored["schema"], stored["lease_until"]) == ("1", "1800000060000")
    assert " ".join(sorted(stored)) == (
        "app attempts content_type created_at error expires_at fencing_token fingerprint label lease_until owner "
        "process result revision schema status steps takeovers task task_id trace updated_at verdict worker"
    )
    assert {*stored, "key"} == {each.name for each in fields(Record)}


def test_any_text_of_python_is_kept(store: RedisStore) -> None:
    """Halves of surrogate pairs and NUL, which UTF-8 or C know not, come back as they were."""
    for text in ("\ud83d", "a\x00b"):
        record = replace(a_record(), key=f"{text}{uuid4().hex}", worker=text, error=text, result=text)
        assert store.swap(record, None) == record == store.get(record.key)
        assert record in list(store.scan())


def test_server_forgets_outcomes_and_nothing_else(store: RedisStore, client: Any) -> None:
    """The server's expiry is the record's, to the second, and goes with it; nobody reads it, and it is gone."""
    record = a_record()
    outcome = replace(record, revision="2", status=Status.COMPLETED, expires_at=LATER)
    live = replace(record, revision="3")
    expiries = []
    for new, expected in ((record, None), (outcome, record.revision), (live, "2")):
        assert store.swap(new, expected) == new
        expiries.append(client.execute_command("PEXPIRETIME", redis_key(record)))
    assert expiries == [-1, LATER * 1000, -1]

    store.swap(replace(live, revision="4", status=Status.COMPLETED, expires_at=store.now() // 1000 + 1), "3")
    wait_until(lambda: not client.exists(redis_key(record)), "the server kept an expired outcome")


def test_value_beyond_the_servers_limit_is_refused_before_it_is_sent(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that Redis cannot take is certainly not written."""
    monkeypatch.setattr(hashes, "_STRING_LIMIT", 1_000)
    record = kept(store)
    with pytest.raises(RecordTooLarge, match="of result; .* 512 MB"):
        store.swap(record.but(revision="2", result=bytes(1_001)), record.revision)
    assert store.get(record.key) == record


def test_prefixes_keep_apps_of_one_database_apart(redis_server: EmbeddedRedis) -> None:
    """None sees, lists or deletes what the others have under the same key; special characters are nothing special."""
    base = uuid4().hex
    prefixes = (f"{base}{suffix}" for suffix in ("[12]?*\\:", "1x:", "[12]:"))
    stores = [RedisStore(read_url(redis_server.url).connect, prefix=each) for each in prefixes]
    records = [replace(a_record(), key="one key") for _ in stores]
    for store, record in zip(stores, records, strict=True):
        assert store.swap(record, None) == record

    assert [list(store.scan()) for store in stores] == [[record] for record in records]
    assert stores[0].delete("one key", records[0].revision) is True
    assert [store.get("one key") for store in stores] == [None, *records[1:]]
    for store in stores:
        store.close()


def test_hash_of_another_program_is_left_alone(store: RedisStore, client: Any) -> None:
    """Under our key by chance, it is no record: the error says so, and it stays as it is."""
    record = a_record()
    client.hset(redis_key(record), mapping={"name": "Ada"})
    with pytest.raises(StoreMisconfigured, match="no record"):
        store.swap(record, None)
    assert client.hgetall(redis_key(record)) == {"name": "Ada"}
    client.delete(redis_key(record))


def test_every_swap_is_one_round_trip_and_tells_the_time(proxy: TcpProxy, distant: RedisStore) -> None:
    """Won, lost, resent or in vain: one message there, one back; the clock needs no request of its own."""
    record = a_record()
    before = proxy.round_trips

    distant.swap(record, None)
    distant.swap(record, None)
    distant.swap(a_rival(record), None)
    distant.swap(replace(record, revision="b", expires_at=LATER), record.revision)
    distant.swap(a_record(), "nothing there")
    distant.now()

    assert proxy.round_trips - before == 5


def test_forgotten_script_is_sent_again(store: RedisStore, client: Any) -> None:
    """A server that restarted, or whose scripts were flushed, is given the script with the next swap."""
    record = a_record()
    store.swap(record, None)
    client.script_flush()
    assert store.swap(replace(record, revision="2"), record.revision) == replace(record, revision="2")
    client.script_flush()
    assert store.delete(record.key, "2") is True


def test_lost_request_or_reply_is_healed_by_the_resend(proxy: TcpProxy, distant: RedisStore) -> None:
    """The driver sends twice more, and the swap reports its own revision: written twice, won once."""
    record = a_record()
    second = replace(record, revision="2", lease_until=7)
    third = replace(second, revision=uuid4().hex, status=Status.COMPLETED, expires_at=LATER)
    sent = (
        (proxy.cut_request, record, None),
        (proxy.cut_reply, second, record.revision),
        (proxy.cut_reply, third, "2"),
    )
    for cut, new, expected in sent:
        lost = cut(new.key.encode(), times=2)
        connections = proxy.connections
        assert distant.swap(new, expected) == new
        assert (lost.struck, proxy.connections) == (2, connections + 2)
        assert distant.get(record.key) == new


def test_swap_without_answer_has_an_unknown_outcome(proxy: TcpProxy, distant: RedisStore, store: RedisStore) -> None:
    """It may have been written, and the resend that meets a successor overwrites nothing."""
    record = a_record()
    cut = proxy.cut_reply(record.revision.encode(), times=3)

    with pytest.raises(StoreUnavailable) as raised:
        distant.swap(record, None)

    assert (cut.struck, store.get(record.key)) == (3, record)
    assert isinstance(raised.value.__cause__, redis.ConnectionError)
    theirs = a_rival(record)
    store.swap(theirs, record.revision)
    assert distant.swap(record, None) == theirs


def test_acknowledged_records_survive_a_killed_server() -> None:
    """With the settings that are asked for, kill -9 loses nothing that was acknowledged, and the store finds back."""
    with EmbeddedRedis() as server, opened(server.url) as store, administrator(server) as client:
        claimed, other = kept(store), kept(store)
        outcome = replace(a_completion(claimed), expires_at=LATER)
        store.swap(outcome, claimed.revision)
        server.restart()
        assert [store.get(each.key) for each in (outcome, other)] == [outcome, other]
        expiries = [client.execute_command("PEXPIRETIME", redis_key(each)) for each in (outcome, other)]
        assert expiries == [LATER * 1000, -1]


@pytest.fixture(params=["direct", "own client", "cluster"])
def listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisStore]:
    """A store that is empty, on each way of asking, by pages of a few names."""
    monkeypatch.setattr(hashes, "_PAGE", 5)
    if request.param == "cluster":
        connect: Any = read_url(f"redis+cluster://{request.getfixturevalue('redis_cluster').address}").connect
    else:
        url = request.getfixturevalue("redis_server").url
        connect = read_url(url).connect if request.param == "direct" else lambda: redis.Redis.from_url(url)
    store = RedisStore(connect, prefix=f"{uuid4().hex}:")
    yield store
    store.close()


def test_only_what_is_meant_is_read(listed: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others no field is asked for beyond the one that tells, and of two the rarer first; no label is a label."""
    for _ in range(20):
        kept(listed, label="acme/8")
    plain, labelled = kept(listed, label=""), kept(listed, label="acme/7")
    both, unknown = kept(listed, label="acme/7", task="mail"), kept(listed, status=Status.UNKNOWN, updated_at=1)
    servers, read = hashes.primaries(listed._connected()), Mock(wraps=hashes._read)
    monkeypatch.setattr(hashes, "_read", read)
    wanted: Any
    for wanted, meant, fields_of_24 in (
        ({"label": ""}, [plain], 24),
        ({"label": "acme/7"}, [labelled, both], 24),
        ({"label": "acme/7", "task": "mail"}, [both], 24 + 2),
        ({"status": Status.UNKNOWN}, [unknown], 24),
        ({"worker": "nobody"}, [], 24),
        ({"name": both.key}, [both], 2 * 23),
        ({"label_prefix": "acme/7"}, [labelled, both], 24),
        ({"oldest": 1}, [unknown], 24),
        ({"before": 2}, [unknown], 24),
    ):
        for server in servers:
            server.config_resetstat()
        assert {each.key for each in listed.scan(**wanted)} == {each.key for each in meant}
        names = sorted(name for each in read.call_args_list for name in each.args[1])
        assert names == sorted(listed._redis_key(each.key) for each in meant)
        told = [each.info("commandstats").get("cmdstat_hget", {"calls": 0}) for each in servers]
        assert sum(each["calls"] for each in told) == fields_of_24
        read.reset_mock()
    assert len(list(listed.scan())) == 24


def test_what_changes_meanwhile_is_not_listed_as_it_was(listed: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its fields and read whole are two moments: what is listed is what was read, or is gone."""
    judged, gone = (kept(listed, status=Status.UNKNOWN) for _ in range(2))
    whole = hashes._read

    def changed(*arguments: Any) -> Any:
        listed.swap(judged.but(status=Status.RELEASED, revision=uuid4().hex), judged.revision)
        listed.delete(gone.key, gone.revision)
        return whole(*arguments)

    monkeypatch.setattr(hashes, "_read", changed)
    assert list(listed.scan(status=Status.UNKNOWN)) == []


def test_refused_search_is_no_empty_list(listed: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server says in place of a record is told, unless it says that this is none, or has moved."""
    kept(listed)
    monkeypatch.setattr(hashes, "_SEARCH", hashes._SEARCH.replace("HGET", "NONE"))
    with pytest.raises(StoreUnavailable, match="(?i)unknown"):
        list(listed.scan(status=Status.UNKNOWN))


def test_own_client_and_function_are_used_as_they_are(redis_server: EmbeddedRedis, client: Any) -> None:
    """A user's client stays open when the store closes; what a function made is closed."""
    mine = redis.Redis(port=redis_server.port, client_name="mine")
    for given in (mine, lambda: redis.Redis(port=redis_server.port, client_name="made")):
        own = RedisStore(given)
        record = a_record()
        assert own.swap(record, None) == record == own.get(record.key)
        own.close()

    wait_until(lambda: "made" not in {each["name"] for each in client.client_list()}, "the function's client stays")
    assert "mine" in {each["name"] for each in client.client_list()}
    assert repr(RedisStore(mine, name="the shop's Redis")) == "the shop's Redis"
    mine.close()


def test_client_or_option_that_cannot_be_used_is_refused(redis_server: EmbeddedRedis) -> None:
    """A client that decodes, one that must not cross a fork, and what is no client at all, are told at once."""
    with redis.Redis(port=redis_server.port, single_connection_client=True) as single:
        for client, remedy in ((redis.Redis(decode_responses=True), "decode_responses"), (single, "single connection")):
            with pytest.raises(PolicyError, match=f"client=.*{remedy}"):
                RedisStore(client)
    with pytest.raises(StoreMisconfigured, match="your function .* decode_responses"):
        RedisStore(lambda: redis.Redis(decode_responses=True)).get("k")
    for option, *values in (("prefix", ""), ("wait_replicas", -1), ("wait_timeout", 0, 61, float("nan"))):
        for value in values:
            with pytest.raises(PolicyError, match=f"^{option}="):
                RedisStore(redis.Redis(), **{option: value})  # type: ignore[arg-type]


def test_own_client_works_across_a_fork(redis_server: EmbeddedRedis, redis_cluster: EmbeddedRedisCluster) -> None:
    """redis-py's pools notice a fork, so a client object may be given, a cluster's, too; replies are never mixed up."""
    host, port = redis_cluster.address.split(":")
    own: list[redis.Redis | RedisCluster] = [redis.Redis(port=redis_server.port), RedisCluster(host, int(port))]
    for client in own:
        store = RedisStore(client)
        store.swap(a_record(), None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads: this is the point
            pid = os.fork()
        records = [a_record() for _ in range(100)]
        mixed_up = sum(store.swap(each, None) != each or store.get(each.key) != each for each in records)
        if pid == 0:
            os._exit(mixed_up)
        assert (mixed_up, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == (0, 0)
        client.close()
