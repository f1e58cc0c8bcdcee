"""What stands in a store and cannot be what was written: it is refused by name, and hides no other record."""
# mypy: allow-untyped-decorators

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from celery_idempotent import IdempotentTask, Policy, Record, Status, current_attempt
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import SCHEMA
from celery_idempotent.stores.dynamodb.items import ATTRIBUTES
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.client import read_url
from celery_idempotent.stores.sql.statements import UnreadableRow
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedRedis
from tests.support.commands import run
from tests.support.deliveries import an_app, deliver
from tests.support.dynamodb import new_url, provisioned
from tests.support.redis_servers import administrator
from tests.support.sql_databases import Database

TEXTS = ("status", "revision", "owner", "fingerprint", "task", "task_id", "worker", "error", "content_type")
NUMBERS = ("fencing_token", "lease_until", "attempts", "created_at", "updated_at", "expires_at", "schema")
OPTIONAL = {each.name for each in fields(Record) if each.default is None or each.name in {"fingerprint", "steps"}}
MUST_BE = [each for each in (*TEXTS, *NUMBERS) if each not in OPTIONAL]
NO_STEPS = ("[]", "{", "null", "[" * 100_000)
UNREADABLE = "event=idempotency.record_unreadable key="


@dataclass(frozen=True)
class Place:
    """A store, and a way to spoil what stands in it: a key, a field of the record, and the damage."""

    store: Any
    spoil: Callable[[str, str, Any], None]


@pytest.fixture
def on_redis(redis_server: EmbeddedRedis) -> Iterator[Place]:
    prefix = f"{uuid4().hex}:"
    with administrator(redis_server) as client:

        def spoil(key: str, field: str, damage: Any) -> None:
            if field == "RPUSH":
                client.delete(prefix + key)
                client.rpush(prefix + key, damage)
            elif damage is None:
                client.hdel(prefix + key, field)
            else:
                client.hset(prefix + key, field, damage)

        store = RedisStore(read_url(redis_server.url).connect, prefix=prefix)
        yield Place(store, spoil)
        store.close()


@pytest.fixture(scope="module")
def on_dynamodb(dynamodb_endpoint: str) -> Iterator[Place]:
    with provisioned(new_url(dynamodb_endpoint)) as store:
        client: Any = store._connected()

        def spoil(key: str, field: str, damage: Any) -> None:
            item = client.get_item(TableName=store.table, Key={"idempotencyKey": {"S": key}})["Item"]
            item[{**ATTRIBUTES, "expires_at": "expiryTimestamp"}[field]] = damage
            client.put_item(TableName=store.table, Item={name: each for name, each in item.items() if each})

        yield Place(store, spoil)


@pytest.fixture
def on_sqlite(sqlite: Database) -> Iterator[Place]:
    """A table without rules of its own: it keeps whatever it is given."""
    with sqlite.store() as store, sqlite.administrator() as connection:
        name = store.table.name
        (ddl,) = connection.execute(text(f"SELECT sql FROM sqlite_master WHERE name = '{name}'")).scalars()
        connection.execute(text(f"DROP TABLE {name}"))
        connection.execute(text(ddl.replace(" NOT NULL", "")))

        def spoil(key: str, field: str, damage: Any) -> None:
            column = {"schema": "schema_version", "result": "result_text"}.get(field, field)
            statement = text(f"UPDATE {name} SET {column} = {damage} WHERE idempotency_key = :key")
            connection.execute(statement, {"key": key})

        yield Place(store, spoil)


