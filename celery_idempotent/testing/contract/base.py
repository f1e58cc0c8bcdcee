"""What the parts of the store contract know of the store that they test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from celery_idempotent.protocol.store import Store


class StoreTests:
    """What an author tells about the store; :class:`~celery_idempotent.testing.StoreContract` has the tests."""

    shared_by_processes: ClassVar[bool] = True
    """Whether processes see each other's records. False only for records in one process's memory."""

    def reopen(self, store: Store) -> Store:
        """Another instance over the same records, as another process would open it; the contract closes it.

        By default the same instance, which is weaker: a cache in the instance goes unnoticed.
        """
        return store

    @contextmanager
    def another(self, store: Store) -> Iterator[Store]:
        """The same, closed at the end of the block."""
        other = self.reopen(store)
        try:
            yield other
        finally:
            if other is not store:
                other.close()
