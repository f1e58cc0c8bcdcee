"""What stands in a store and cannot be what was written: it is refused by name, and hides no other record."""
# mypy: allow-untyped-decorators

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import boto3
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from celery_idempotent import IdempotentTask, Policy, Record, Status, current_attempt
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.protocol.record import SCHEMA
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb.items import ATTRIBUTES
from celery_idempotent.stores.dynamodb.store import DynamoDBStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.sql.statements import UnreadableRow
from celery_idempotent.testing.contract import a_completion, a_record, a_rival
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis
from tests.support.deliveries import an_app, deliver
from tests.support.redis_servers import administrator
from tests.support.sql_databases import Database

DEEP = "[" * 100_000
TEXTS = ("status", "revision", "owner", "fingerprint", "task", "task_id", "worker", "error", "content_type")
NUMBERS = ("fencing_token", "lease_until", "attempts", "created_at", "updated_at", "expires_at", "schema")
OPTIONAL = {each.name for each in fields(Record) if each.default is None or each.name in {"fingerprint", "steps"}}


@dataclass(frozen=True)
class Place:
    """A store, and a way to spoil what stands in it."""

    store: Store
    #: Takes a key, a field of the record, and the damage.
    spoil: Callable[[str, str, Any], None]


def _a_completed_record() -> Record:
    claimed = replace(a_record(), error="none", steps={"charge": {"lost": "x"}})
    return replace(a_completion(claimed), error="none", steps={"charge": {"lost": "x"}})