DAMAGES: dict[str, list[tuple[str, Any]]] = {
    "redis": [
        *((name, None) for name in MUST_BE),
        *((name, b"\xff") for name in (*TEXTS, "steps")),
        *((name, "many") for name in NUMBERS),
        *(("attempts", damage) for damage in ("", "-1", "1.5", " 1", "1_0", "9" * 30, "9" * 9999)),
        *(("steps", damage) for damage in NO_STEPS),
        *(("status", "DONE"), ("status", "IN_PROGRESS"), ("revision", ""), ("schema", SCHEMA + 1), ("RPUSH", "x")),
    ],
    "dynamodb": [
        *((name, None) for name in MUST_BE),
        *((name, {"N": "1"}) for name in (*TEXTS, "steps", "result")),
        *((name, {"S": "1"}) for name in NUMBERS),
        *(("attempts", damage) for damage in ({"BOOL": True}, {"N": "1.5"}, {"N": "-1"}, {"N": "9" * 38})),
        *((name, damage) for name in ("task", "attempts") for damage in ({"NULL": True}, {"B": b"\xff"})),
        *(("result", damage) for damage in ({"NULL": True}, {"L": [{"S": "x"}]}, {"M": {"x": {"S": "x"}}})),
        *(("steps", {"S": damage}) for damage in NO_STEPS),
        *(("status", {"S": "DONE"}), ("status", {"S": "IN_PROGRESS"}), ("schema", {"N": str(SCHEMA + 1)})),
    ],
    "sqlite": [
        *((name, "NULL") for name in (*MUST_BE, "steps")),
        *((name, "'many'") for name in NUMBERS),
        *(("attempts", damage) for damage in ("-1", "1.5", "x'ff'")),
        *((name, damage) for name in ("task", "steps") for damage in ("x'ff'", "CAST(x'ff' AS TEXT)")),
        *(("steps", f"'{damage}'") for damage in NO_STEPS),
        *(("status", "'DONE'"), ("status", "'IN_PROGRESS'"), ("revision", "''"), ("schema", str(SCHEMA + 1))),
    ],
}
"""A field that is missing or of another form, an expiry of what is in progress, and a key that is no hash."""


