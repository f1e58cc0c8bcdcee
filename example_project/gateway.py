"""A payment provider as they are in real life: it honours an idempotency key, if it gets one.

Its books are a file guarded by a lock that the kernel releases when a caller is killed, so a charge is either
in the books as a whole or not at all, and remembered for the next caller: as good as a provider elsewhere.
"""

from __future__ import annotations

import uuid

from example_project.ledger import Ledger, Row


class Gateway:
    """Charges cards and remembers the keys it has seen in `books`."""

    def __init__(self, books: Ledger) -> None:
        self._books = books

    def charge(self, order: str, *, idempotency_key: str | None = None, attempt: int = 0, token: int = 0) -> str:
        """Charge the card for `order`; the number of the charge.

        A second call with the same key moves no money and returns the first charge. Without a key every call
        is a new charge.
        """
        if idempotency_key is None:
            return self._book(order, "", attempt, token)
        with self._books.locked():
            return self._find(idempotency_key) or self._book(order, idempotency_key, attempt, token)

    def _find(self, key: str) -> str | None:
        return next((row.reference for row in self._books.rows() if row.key == key), None)

    def _book(self, order: str, key: str, attempt: int, token: int) -> str:
        reference = f"ch_{uuid.uuid4().hex[:12]}"
        self._books.append(
            Row(
                what="effect",
                task="charge_card",
                order=order,
                attempt=attempt,
                token=token,
                reference=reference,
                key=key,
            )
        )
        return reference
