"""A payment provider as they are in real life: it honours an idempotency key, if it gets one.

Its books are a file guarded by a lock that the kernel releases when a caller is killed, so a charge is either
in the books as a whole or not at all, and remembered for the next caller: as good as a provider elsewhere.
"""

import uuid
from dataclasses import replace
from typing import Any

from lab.ledger import Ledger, Row


class Gateway:
    """Charges cards and remembers the keys it has seen in `books`."""

    def __init__(self, books: Ledger) -> None:
        self.books = books

    def charge(self, order: str, *, idempotency_key: str | None = None, **more: Any) -> str:
        """Charge the card for `order`; the number of the charge. The books get what ``more`` there is to know.

        A second call with the same key moves no money and returns the first charge. Without a key every call
        is a new charge.
        """
        number, key = f"ch_{uuid.uuid4().hex[:12]}", idempotency_key or ""
        row = Row(what="effect", task="charge_card", order=order, reference=number, key=key, **more)
        with self.books.locked():
            first = key and next((each.reference for each in self.books.rows() if each.key == key), None)
            if first:
                row = replace(row, what="recognised", reference=first)
            self.books.append(row)
        return row.reference
