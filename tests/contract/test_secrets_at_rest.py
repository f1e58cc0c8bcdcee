"""What is really in a store, byte by byte, when results are encrypted: in SQLite's files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import update

from celery_idempotent import OutcomeUnknown, Policy, Store, current_attempt, outbox, resolve
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql import SQLStore
from tests.support import deliveries
from tests.support.commands import run
from tests.support.sql_databases import Database

KEY = Fernet.generate_key()
SECRETS = {each: f"{each}-4711" for each in ("result", "step", "label", "failure", "reason", "verdict", "argument")}


class Declined(Exception):
    """The failure that is an outcome."""


Kept = tuple[Store, Callable[[], bytes]]
"""A store, and all bytes that it holds."""


@pytest.fixture
def in_files(sqlite: Database, tmp_path: Path) -> Iterator[Kept]:
    with sqlite.store() as store:
        yield store, lambda: b"".join(each.read_bytes() for each in tmp_path.glob("records.sqlite*"))


class Shop(deliveries.Shop):
    """A task on a store: each of its orders ends another way, and each way says a secret."""

    def __init__(self, store: Store, *keys: bytes) -> None:
        settings = {"idempotency_store": store, "idempotency_cipher": [*keys] or None}
        super().__init__(Policy("order_id", label="cents", remember=(Declined,)), **settings)
        self.does = self._charge

    def _charge(self, order: str, label: str) -> object:
        current_attempt().step("pay", lambda step: SECRETS["step"])
        match order.partition(" ")[0]:
            case "failed":
                raise Declined(SECRETS["failure"])
            case "released":
                raise KeyError
            case "unknown" | "judged":
                raise OutcomeUnknown(current_attempt().key, SECRETS["reason"])
        return {"receipt": SECRETS["result"]}

    def every_end(self, run: str) -> None:
        """Orders of this ``run``: completed, failed, released, in doubt, and judged."""
        for each in ("completed", "failed", "released", "unknown", "judged"):
            self.deliver(f"{each} {run}", SECRETS["label"])
        judged = self.charge.idempotency_key_for(f"judged {run}", SECRETS["label"])
        resolve(judged, completed={"receipt": SECRETS["verdict"]}, by="ann", reason="T-1", app=self.app)


def _in(raw: bytes) -> set[str]:
    return {name for name, secret in SECRETS.items() if secret.encode() in raw}


def test_no_secret_is_in_the_store_and_who_has_the_key_finds_all(in_files: Kept) -> None:
    """Neither result, step, label, exception nor verdict; the same look finds them all where nothing is encrypted."""
    store, raw = in_files
    shop = Shop(store, KEY)
    shop.every_end("1")
    assert b"encrypted" in raw()
    assert _in(raw()) == set()

    later, keyless = Shop(open_store(store), Fernet.generate_key(), KEY), Shop(store)
    for order, secret in (("completed 1", "result"), ("judged 1", "verdict")):
        assert keyless.deliver(order, SECRETS["label"]).state == "RETRY"
        assert later.deliver(order, SECRETS["label"]).value == {"receipt": SECRETS[secret]}
    listed = json.loads(run(shop.app, "list", "--label", SECRETS["label"], "--json").stdout)
    assert [each["label"] for each in listed] == [SECRETS["label"]] * 5

    keyless.every_end("2")
    assert _in(raw()) == SECRETS.keys() - {"argument"}


def test_message_in_the_outbox_is_encrypted(in_files: Kept) -> None:
    """Its arguments are no less secret; a relay with the key publishes it, one without keeps it and says why."""
    store, raw = in_files
    assert isinstance(store, SQLStore)
    shop, keyless = Shop(store, KEY), Shop(store)
    sending = store.begin()
    outbox.send(sending.connection, shop.charge, SECRETS["argument"], "label")
    sending.commit()
    assert _in(raw()) == set()

    assert outbox.relay(keyless.app) == 0
    (waiting,) = store.waiting(10)
    assert "decrypting the message of" in str(waiting.reason)
    waking = store.begin()
    waking.connection.execute(update(store.outbox).values(taken_until=0))
    waking.commit()
    assert outbox.relay(shop.app) == 1
    (message,) = shop.published()
    assert SECRETS["argument"] in str(message.body)
