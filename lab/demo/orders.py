"""The load: orders, the three messages each one sends, and which of them are sent twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

DUPLICATED = 3  # every third order is published twice, as by a double click or a webhook sent again


@dataclass(frozen=True, slots=True)
class Order:
    """What a customer bought. `id` names the intent: publishing it again does not mean a second purchase."""

    id: str
    sku: str
    quantity: int
    cents: int
    email: str

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tasks this order needs, as (task, keyword arguments)."""
        yield "charge_card", {"order": asdict(self)}
        yield "reserve_stock", {"order_id": self.id, "sku": self.sku, "quantity": self.quantity}
        yield "send_receipt", {"order_id": self.id, "email": self.email}


def make(count: int) -> list[Order]:
    """`count` orders, numbered from 0; the same each time."""
    return [
        Order(
            id=f"order-{number:04}",
            sku=f"sku-{number % 7}",
            quantity=1 + number % 3,
            cents=100 + 7 * number,
            email=f"buyer{number}@example.com",
        )
        for number in range(count)
    ]


def number_of(order_id: str) -> int:
    """The position of an order in the load."""
    return int(order_id.rpartition("-")[2])


def with_duplicates(orders: Sequence[Order]) -> list[Order]:
    """The orders, every third one twice, in an arbitrary but repeatable sequence."""
    published = [*orders, *orders[::DUPLICATED]]
    random.Random(42).shuffle(published)
    return published