def _is_refused_and_passed_over(place: Place, field: str, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    record, other = _a_completed_record(), a_record()
    for each in (record, other):
        place.store.swap(each, None)
    place.spoil(record.key, field, damage)

    asking: tuple[Callable[[], object], ...] = (
        lambda: place.store.get(record.key),
        lambda: place.store.swap(a_rival(record), None),
        lambda: place.store.swap(a_rival(record), "another revision"),
    )
    for ask in asking:
        with pytest.raises(StoreMisconfigured) as raised:
            ask()
        assert len(str(raised.value)) < 1000
    with caplog.at_level(logging.WARNING):
        found = {each.key for each in place.store.scan()}
    assert other.key in found
    assert record.key not in found
    (line,) = [each for each in caplog.messages if record.key in each]
    assert line.startswith("event=idempotency.record_unreadable key=")
    assert " reason=" in line
    assert place.store.get(other.key) == other


# -- Redis


@pytest.fixture
def on_redis(redis_server: EmbeddedRedis) -> Iterator[Place]:
    prefix = f"{uuid4().hex}:"
    store = RedisStore.from_url(f"{redis_server.url.removesuffix('?')}?prefix={prefix}")

    def spoil(key: str, field: str, damage: Any) -> None:
        with administrator(redis_server) as client:
            if field in {"string", "list", "set", "zset"}:
                client.delete(prefix + key)
                commands = {"string": ["SET"], "list": ["RPUSH"], "set": ["SADD"], "zset": ["ZADD"]}[field]
                client.execute_command(*commands, prefix + key, *damage)
            elif damage is None:
                client.hdel(prefix + key, field)
            else:
                client.hset(prefix + key, field, damage)

    yield Place(store, spoil)
    store.close()


@pytest.mark.parametrize(
    ("field", "damage"),
    [
        *((name, None) for name in (*TEXTS, *NUMBERS) if name not in OPTIONAL),
        *((name, b"\xff") for name in TEXTS),
        *(
            (name, damage)
            for name in NUMBERS
            for damage in ("", "many", "-1", "1.5", " 1", "1_0", "9" * 30, "9" * 9999)
        ),
        *(("steps", damage) for damage in ("[]", "{", "1", "null", DEEP, b"\xff")),
        ("status", "DONE"),
        ("status", Status.IN_PROGRESS),  # where there is an expiry: it would count as forgotten
        ("revision", ""),
        ("schema", SCHEMA + 1),
        ("string", ["x"]),
        ("list", ["x"]),
        ("set", ["x"]),
        ("zset", ["1", "x"]),
    ],
)
def test_damage_in_redis(on_redis: Place, field: str, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A field that is missing, or of another form, and a key that is no hash."""
    _is_refused_and_passed_over(on_redis, field, damage, caplog)


def test_key_in_redis_that_is_no_text_is_passed_over(
    on_redis: Place, redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's key is binary, and begins with our prefix by chance."""
    record = a_record()
    on_redis.store.swap(record, None)
    prefix = vars(on_redis.store)["_prefix"]
    with administrator(redis_server) as client:
        client.hset(prefix.encode() + b"\xff\n", mapping={"name": "Ada"})

    assert list(on_redis.store.scan()) == [record]
    assert rf"key={prefix}\xff\n " in caplog.text


# -- DynamoDB


@pytest.fixture(scope="module")
def table(dynamodb_endpoint: str) -> Iterator[Any]:
    session = boto3.session.Session("test", "test", region_name="us-east-1")
    store = DynamoDBStore(f"t-{uuid4().hex}", endpoint_url=dynamodb_endpoint, session=session, region="us-east-1")
    store.provision()
    yield store
    store.close()


@pytest.fixture
def on_dynamodb(table: DynamoDBStore) -> Place:
    def spoil(key: str, field: str, damage: Any) -> None:
        client = table._connected()
        item: Any = client.get_item(TableName=table.table, Key={"idempotencyKey": {"S": key}})["Item"]
        attribute = {**ATTRIBUTES, "expires_at": "expiryTimestamp"}[field]
        spoilt = {**item, attribute: damage}
        client.put_item(TableName=table.table, Item={name: each for name, each in spoilt.items() if each})

    return Place(table, spoil)


@pytest.mark.parametrize(
    ("field", "damage"),
    [
        *((name, None) for name in (*TEXTS, *NUMBERS) if name not in OPTIONAL),
        *((name, {"N": "1"}) for name in (*TEXTS, "steps", "result")),
        *((name, {"NULL": True}) for name in (*TEXTS, *NUMBERS, "steps", "result")),
        *((name, {"BOOL": True}) for name in NUMBERS),
        *((name, {"S": "1"}) for name in NUMBERS),
        *((name, {"N": damage}) for name in NUMBERS for damage in ("1.5", "-1", "9" * 38)),
        *((name, {"B": b"\xff"}) for name in (*TEXTS, *NUMBERS, "steps")),
        *((name, {"L": [{"S": "x"}]}) for name in ("steps", "result", "task")),
        *((name, {"M": {"x": {"S": "x"}}}) for name in ("steps", "result", "task")),
        *((name, {"SS": ["x"]}) for name in ("steps", "result", "task")),
        *(("steps", {"S": damage}) for damage in ("[]", "{", "1", "null", DEEP)),
        ("status", {"S": "DONE"}),
        ("status", {"S": "IN_PROGRESS"}),
        ("schema", {"N": str(SCHEMA + 1)}),
    ],
)
def test_damage_in_dynamodb(on_dynamodb: Place, field: str, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An attribute that is missing, or of another type."""
    _is_refused_and_passed_over(on_dynamodb, field, damage, caplog)


# -- SQL


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/records.sqlite")
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
    return Database(server.url, server)


@pytest.fixture
def on_sql(database: Database) -> Iterator[Place]:
    with database.store() as store:
        name = store.table.name
        if database.dialect == "postgresql":
            database.do(
                *(
                    f"ALTER TABLE {name} ALTER COLUMN {each.name} DROP NOT NULL"
                    for each in store.table.c
                    if not each.primary_key
                )
            )
        elif database.dialect == "sqlite":
            # SQLite keeps whatever it is given in whatever column, and what it once was told cannot be null.
            with database.administrator() as connection:
                (ddl,) = connection.execute(text(f"SELECT sql FROM sqlite_master WHERE name = '{name}'")).scalars()
            database.do(f"DROP TABLE {name}", ddl.replace(" NOT NULL", ""))

        def spoil(key: str, field: str, damage: Any) -> None:
            column = {"schema": "schema_version", "result": "result_text"}.get(field, field)
            with database.administrator() as connection:
                connection.execute(
                    text(f"UPDATE {name} SET {column} = {damage} WHERE idempotency_key = :key"),
                    {"key": key.encode() if database.dialect in {"mysql", "mariadb"} else key},
                )

        yield Place(store, spoil)


EVERYWHERE: list[tuple[str, str]] = [
    *((name, "-1") for name in NUMBERS),
    *(("steps", damage) for damage in ("'[]'", "'{'", "'1'", "'null'", f"'{DEEP}'")),
    ("status", "'DONE'"),
    ("status", "'IN_PROGRESS'"),
    ("revision", "''"),
    ("schema", str(SCHEMA + 1)),
    ("fencing_token", str(2**63 - 1)),
]
ON_SQLITE: list[tuple[str, str]] = [
    *((name, damage) for name in NUMBERS for damage in ("'many'", "1.5", "x'ff'")),
    *((name, "x'ff'") for name in (*TEXTS, "steps")),
    *((name, "CAST(x'ff' AS TEXT)") for name in (*TEXTS, "steps")),
]
NULLS = [(name, "NULL") for name in (*TEXTS, *NUMBERS, "steps") if name not in OPTIONAL or name == "steps"]


@pytest.mark.parametrize(
    ("database", "field", "damage"),
    [
        *(("postgres", *each) for each in (*EVERYWHERE, *NULLS)),
        *(("mariadb", *each) for each in EVERYWHERE),
        *(("sqlite", *each) for each in (*EVERYWHERE, *NULLS, *ON_SQLITE)),
    ],
    indirect=["database"],
)
def test_damage_in_sql(on_sql: Place, field: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A column that is null, or holds what it never held; also what not even the driver can decode."""
    _is_refused_and_passed_over(on_sql, field, damage, caplog)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("page", [1, 2, 200])
def test_keys_on_sqlite_that_are_no_text_are_passed_over(
    on_sql: Place, page: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no UTF-8, and bytes, which SQLite keeps in whatever column: at the end of a page, too."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGE", page)
    records = [replace(a_record(), key=key, task="t") for key in ("a", "b", "c", "d", "e")]
    for each in records:
        on_sql.store.swap(each, None)
    on_sql.spoil("b", "idempotency_key", "CAST(x'62ff' AS TEXT)")
    on_sql.spoil("c", "idempotency_key", "x'63ff'")
    on_sql.spoil("e", "idempotency_key", "CAST(x'65ff' AS TEXT)")

    assert list(on_sql.store.scan(task="t")) == [records[0], records[3]]

    told = [each.getMessage() for each in caplog.records if "idempotency.record_unreadable" in each.getMessage()]
    assert [next(key for key in ("b", "c", "e") if rf"key={key}\xff" in each) for each in told] == ["b", "e", "c"]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_key_on_mysql_that_is_no_text_is_passed_over(on_sql: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are bytes there, so they can be any."""
    record, other = a_record(), a_record()
    for each in (record, other):
        on_sql.store.swap(each, None)
    on_sql.spoil(record.key, "idempotency_key", "x'ff0a'")

    assert list(on_sql.store.scan()) == [other]
    assert r"key=\xff\n " in caplog.text


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_error_over_text_that_is_none_does_not_quote_it(on_sql: Place) -> None:
    """Python's error quotes all of the text, which can be somebody's result."""
    record = _a_completed_record()
    on_sql.store.swap(record, None)
    on_sql.spoil(record.key, "result", "CAST(x'ff' || 'secret' AS TEXT)")

    with pytest.raises(UnreadableRow, match="a row is damaged: .*result_text") as raised:
        on_sql.store.get(record.key)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_row_that_cannot_be_fetched_hides_none_of_several_pages(on_sql: Place) -> None:
    """The page that it stands on is read row by row, and the filter holds there, too."""
    records = [a_record() for _ in range(450)]
    for each in records:
        on_sql.store.swap(each, None)
    for each in records[:3]:
        on_sql.spoil(each.key, "worker", "CAST(x'ff' AS TEXT)")
    changed = replace(records[3], status=Status.UNKNOWN, revision="2")
    on_sql.store.swap(changed, records[3].revision)

    assert {each.key for each in on_sql.store.scan()} == {each.key for each in records[3:]}
    assert list(on_sql.store.scan(status=Status.UNKNOWN)) == [changed]
    assert len(list(on_sql.store.scan(status=Status.IN_PROGRESS))) == 446


# -- who reads


@pytest.mark.parametrize("policy", [Policy(on_outage="run"), Policy(on_outage="run", on_takeover="refuse")])
def test_unreadable_record_is_no_outage(policy: Policy, on_redis: Place) -> None:
    """It may say COMPLETED: under ``on_outage="run"`` the body does not run again, and the delivery is postponed."""
    app = an_app()
    app.conf.idempotency_store = on_redis.store
    runs: list[int] = []

    @app.task(base=IdempotentTask, shared=False, idempotent=policy)
    def charge() -> None:
        runs.append(1)

    deliver(charge)
    for field, damage in (("schema", SCHEMA + 1), ("steps", "{")):
        on_redis.spoil(charge.idempotency_key_for(), field, damage)
        assert deliver(charge).state == "RETRY"

    assert runs == [1]


def test_observing_runs_the_body_over_an_unreadable_record(on_redis: Place) -> None:
    """``mode="observe"`` never changes what a task does."""
    app = an_app()
    app.conf.idempotency_store = on_redis.store
    runs: list[int] = []

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(mode="observe"))
    def charge() -> None:
        runs.append(1)

    deliver(charge)
    on_redis.spoil(charge.idempotency_key_for(), "schema", SCHEMA + 1)

    assert deliver(charge).state == "SUCCESS"
    assert runs == [1, 1]


@pytest.mark.parametrize("damage", [{"charge": "x"}, {"charge": {}}, {"charge": {"base64": "?", "content_type": "t"}}])
def test_damaged_step_is_not_made_again(damage: Any, on_redis: Place) -> None:
    """Of a step whose state cannot be read nobody knows whether it had its effect; the delivery is postponed."""
    app = an_app()
    app.conf.idempotency_store = on_redis.store
    calls: list[int] = []

    @app.task(base=IdempotentTask, shared=False, bind=True, idempotent=Policy())
    def charge(self: Any) -> None:
        current_attempt().step("charge", lambda step: calls.append(1))
        raise LookupError

    deliver(charge)
    on_redis.spoil(charge.idempotency_key_for(), "steps", json.dumps(damage))

    assert deliver(charge).state == "RETRY"
    assert calls == [1]


def test_commands_pass_over_what_they_cannot_read(on_redis: Place, caplog: pytest.LogCaptureFixture) -> None:
    """``list`` and ``purge`` do their work and name it; ``show`` says what is wrong with the one that is asked for."""
    app = an_app()
    app.conf.idempotency_store = on_redis.store
    damaged, good = (replace(a_record(), status=Status.RELEASED, updated_at=1) for _ in range(2))
    for each in (damaged, good):
        on_redis.store.swap(each, None)
    on_redis.spoil(damaged.key, "status", "DONE")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))

    listed = run("list")
    assert (listed.exit_code, good.key in listed.stdout, damaged.key in listed.stdout) == (0, True, False)
    shown = run("show", damaged.key)
    assert (shown.exit_code, "is damaged: ValueError: 'DONE'" in shown.output) == (1, True)
    assert "1 released records deleted" in run("purge", "--released-before", "1").stdout
    assert [each.partition(" key=")[0] for each in caplog.messages] == ["event=idempotency.record_unreadable"] * 2


def test_numbers_that_are_no_times_are_shown_as_they_are(on_redis: Place) -> None:
    """A record that can be read is shown, its times however far."""
    app = an_app()
    app.conf.idempotency_store = on_redis.store
    record = replace(a_record(), lease_until=2**62, created_at=2**62, updated_at=2**62)
    outcome = replace(record, status=Status.COMPLETED, expires_at=2**62, key=f"{record.key}-")
    for each in (record, outcome):
        # Not by a swap: the server would not take such an expiry.
        on_redis.store.swap(replace(each, expires_at=None), None)
    on_redis.spoil(outcome.key, "expires_at", 2**62)

    for arguments in (("list",), ("show", outcome.key)):
        result = CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))
        assert result.exit_code == 0
        assert str(2**62) in result.stdout
