"""What a list of few among many asks of Redis, and what it owes to records that change or cannot be read."""
# mypy: allow-untyped-decorators

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
import redis
from redis.exceptions import AskError, MovedError

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.redis import RedisStore, hashes
from celery_idempotent.stores.redis.client import read_url
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedRedis, EmbeddedRedisCluster
from tests.support.redis_servers import administrator


@pytest.fixture(params=["direct", "own client", "cluster"])
def store(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    """A store that is empty, on each way of asking."""
    prefix = f"{uuid4().hex}:"
    if request.param == "cluster":
        cluster: EmbeddedRedisCluster = request.getfixturevalue("redis_cluster")
        made = RedisStore(read_url(f"redis+cluster://{cluster.address}").connect, prefix=prefix)
    else:
        server: EmbeddedRedis = request.getfixturevalue("redis_server")
        own = redis.Redis(port=server.port)
        made = RedisStore(read_url(server.url).connect if request.param == "direct" else lambda: own, prefix=prefix)
    yield made
    made.close()


def _kept(store: RedisStore, **values: Any) -> Record:
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record


def _changes_between(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let ``change`` happen after the fields of a page are known, and before its records are read."""
    asked = hashes._ask_fields

    def then_changed(*arguments: Any) -> Any:
        replies = asked(*arguments)
        change()
        return replies

    monkeypatch.setattr(hashes, "_ask_fields", then_changed)


@pytest.mark.parametrize(
    "wanted", [{"status": Status.UNKNOWN}, {"label": "acme/7"}, {"task": "mail"}, {"label": "acme/7", "task": "mail"}]
)
def test_only_what_is_meant_is_read(store: RedisStore, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of records that have another status, task or label, only these fields are asked for."""
    for _ in range(600):
        _kept(store, label="")
    _kept(store, **dict(list(wanted.items())[1:]))
    meant = _kept(store, **wanted)
    read: list[bytes] = []
    whole = hashes._read

    def noted(client: Any, names: Sequence[bytes]) -> Any:
        read.extend(names)
        return whole(client, names)

    monkeypatch.setattr(hashes, "_read", noted)

    assert list(store.scan(**wanted)) == [meant]
    assert read == [store._redis_key(meant.key)]


def test_record_without_a_label_is_found_by_that(store: RedisStore) -> None:
    """An empty label is not stored."""
    _kept(store, label="acme/7")
    plain = _kept(store, label="")

    assert list(store.scan(label="")) == [plain]


def test_what_changes_meanwhile_is_not_listed_as_what_it_was(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by its fields and read whole are two moments: what is listed is what was read."""
    judged, gone = (_kept(store, status=Status.UNKNOWN) for _ in range(2))

    def change() -> None:
        store.swap(judged.but(status=Status.RELEASED, revision=uuid4().hex), judged.revision)
        store.delete(gone.key, gone.revision)

    _changes_between(monkeypatch, change)

    assert list(store.scan(status=Status.UNKNOWN)) == []


def test_what_moves_meanwhile_is_followed(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that no longer has a slot cannot tell whether a record is meant; the cluster's client can."""
    meant = _kept(store, status=Status.UNKNOWN)
    _kept(store)
    for answer in (MovedError("1 127.0.0.1:1"), AskError("1 127.0.0.1:1")):
        monkeypatch.setattr(hashes, "_ask_fields", lambda server, names, fields, answer=answer: [answer] * len(names))
        assert list(store.scan(status=Status.UNKNOWN)) == [meant]


def test_refusal_is_no_empty_list(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error about the server is one of the scan, not of a record."""
    _kept(store, status=Status.UNKNOWN)
    monkeypatch.setattr(hashes, "_ask_fields", lambda *_: [redis.ResponseError("BUSY Redis is busy")])

    with pytest.raises(StoreUnavailable, match="BUSY"):
        list(store.scan(status=Status.UNKNOWN))


@pytest.mark.parametrize(
    ("field", "damage", "is_named"),
    [
        ("status", "DONE", True),
        ("status", None, True),
        ("type", None, True),
        ("attempts", "many", False),
    ],
)
def test_damaged_record_is_named_unless_it_is_certainly_not_meant(
    redis_server: EmbeddedRedis, field: str, damage: str | None, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One without a status that is known could be in doubt; one in progress, its count damaged, certainly is not."""
    store = RedisStore(read_url(redis_server.url).connect, prefix=f"{uuid4().hex}:")
    name = store._redis_key(_kept(store).key)
    with administrator(redis_server) as client:
        if field == "type":
            client.delete(name)
            client.set(name, "x")
        elif damage is None:
            client.hdel(name, field)
        else:
            client.hset(name, field, damage)

    assert list(store.scan(status=Status.UNKNOWN)) == []
    assert ("idempotency.record_unreadable" in caplog.text) is is_named
    caplog.clear()
    assert list(store.scan(status=Status.IN_PROGRESS)) == []
    assert "idempotency.record_unreadable" in caplog.text
    store.close()
