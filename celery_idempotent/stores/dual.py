"""Two stores as one, while all operations move from the old one to the new one and workers go on.

The old store says where an operation is. A record there, as any other version of this library has written it: it is
there, and nowhere else. A mark (:mod:`celery_idempotent.protocol.moves`): it is in the new store, or in the mark. So
whoever knows the old store alone either has the operation or waits, and no operation is ever in both.

What ends an attempt is one write as ever. Each operation moves with the first write that somebody makes here, once
whoever has it by the old store alone has ended or lost it: never under a living attempt.
"""

import warnings
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import parse_qsl

from celery_idempotent.errors import IdempotencyWarning, PolicyError, StoreMisconfigured
from celery_idempotent.protocol.moves import emptied, empty_mark_of, held_by, is_mark, mark_of
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import PurgeableStore, RecordTooLarge, Store, VerifiableStore
from celery_idempotent.protocol.verdicts import kept_until
from celery_idempotent.stores import open_store

_CLOCKS_APART = 500
"""Milliseconds between the clocks of the stores from which on leases would be misjudged; the grace is a second."""

_ABANDONED = 60_000
"""Milliseconds past the end of a lease after which a copy takes the attempt for dead."""

_CAPABILITIES = ("swap_with", "begin", "enqueue", "take", "give_back", "postpone", "forget", "waiting")
"""Of the new store: by then, the operation is there."""


