"""A payment provider as they are in real life: it honours an idempotency key, if it gets one.

Its books are a file guarded by a lock that the kernel releases when a caller is killed, so a charge is either
in the books as a whole or not at all, and remembered for the next caller: as good as a provider elsewhere.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import replace

from lab.demo.ledger import Ledger, Row


class Gateway:
    """Charges cards and remembers the keys it has seen in `books`."""

    def __init__(self, books: Ledger) -> None:
        self.books = books

    def charge(self, order: str, *, idempotency_key: str | None = None, attempt: int = 0, token: int = 0) -> str:
        """Charge the card for `order`; the number of the charge.

        A second call with the same key moves no money and returns the first charge. Without a key every call
        is a new charge.
        """
        row = Row(
            what="effect",
            task="charge_card",
            order=order,
            attempt=attempt,
            token=token,
            reference=f"ch_{uuid.uuid4().hex[:12]}",
            key=idempotency_key or "",
        )
        with self.books.locked() if row.key else contextlib.nullcontext():
            first = self._first(row.key) if row.key else None
            if first:
                row = replace(row, what="recognised", reference=first)
            self.books.append(row)
        return row.reference

    def _first(self, key: str) -> str | None:
        return next((row.reference for row in self.books.rows() if row.key == key), None)
