"""The contract of a store whose server is gone."""

import time
from collections.abc import Callable
from typing import ClassVar

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.records import a_record, reply_of


class OutageContract:
    """What a store must do when its server is gone; needs a fixture ``unreachable_store``.

    Give it a store whose connections are refused, and in a second subclass one whose server accepts them and
    never answers: that is what a lost network looks like.
    """

    answers_within: ClassVar[float] = 30.0
    """Seconds that one call may take, all tries of the driver included. A claim that waits longer than a
    lease, 60 s by default, is of no use to anybody."""

    def test_swap_without_a_server_has_no_certain_answer(self, unreachable_store: Store) -> None:
        """The caller learns that the outcome is unknown, and from which error of the driver."""
        record = a_record()
        self._unavailable(lambda: unreachable_store.swap(record, None))
        self._unavailable(lambda: unreachable_store.swap(record, "a revision"))

    def test_get_without_a_server_is_no_absence(self, unreachable_store: Store) -> None:
        """No answer is not the answer that there is no record."""
        self._unavailable(lambda: unreachable_store.get("key"))

    def test_scan_without_a_server_is_not_empty(self, unreachable_store: Store) -> None:
        """No answer is not the answer that there are no records."""
        self._unavailable(lambda: list(unreachable_store.scan()))

    def test_delete_without_a_server_is_no_refusal(self, unreachable_store: Store) -> None:
        """No answer is not the answer that the record has changed."""
        self._unavailable(lambda: unreachable_store.delete("key", "revision"))

    def test_closing_without_a_server_is_harmless(self, unreachable_store: Store) -> None:
        """A process must be able to end."""
        unreachable_store.close()
        unreachable_store.close()

    def _unavailable(self, call: Callable[[], object]) -> None:
        asked = time.monotonic()
        raised = reply_of(call)
        assert time.monotonic() - asked <= self.answers_within
        assert isinstance(raised, StoreUnavailable), f"answered {raised!r} although there is no server"
        assert not isinstance(raised, StoreMisconfigured), f"nobody needs to change a setting: {raised}"
        assert raised.__cause__ is not None, f"the driver's error is not the cause of: {raised}"