class DualStore:
    """Reads two stores and writes the new one; see ``docs/how-to/migration.md`` for what to do in which order.

    Args:
        old: Where the records were. Marks are written there and stay, but for one of a claim that is then refused.
        new: Where they will be. Its clock counts, and what it can do besides.
    """

    def __init__(self, old: Store, new: Store) -> None:
        self._old = old
        self._new = new
        for name in _CAPABILITIES:
            if hasattr(new, name):
                setattr(self, name, getattr(new, name))

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that ``dual://?old=...&new=...`` names; special characters of both URLs are written as ``%xx``.

        Raises:
            PolicyError: One of the two is missing, is the other one, or cannot be used.
        """
        options = dict(parse_qsl(url.partition("?")[2]))
        if options.keys() != {"old", "new"} or options["old"] == options["new"]:
            raise PolicyError(
                "idempotency_store",
                "dual",
                "write dual://?old=URL&new=URL, two URLs with special characters as %xx",
                see="stores#moving-cannot-start",
            )
        return cls(open_store(options["old"]), open_store(options["new"]))

    def __repr__(self) -> str:
        return f"dual://?old={self._old!r}&new={self._new!r}"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`; one write or one look more than the new store's."""
        if expected is None:
            there = self._old.swap(empty_mark_of(new), None)
        else:
            there = self._old.get(new.key)
            if there is not None and not is_mark(there) and there.revision == expected:
                self._require_a_way(there)
                there = self._old.swap(mark_of(new), expected)
        if there is not None:
            if not is_mark(there):
                return there
            self._arrive(there)
        stored = self._new.swap(new, expected)
        if stored is not None and is_mark(stored):
            ours = empty_mark_of(new).revision
            self._old.delete(new.key, ours)  # or everybody would wait for an operation that never begins
            if stored.revision == ours:
                raise self._misplaced("the two are one store")
            self._refuse_mark(stored)
        return stored

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.get`; writes nothing."""
        there = self._old.get(key)
        if there is not None and not is_mark(there):
            return there
        return self._new.get(key) or (held_by(there) if there is not None else None)

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; reads all of the old store."""
        wanted: dict[str, Any] = {"status": status, "task": task, "label": label}
        listed = set()
        # The old one first: what moves meanwhile is found in the new one.
        for there in self._old.scan():
            record = held_by(there) if is_mark(there) else there
            if record is not None and all(each in (None, getattr(record, name)) for name, each in wanted.items()):
                listed.add(record.key)
                yield record
        yield from (each for each in self._new.scan(**wanted) if each.key not in listed)

    def delete(self, key: str, expected: str) -> bool:
        """See :meth:`celery_idempotent.stores.Store.delete`; the mark of an operation that has moved stays."""
        there = self._old.get(key)
        if there is not None and not is_mark(there):
            return self._old.delete(key, expected)
        if there is not None:
            self._arrive(there)
        return self._new.delete(key, expected)

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`; the new store's."""
        return self._new.now()

    def purge(self, limit: int) -> int:
        """See :meth:`celery_idempotent.stores.PurgeableStore.purge`; of both."""
        deleted = 0
        for each in (self._new, self._old):
            if isinstance(each, PurgeableStore) and deleted < limit:
                deleted += each.purge(limit - deleted)
        return deleted

    def verify(self) -> None:
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; warns of clocks that differ."""
        for each in (self._old, self._new):
            if isinstance(each, VerifiableStore):
                each.verify()
        apart = abs(self._old.now() - self._new.now())
        if apart > _CLOCKS_APART:
            warnings.warn(
                IdempotencyWarning(
                    f"idempotency_store={self!r}: the clocks of the two stores are {apart} ms apart, so an attempt "
                    "that was claimed by the old one's can be taken over too early; set both by NTP",
                    see="stores#the-clocks-of-two-stores-differ",
                ),
                stacklevel=2,
            )

    def provision(self) -> None:
        """Create what the new store needs; what the old one has was made before."""
        self._new.provision()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`."""
        self._old.close()
        self._new.close()

    def move(self, record: Record) -> bool:
        """Move a record that stands in the old store, as :meth:`left` gives it; whether it is in the new one now.

        A record that has changed since stays; the next look finds what became of it. So does one for whose mark the
        old store has no room.
        """
        try:
            there = record if is_mark(record) else self._old.swap(mark_of(record), record.revision)
        except RecordTooLarge:
            return False
        if there is None or not is_mark(there):
            return False
        self._arrive(there)
        return True

    def left(self) -> Iterator[tuple[Record, bool]]:
        """What is not in the new store alone yet, and of each whether it can be moved.

        A running attempt cannot: who has it may know the old store alone. Outcomes that no longer count are left out,
        but for those that a person has judged: they are kept as the proof.

        Raises:
            StoreMisconfigured: The new store is the old one of an earlier move, or the two are one; nothing is changed.
        """
        now = self._old.now()
        for there in self._old.scan():
            if is_mark(there):
                if held_by(there) is not None:
                    yield there, True
            elif not is_forgotten(there, now) or kept_until(there) > now:
                self._require_a_way(there)
                is_running = there.status is Status.IN_PROGRESS and there.lease_until + _ABANDONED > now
                yield there, not is_running

    def _require_a_way(self, there: Record) -> None:
        """Refuse to put a mark in the place of ``there``, of the old store, if the new one could not get the record."""
        stored = self._new.get(there.key)
        # A revision is never used twice, and a record is not in the new store before its mark is in the old one.
        if stored is not None and stored.revision == there.revision and self._old.get(there.key) == there:
            raise self._misplaced("the two are one store")
        self._refuse_mark(stored)

    def _refuse_mark(self, stored: Record | None) -> None:
        if stored is not None and is_mark(stored):
            raise self._misplaced("operations have been moved from there, and there is no way back")

    def _misplaced(self, reason: str) -> StoreMisconfigured:
        return StoreMisconfigured(
            repr(self._new),
            "move",
            f"{reason}; move on to an empty table, database or prefix",
            see="stores#moving-cannot-start",
        )

    def _arrive(self, mark: Record) -> None:
        """See to it that what the mark holds is in the new store, and then that nobody takes it from the mark again."""
        held = held_by(mark)
        if held is None:
            return
        try:
            stored = self._new.swap(held, None)
        except RecordTooLarge as error:
            if held.result is None:
                raise
            # It has happened all the same; of a result that a store has no room for, duplicates are told so.
            stored = self._new.swap(held.but(result=None, content_type=None, error=str(error)), None)
        self._refuse_mark(stored)  # or what the mark holds would be nowhere
        self._old.swap(emptied(mark), mark.revision)
