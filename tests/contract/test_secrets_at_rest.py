"""What is really in a store, byte by byte, when results are encrypted: on Redis, on SQL databases and on DynamoDB."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from cryptography.fernet import Fernet
from redis import Redis
from sqlalchemy import update

from celery_idempotent import IdempotentTask, OutcomeUnknown, Policy, Store, current_attempt, outbox, resolve
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql import SQLStore
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis
from tests.support.commands import run
from tests.support.deliveries import an_app, deliver, published
from tests.support.sql_databases import Database

KEY = Fernet.generate_key()
SECRETS = {each: f"{each}-4711" for each in ("result", "step", "label", "failure", "reason", "verdict", "argument")}


class Declined(Exception):
    """The failure that is an outcome."""


Raw = Callable[[], bytes]
"""All bytes that the store holds."""


def _redis(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Raw]]:
    server: EmbeddedRedis = request.getfixturevalue("redis_server")
    client = Redis.from_url(server.url)
    client.flushall()

    def raw() -> bytes:
        return b"".join(repr([each, client.hgetall(each)]).encode() for each in client.scan_iter())

    store = open_store(server.url)
    yield store, raw
    store.close()
    client.close()


def _sql(request: pytest.FixtureRequest, kind: str) -> Iterator[tuple[Store, Raw]]:
    path: Path = request.getfixturevalue("tmp_path") / "records.sqlite"
    server: EmbeddedPostgres | EmbeddedMariaDB | None = None
    if kind != "sqlite":
        server = request.getfixturevalue("postgres" if kind == "postgresql" else "mariadb")
    database = Database(f"sqlite:///{path}" if server is None else server.url, server)
    with database.store() as store:

        def raw() -> bytes:
            if server is None:
                return b"".join(each.read_bytes() for each in path.parent.glob("records.sqlite*"))
            looking = store.begin()
            rows = [
                repr([bytes(each) if isinstance(each, memoryview) else each for each in row])
                for table in (store.table, store.outbox)
                for row in looking.connection.execute(table.select())
            ]
            looking.rollback()
            return "".join(rows).encode()

        yield store, raw


def _dynamodb(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Raw]]:
    endpoint: str = request.getfixturevalue("dynamodb_endpoint")
    client = boto3.Session("test", "test", region_name="us-east-1").client("dynamodb", endpoint_url=endpoint)
    name = f"secrets-{uuid4().hex}"
    store = open_store(f"dynamodb://test:test@{endpoint.removeprefix('http://')}/{name}?region=us-east-1")
    store.provision()

    def raw() -> bytes:
        return repr(client.scan(TableName=name)["Items"]).encode()

    yield store, raw
    store.close()


@pytest.fixture(params=["redis", "sqlite", "postgresql", "mariadb", "dynamodb"])
def kept(request: pytest.FixtureRequest) -> Iterator[tuple[Store, Raw]]:
    """A store, and what it holds."""
    match request.param:
        case "redis":
            yield from _redis(request)
        case "dynamodb":
            yield from _dynamodb(request)
        case kind:
            yield from _sql(request, kind)


class Shop:
    """A task on a store: each of its orders ends another way, and each way says a secret."""

    def __init__(self, store: Store, keys: Any) -> None:
        self.app = an_app(idempotency_store=store, idempotency_cipher=keys)
        policy = Policy("order", label="label", remember=(Declined,))

        @self.app.task(base=IdempotentTask, bind=True, shared=False, name="shop.charge", idempotent=policy)
        def charge(task: Any, order: str, label: str) -> Any:
            current_attempt().step("pay", lambda step: SECRETS["step"])
            match order.partition(" ")[0]:
                case "failed":
                    raise Declined(SECRETS["failure"])
                case "released":
                    raise KeyError
                case "unknown" | "judged":
                    raise OutcomeUnknown(current_attempt().key, SECRETS["reason"])
            return {"receipt": SECRETS["result"]}

        self.charge = charge

    def every_end(self, run: str) -> None:
        """Orders of this ``run``: completed, failed, released, in doubt, and judged."""
        for each in ("completed", "failed", "released", "unknown", "judged"):
            deliver(self.charge, f"{each} {run}", SECRETS["label"])
        judged = self.charge.idempotency_key_for(f"judged {run}", SECRETS["label"])
        resolve(judged, completed={"receipt": SECRETS["verdict"]}, by="ann", reason="T-1", app=self.app)


def _in(raw: bytes) -> set[str]:
    return {name for name, secret in SECRETS.items() if secret.encode() in raw}


def test_no_secret_is_in_the_store(kept: tuple[Store, Raw]) -> None:
    """Neither result, step, label, exception nor verdict; the same look finds them all where nothing is encrypted."""
    store, raw = kept
    encrypted, clear = Shop(store, KEY), Shop(store, None)

    encrypted.every_end("1")
    assert b"encrypted" in raw()
    assert _in(raw()) == set()

    clear.every_end("2")
    assert _in(raw()) == SECRETS.keys() - {"argument"}


def test_encrypted_outcomes_are_replayed(kept: tuple[Store, Raw]) -> None:
    """By another worker with the key, from what the store really gave back; and none of them by one without."""
    store, _ = kept
    Shop(store, KEY).every_end("1")
    later, keyless = Shop(open_store(store), [Fernet.generate_key(), KEY]), Shop(store, None)

    for order, value in (("completed", {"receipt": SECRETS["result"]}), ("judged", {"receipt": SECRETS["verdict"]})):
        assert deliver(keyless.charge, f"{order} 1", SECRETS["label"]).state == "RETRY"
        assert deliver(later.charge, f"{order} 1", SECRETS["label"]).value == value
    failed = deliver(later.charge, "failed 1", SECRETS["label"])
    assert (type(failed.value), str(failed.value)) == (Declined, SECRETS["failure"])


def test_records_are_found_by_their_labels(kept: tuple[Store, Raw]) -> None:
    """No index can: each label is another ciphertext."""
    store, _ = kept
    shop = Shop(store, KEY)
    shop.every_end("1")

    listed = json.loads(run(shop.app, "list", "--label", SECRETS["label"], "--json").output)

    assert len(listed) == 5
    assert {each["label"] for each in listed} == {SECRETS["label"]}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", "mariadb"])
def test_message_in_the_outbox_is_encrypted(request: pytest.FixtureRequest, kind: str) -> None:
    """Its arguments are no less secret; a relay with the key publishes it, one without keeps it and says why."""
    for store, raw in _sql(request, kind):
        assert isinstance(store, SQLStore)
        shop, keyless = Shop(store, KEY), Shop(store, None)
        sending = store.begin()
        outbox.send(sending.connection, shop.charge, SECRETS["argument"], "label")
        sending.commit()
        assert _in(raw()) == set()

        assert outbox.relay(keyless.app) == 0
        (waiting,) = store.waiting(10)
        assert waiting.reason is not None
        assert "decrypting the message of" in waiting.reason
        waking = store.begin()
        waking.connection.execute(update(store.outbox).values(taken_until=0))
        waking.commit()
        assert outbox.relay(shop.app) == 1
        (message,) = published(shop.app)
        assert SECRETS["argument"] in str(message.body)