@pytest.mark.parametrize(
    ("name", "field", "damage"),
    [(name, *each) for name, all_of_it in DAMAGES.items() for each in all_of_it],
    ids=lambda value: str(value)[:12],
)
def test_damage_is_refused_and_passed_over(
    name: str, field: str, damage: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no reason to act as if there were no record; lists name it, and have all the others."""
    place: Place = request.getfixturevalue(f"on_{name}")
    record, other = a_completion(a_record()).but(error="none", steps={"charge": {"lost": "x"}}), a_record()
    for each in (record, other):
        place.store.swap(each, None)
    place.spoil(record.key, field, damage)

    with pytest.raises(StoreMisconfigured) as raised:
        place.store.get(record.key)
    assert len(str(raised.value)) < 1000
    for expected in (None, "another revision"):
        with pytest.raises(StoreMisconfigured):
            place.store.swap(a_rival(record), expected)
    with caplog.at_level(logging.WARNING):
        found = {each.key for each in place.store.scan()}
    assert (other.key in found, record.key in found) == (True, False)
    (line,) = [each for each in caplog.messages if record.key in each]
    assert (line.startswith(UNREADABLE), " reason=" in line) == (True, True)
    assert place.store.get(other.key) == other


def test_damage_in_what_is_certainly_not_meant_is_not_named(on_redis: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Of one without a status that is known nobody can tell; one in progress is not in doubt, whatever its count."""
    for status, field, damage, is_named in (
        (Status.IN_PROGRESS, "status", None, True),
        (Status.IN_PROGRESS, "attempts", "many", False),
        (Status.UNKNOWN, "attempts", "many", True),
        (Status.IN_PROGRESS, "RPUSH", "x", True),
    ):
        record = a_record().but(status=status)
        on_redis.store.swap(record, None)
        on_redis.spoil(record.key, field, damage)
        caplog.clear()
        assert list(on_redis.store.scan(status=Status.UNKNOWN)) == []
        assert (record.key in caplog.text) is is_named


def test_key_that_is_no_text_is_passed_over(
    on_redis: Place, mysql: Database, redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's key in Redis begins with our prefix by chance; MySQL's keys are bytes, so they can be any."""
    record, prefix = a_record(), on_redis.store._prefix
    on_redis.store.swap(record, None)
    with administrator(redis_server) as client:
        client.hset(prefix.encode() + b"\xff\n", mapping={"name": "Ada"})
    assert list(on_redis.store.scan()) == [record]
    assert rf"key={prefix}\xff\n " in caplog.text

    with mysql.store() as store:
        store.swap(a_record(), None)
        mysql.do(f"UPDATE {store.table.name} SET idempotency_key = x'ff0a'")
        store.swap(record, None)
        assert list(store.scan()) == [record]
    assert r"key=\xff\n " in caplog.text


@pytest.mark.parametrize("page", [2, 200])
def test_keys_on_sqlite_that_are_no_text_are_passed_over(
    on_sqlite: Place, page: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no UTF-8, and bytes, which SQLite keeps in whatever column: at the end of a page, too."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGE", page)
    records = [replace(a_record(), key=key, task="t") for key in "abcde"]
    for each in records:
        on_sqlite.store.swap(each, None)
    for key, damage in (("b", "CAST(x'62ff' AS TEXT)"), ("c", "x'63ff'"), ("e", "CAST(x'65ff' AS TEXT)")):
        on_sqlite.spoil(key, "idempotency_key", damage)

    assert list(on_sqlite.store.scan(task="t")) == [records[0], records[3]]
    told = [each.removeprefix(UNREADABLE) for each in caplog.messages if each.startswith(UNREADABLE)]
    assert [each.partition(r"\xff")[0] for each in told] == ["b", "e", "c"]


def test_error_over_text_that_is_none_does_not_quote_it(on_sqlite: Place) -> None:
    """Python's error quotes all of the text, which can be somebody's result."""
    record = a_completion(a_record())
    on_sqlite.store.swap(record, None)
    on_sqlite.spoil(record.key, "result", "CAST(x'ff' || 'secret' AS TEXT)")

    with pytest.raises(UnreadableRow, match="result_text") as raised:
        on_sqlite.store.get(record.key)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("damage", [{"charge": "x"}, {"charge": {"base64": "?", "content_type": "t"}}])
def test_damaged_step_is_not_made_again(damage: Any, on_redis: Place) -> None:
    """Of a step whose state cannot be read nobody knows whether it had its effect; the delivery is postponed."""
    app, calls = an_app(idempotency_store=on_redis.store), list[int]()

    @app.task(base=IdempotentTask, shared=False, bind=True, idempotent=Policy())
    def charge(self: Any) -> None:
        current_attempt().step("charge", lambda step: calls.append(1))
        raise LookupError

    deliver(charge)
    on_redis.spoil(charge.idempotency_key_for(), "steps", json.dumps(damage))

    assert (deliver(charge).state, calls) == ("RETRY", [1])


def test_commands_pass_over_what_they_cannot_read(on_redis: Place, caplog: pytest.LogCaptureFixture) -> None:
    """``list`` and ``purge`` do their work and name it; ``show`` says what is wrong."""
    app = an_app(idempotency_store=on_redis.store)
    damaged, late, good = (replace(a_record(), status=Status.RELEASED, updated_at=each) for each in (1, 1, 2))
    for each in (damaged, late, good):
        on_redis.store.swap(each, None)
    on_redis.spoil(damaged.key, "status", "DONE")
    on_redis.spoil(late.key, "updated_at", "1e3")

    listed = run(app, "list", "--limit", "1")
    assert (listed.exit_code, good.key in listed.stdout, damaged.key in listed.stdout) == (0, True, False)
    shown = run(app, "show", damaged.key)
    assert (shown.exit_code, "is damaged: ValueError: 'DONE'" in shown.output) == (1, True)
    assert "1 released records deleted" in run(app, "purge", "--released-before", "1").stdout
    named = Counter(each.removeprefix(UNREADABLE).partition(":")[2].split()[0] for each in caplog.messages)
    assert named == {damaged.key: 2, late.key: 2}
