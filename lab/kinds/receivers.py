"""What the tasks have their effects on, and the fire that they are under.

Each receiver keeps to its own rules and has no other memory; whatever happens twice is there twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import boto3
from sqlalchemy import Engine, create_engine, text

from lab.demo import witness
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row
from lab.embedded import REGION
from lab.kinds.apps import SQL_URL, TABLE_OF_STOCK, settings

ledger = Ledger(settings.folder / "ledger.jsonl")
KILLED = 0.12
"""How likely a process is to be killed right before an effect, and as likely again right after it; once each."""

witness.watch(ledger)

_Point = Literal["before", "after"]


@contextlib.contextmanager
def under_fire(kind: str, order: str) -> Iterator[None]:
    """Die before or after what is in the block, if that is the fate of `order` there."""
    _strike(kind, "before", order)
    yield
    _strike(kind, "after", order)


def _strike(kind: str, point: _Point, order: str) -> None:
    if not settings.faults or random.Random(f"{kind} {point} {order}").random() >= KILLED:
        return
    folder = settings.folder / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / f"{kind}-{point}-{order}").touch(exist_ok=False)
        ledger.append(Row(what="kill", task=kind, point=point, order=order))
        os.kill(os.getpid(), signal.SIGKILL)


class Honouring:
    """An API that honours idempotency keys, if it gets one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._gateway = Gateway(Ledger(settings.folder / f"{kind}.jsonl"))

    def charge(self, order: str, cents: int, idempotency_key: str | None) -> str:
        """Do it, unless it was done under that key; the number of what was done."""
        with under_fire(self._kind, order):
            return self._gateway.charge(order, idempotency_key=idempotency_key)

    def count(self) -> Counter[str]:
        """How often it was done, by order."""
        return Counter(row.order for row in self._gateway.books.rows() if row.what == "effect")


class Index:
    """A search index that refuses entries with a smaller token than it was told of; guarded by a file lock."""

    def __init__(self) -> None:
        self._entries = Ledger(settings.folder / "index.jsonl")

    def raise_fence(self, order: str, token: int) -> None:
        """Refuse smaller tokens from here on."""
        with self._entries.locked():
            self._entries.append(Row(what="fence", order=order, token=token))

    def find(self, order: str) -> str | None:
        """The entry for `order`, if there is one."""
        with self._entries.locked():
            return next((row.order for row in self._entries.rows() if (row.what, row.order) == ("effect", order)), None)

    def add(self, order: str, token: int | None) -> str:
        """Add an entry.

        Raises:
            PermissionError: A larger token has been here.
        """
        with under_fire("publish", order), self._entries.locked():
            fence = max((row.token for row in self._entries.rows() if row.order == order), default=0)
            if token is not None and token < fence:
                raise PermissionError(f"{token} is fenced off by {fence}")
            self._entries.append(Row(what="effect", order=order, token=token or 0))
        return order

    def count(self) -> Counter[str]:
        """How many entries there are, by order."""
        return Counter(row.order for row in self._entries.rows() if row.what == "effect")


class Phone:
    """Sends texts and remembers nothing."""

    def __init__(self) -> None:
        self._sent = Ledger(settings.folder / "phone.jsonl")

    def send(self, order: str) -> str:
        """Send one."""
        with under_fire("notify", order):
            self._sent.append(Row(what="effect", order=order))
        return f"sent for {order}"

    def count(self) -> Counter[str]:
        """How many were sent, by order."""
        return Counter(row.order for row in self._sent.rows())


bank = Honouring("charge")
mailer = Honouring("receipt")
index = Index()
phone = Phone()


def reserve(order: str, units: int) -> None:
    """One more reservation, outside of any transaction."""
    _dynamodb().update_item(
        TableName=TABLE_OF_STOCK,
        Key={"order": {"S": order}},
        UpdateExpression="ADD #reservations :one SET #units = :units",
        ExpressionAttributeNames={"#reservations": "reservations", "#units": "units"},
        ExpressionAttributeValues={":one": {"N": "1"}, ":units": {"N": str(units)}},
    )


def reservations() -> Counter[str]:
    """How often stock was reserved, by order."""
    pages = _dynamodb().get_paginator("scan").paginate(TableName=TABLE_OF_STOCK, ConsistentRead=True)
    items = [item for page in pages for item in page["Items"]]
    return Counter({item["order"]["S"]: int(item["reservations"]["N"]) for item in items})


def book(order: str, cents: int) -> None:
    """One more row in the ledger, in a transaction of its own."""
    with _database().begin() as connection:
        connection.execute(text("INSERT INTO ledger VALUES (:order, :cents)"), {"order": order, "cents": cents})


def booked() -> Counter[str]:
    """How many rows the ledger has, by order."""
    with _database().connect() as connection:
        return Counter(connection.execute(text("SELECT order_id FROM ledger")).scalars())


def prepare() -> None:
    """Make the tables that are the user's own."""
    _dynamodb().create_table(
        TableName=TABLE_OF_STOCK,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "order", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "order", "KeyType": "HASH"}],
    )
    with _database().begin() as connection:
        connection.execute(text("CREATE TABLE ledger (order_id VARCHAR(50), cents INTEGER)"))


def counts() -> dict[str, Counter[str]]:
    """How often each effect happened, by kind and order."""
    return {
        "charge": bank.count(),
        "reserve": reservations(),
        "book": booked(),
        "receipt": mailer.count(),
        "publish": index.count(),
        "notify": phone.count(),
    }


@cache
def _client(pid: int) -> Any:
    address = settings.store_url.partition("@")[2].partition("/")[0]
    return boto3.client(
        "dynamodb",
        endpoint_url=f"http://{address}",
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def _dynamodb() -> Any:
    return _client(os.getpid())


@cache
def _engine(pid: int) -> Engine:
    return create_engine(SQL_URL, connect_args={"timeout": 30} if SQL_URL.startswith("sqlite") else {})


def _database() -> Engine:
    return _engine(os.getpid())
