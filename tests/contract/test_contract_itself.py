"""The contract of a store, held against stores that are wrong on purpose: each must fail the test that names it.

Every one is a mistake that a store's author can make in an afternoon, and most were made by somebody.
"""

import itertools
import json
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import (
    OutageContract,
    PurgeableContract,
    StoreContract,
    StoreWrapper,
    VerifiableContract,
)
from celery_idempotent.testing.contract import a_record


class BrokenInside(Exception):
    """What a driver lets out."""


@dataclass(frozen=True)
class Wrong:
    """One wrong store.

    Args:
        name: What is wrong.
        make: Makes it; two calls are two instances over the same records only if ``make`` says so.
        noticed_by: The tests that must fail, without their prefix.
    """

    name: str
    make: Callable[[], Any]
    noticed_by: tuple[str, ...]


WRONG: list[Wrong] = []


def wrong(name: str, *noticed_by: str, **options: Any) -> Callable[[Any], Any]:
    """Register a class of wrong stores, as made with ``options``."""

    def register(make: Any) -> Any:
        WRONG.append(Wrong(name, lambda: make(**options), noticed_by))
        return make

    return register


# -- the condition


@wrong("writes unconditionally", "answers_as_a_register_does")
class Unconditional(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        self._records[new.key] = new
        return new


@wrong("replaces unconditionally", "answers_as_a_register_does", "calls_at_once_have_one_history")
class ReplacesAnything(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        with self._lock():
            if expected is None and new.key in self._records:
                return self._records[new.key]
            self._records[new.key] = new
            return new


@wrong(
    "creates where a revision was expected",
    "answers_as_a_register_does",
    "calls_at_once_have_one_history",
)
class Upserts(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        return super().swap(new, expected if new.key in self._records else None)


@wrong(
    "checks, then acts",
    "calls_at_once_have_one_history",
)
class ChecksThenActs(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        if (stored.revision if stored else None) != expected:
            return stored
        time.sleep(0.0005)  # a round trip
        self._records[new.key] = new
        return new

    def delete(self, key: str, expected: str) -> bool:
        stored = self.get(key)
        if stored is None or stored.revision != expected:
            return False
        time.sleep(0.0005)
        self._records.pop(key, None)
        return True


@wrong("compares revisions as a case-blind collation does", "answers_as_a_register_does", fold=str.lower)
@wrong("compares revisions as PAD SPACE does", "answers_as_a_register_does", fold=str.rstrip)
@wrong("compares the start of revisions", "answers_as_a_register_does", fold=lambda text: text[:5])
class FoldsRevisions(MemoryStore):
    def __init__(self, fold: Callable[[str], str]) -> None:
        super().__init__()
        self.fold = fold

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        if stored and expected is not None and self.fold(stored.revision) == self.fold(expected):
            expected = stored.revision
        return super().swap(new, expected)


# -- the reply


@wrong(
    "returns the new record although it lost",
    "answers_as_a_register_does",
)
class ClaimsToHaveWon(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        super().swap(new, expected)
        return new


@wrong("tells a loser nothing", "answers_as_a_register_does")
class TellsLosersNothing(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        seen = self.get(new.key)
        stored = super().swap(new, expected)
        return None if stored is seen else stored


@wrong("returns what was there before", "answers_as_a_register_does")
class ReturnsTheOld(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        old = self.get(new.key)
        super().swap(new, expected)
        return old


@wrong("reads the loser's reply in a second request", "calls_at_once_have_one_history")
class ReadsTheReplyLater(MemoryStore):
    """Harmless at first sight; but a deletion between both makes the loser of a claim see nothing, and give up."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = super().swap(new, expected)
        time.sleep(0.0005)
        return self.get(new.key) if stored is new else stored


@wrong("hands replies to whichever thread comes first", "calls_at_once_have_one_history")
class MixesUpReplies(MemoryStore):
    reply: Record | None = None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self.reply = super().swap(new, expected)
        time.sleep(0.0001)
        return self.reply


# -- resends and late requests


@wrong("takes a resend for won whatever happened since", "answers_as_a_register_does")
class RemembersWins(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.won: dict[str, Record] = {}

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if new.revision in self.won:
            return new
        stored = super().swap(new, expected)
        if stored is new:
            self.won[new.revision] = new
        return stored


@wrong("writes a resend again", "answers_as_a_register_does")
class RewritesOnResend(RemembersWins):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        if new.revision in self.won:
            self._records[new.key] = new
        return super().swap(new, expected)


@wrong("takes its own write for another's", "answers_as_a_register_does")
class RefusesResends(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        seen = self.get(new.key)
        stored = super().swap(new, expected)
        return replace(stored, revision="of somebody else") if stored and stored is seen else stored


@wrong("writes again what has its revision", "answers_as_a_register_does")
class RewritesItsOwn(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        return super().swap(new, new.revision if stored and stored.revision == new.revision else expected)


@wrong("accepts any revision there ever was", "answers_as_a_register_does")
class AcceptsOldRevisions(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.ever: dict[str, set[str]] = {}

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        self.ever.setdefault(new.key, set()).add(new.revision)
        return super().swap(new, stored.revision if stored and expected in self.ever[new.key] else expected)


@wrong("compares the owner instead of the revision", "answers_as_a_register_does")
class ComparesOwners(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        mine = stored is not None and expected is not None and stored.owner == new.owner
        return super().swap(new, stored.revision if stored and mine else expected)


@wrong("guards final states itself", "calls_at_once_have_one_history", "only_an_outcome_with_an_expiry_is_forgotten")
class GuardsFinalStates(MemoryStore):
    """Well meant; but then no expired outcome ever gives way, and no UNKNOWN is ever resolved."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.get(new.key)
        is_final = stored is not None and stored.status is not Status.IN_PROGRESS
        return stored if is_final else super().swap(new, expected)


@wrong("keeps a deleted key blocked", "answers_as_a_register_does")
class KeepsTombstones(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.tombstones: set[str] = set()

    def delete(self, key: str, expected: str) -> bool:
        deleted = super().delete(key, expected)
        if deleted:
            self.tombstones.add(key)
        return deleted

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return None if new.key in self.tombstones else super().swap(new, expected)


# -- what is kept


class Keeps(MemoryStore):
    """Keeps something else than it was given."""

    def __init__(self, change: Callable[[Record], Record]) -> None:
        super().__init__()
        self.change = change

    def swap(self, new: Record, expected: str | None) -> Record | None:
        kept = self.change(new)
        stored = super().swap(kept, expected)
        return new if stored is kept else stored


def _texts(change: Callable[[str], Any]) -> Callable[[Record], Record]:
    """``change`` for every text that people or tasks choose."""
    return lambda record: replace(
        record,
        **{
            name: change(value)
            for name in ("task", "task_id", "worker", "app", "error", "result", "content_type")
            if isinstance(value := getattr(record, name), str)
        },
    )


def _numbers(change: Callable[[int], Any]) -> Callable[[Record], Record]:
    names = ("fencing_token", "lease_until", "created_at", "updated_at")
    return lambda record: replace(record, **{name: change(getattr(record, name)) for name in names})


def _results(change: Callable[[Any], Any]) -> Callable[[Record], Record]:
    return lambda record: record if record.result is None else replace(record, result=change(record.result))


def _in_steps(change: Callable[[str], str]) -> Callable[[Record], Record]:
    return lambda record: replace(record, steps=json.loads(change(json.dumps(record.steps))))


def _without(name: str) -> Callable[[Record], Record]:
    absent: dict[str, Any] = {each.name: getattr(a_record(), each.name) for each in fields(Record)}
    absent |= {"status": Status.IN_PROGRESS, "task_id": "", "revision": "r", "owner": "", "fingerprint": None}
    return lambda record: replace(record, **{name: absent[name]})


wrong(
    "gives every record an owner",
    "answers_as_a_register_does",
    change=lambda record: replace(record, owner=record.owner or "nobody"),
)(Keeps)

for field in fields(Record):
    if field.name not in {"key", "schema", "revision"}:
        by = {
            **dict.fromkeys(("owner", "task_id"), ("answers_as_a_register_does",)),
            **dict.fromkeys(("fencing_token", "created_at", "updated_at"), ("answers_as_a_register_does",)),
            **dict.fromkeys(("task", "worker", "app", "process", "label", "trace"), ("answers_as_a_register_does",)),
            "lease_until": ("answers_as_a_register_does",),
        }.get(field.name, ("answers_as_a_register_does",))
        wrong(f"loses {field.name}", *by, change=_without(field.name))(Keeps)


def _as_text(data: Any) -> Any:
    try:
        return data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        return data


def _in_latin1(text: str) -> str:
    return text.encode("latin1", "replace").decode("latin1")


def _in_three_bytes(text: str) -> str:
    return "".join(each for each in text if each < "\U00010000")


_BIG, _FLOAT = str(2**53 + 1), str(2**53)

ALTERED: dict[str, dict[str, Callable[[Record], Record]]] = {
    "answers_as_a_register_does": {
        "keeps the status as text": lambda record: replace(record, status=str(record.status)),  # type: ignore[arg-type]
        "keeps a counter as a flag": lambda record: replace(record, takeovers=bool(record.takeovers)),
        "keeps numbers as floats": _numbers(float),
        "rounds numbers as JavaScript does": _numbers(lambda number: int(float(number))),
        "keeps numbers in 32 bits": _numbers(lambda number: number % 2**32),
        "keeps numbers as text": _numbers(str),
        "keeps empty text as nothing": _texts(lambda text: text or None),
        "trims text": _texts(str.strip),
        "keeps three bytes of UTF-8": _texts(_in_three_bytes),
        "normalises text": _texts(lambda text: unicodedata.normalize("NFC", text)),
        "normalises ends of lines": _texts(lambda text: text.replace("\r\n", "\n")),
        "folds text": _texts(str.lower),
        "keeps Latin text only": _texts(_in_latin1),
        "keeps bytes as text": _results(lambda data: data.decode("latin1") if isinstance(data, bytes) else data),
        "keeps text as bytes": _results(lambda data: data.encode() if isinstance(data, str) else data),
        "keeps what looks like UTF-8 as text": _results(_as_text),
        "keeps no empty result": _results(lambda data: data or None),
        "keeps no NUL in steps": _in_steps(lambda text: text.replace("\\u0000", "")),
        "keeps only ASCII in steps": _in_steps(lambda text: text.replace("\\u00fc", "?")),
        "keeps empty lists in steps as mappings": _in_steps(lambda text: text.replace("[]", "{}")),
        "keeps whole numbers in steps as floats": _in_steps(lambda text: text.replace(_BIG, _FLOAT)),
        "keeps flags in steps as numbers": _in_steps(lambda text: text.replace("true", "1")),
    },
    "large_record_is_kept_whole_or_refused_unwritten": {
        "keeps 64 KB of a text": _texts(lambda text: text[:65_535]),
        "keeps 64 KB of a result": _results(lambda data: data[:65_535]),
    },
}

for noticed_by, altered in ALTERED.items():
    for name, change in altered.items():
        wrong(name, noticed_by, change=change)(Keeps)


@wrong("keeps fields that are gone", "answers_as_a_register_does")
class Merges(MemoryStore):
    """UpdateItem, HSET and UPDATE of the columns that were given."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        old = self.get(new.key)
        stored = super().swap(new, expected)
        if old is not None and stored is new:
            merged = Record.from_fields({**old.to_fields(), **new.to_fields()}, store="merging")
            self._records[new.key] = merged
        return stored


@wrong("folds keys", "keeps_keys_apart", fold=str.casefold)
@wrong("takes keys for paths", "keeps_keys_apart", fold=os.path.normpath)
@wrong("takes keys for patterns", "keeps_keys_apart", fold=lambda key: key.replace("*", "?"))
@wrong("trims keys", "keeps_keys_apart", fold=str.rstrip)
@wrong("normalises keys", "keeps_keys_apart", fold=lambda key: unicodedata.normalize("NFC", key))
@wrong("compares keys without accents", "keeps_keys_apart", fold=lambda key: unicodedata.normalize("NFD", key)[:33])
@wrong("knows no emoji in keys", "keeps_keys_apart", fold=lambda key: key.encode("latin1", "replace").decode("latin1"))
@wrong("keeps 255 characters of a key", "keeps_keys_apart", fold=lambda key: key[:255])
@wrong("keeps 2000 bytes of a key", "keeps_keys_apart", fold=lambda key: key.encode()[:2000].decode())
class FoldsKeys(MemoryStore):
    def __init__(self, fold: Callable[[str], str]) -> None:
        super().__init__()
        self.fold = fold
        self.keys: dict[str, str] = {}

    def swap(self, new: Record, expected: str | None) -> Record | None:
        known = replace(new, key=self.keys.setdefault(self.fold(new.key), new.key))
        stored = super().swap(known, expected)
        return new if stored is known else stored

    def get(self, key: str) -> Record | None:
        return super().get(self.keys.get(self.fold(key), key))


class Limited(MemoryStore):
    """Holds results of 64 KB; what it does about larger ones is the subject."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if len(new.result or "") > 65_535:
            return self.too_large(new, expected)
        return super().swap(new, expected)

    def too_large(self, new: Record, expected: str | None) -> Record | None:
        raise NotImplementedError


@wrong("lets the driver's error out", "large_record_is_kept_whole_or_refused_unwritten")
class LetsErrorsOut(Limited):
    def too_large(self, new: Record, expected: str | None) -> Record | None:
        raise BrokenInside("Data too long for column 'result'")


@wrong("calls a record that is too large an outage", "large_record_is_kept_whole_or_refused_unwritten")
class CallsItAnOutage(Limited):
    def too_large(self, new: Record, expected: str | None) -> Record | None:
        raise StoreUnavailable("limited", "swap", "the server closed the connection")


@wrong("refuses a record and writes it", "large_record_is_kept_whole_or_refused_unwritten")
class RefusesAndWrites(Limited):
    def too_large(self, new: Record, expected: str | None) -> Record | None:
        super(Limited, self).swap(replace(new, result=None), expected)
        raise RecordTooLarge("written all the same")


# -- what is forgotten


@wrong("takes the lease for the record's life", "only_an_outcome_with_an_expiry_is_forgotten")
class ForgetsClaims(MemoryStore):
    def get(self, key: str) -> Record | None:
        found = super().get(key)
        return None if found is None or found.lease_until < self.now() else found


@wrong("forgets released records", "only_an_outcome_with_an_expiry_is_forgotten")
class ForgetsReleased(MemoryStore):
    def get(self, key: str) -> Record | None:
        found = super().get(key)
        return None if found is None or found.status is Status.RELEASED else found


@wrong("forgets outcomes without an expiry", "only_an_outcome_with_an_expiry_is_forgotten")
class ForgetsOutcomes(MemoryStore):
    def get(self, key: str) -> Record | None:
        found = super().get(key)
        is_outcome = found is not None and found.status in {Status.COMPLETED, Status.FAILED}
        return None if found and is_outcome and found.updated_at + 604_800_000 < self.now() else found


@wrong("lets an expiry stick to its key", "only_an_outcome_with_an_expiry_is_forgotten")
class ExpiresKeys(MemoryStore):
    """EXPIREAT, then HSET by the next claim."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, int] = {}

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if new.expires_at is not None:
            self.ends[new.key] = new.expires_at * 1000
        return super().swap(new, expected)

    def get(self, key: str) -> Record | None:
        return super().get(key) if self.ends.get(key, self.now()) >= self.now() else None


@wrong("hides an expired outcome and keeps its key", "expired_outcome_is_whole_or_absent_and_gives_way")
class HidesExpired(MemoryStore):
    def _hidden(self, record: Record | None) -> Record | None:
        return None if record is None or (record.expires_at or self.now()) * 1000 < self.now() else record

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = super().swap(new, expected)
        return stored if stored is new else self._hidden(stored)

    def get(self, key: str) -> Record | None:
        return self._hidden(super().get(key))


@wrong("returns half an expired outcome", "expired_outcome_is_whole_or_absent_and_gives_way")
class KeepsTheShell(MemoryStore):
    def get(self, key: str) -> Record | None:
        found = super().get(key)
        is_over = found is not None and found.expires_at is not None and found.expires_at * 1000 < self.now()
        return replace(found, result=None) if found and is_over else found


@wrong("denies a write whose outcome is over at once", "expired_outcome_is_whole_or_absent_and_gives_way")
class DeletesAtOnce(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = super().swap(new, expected)
        if stored is new and new.expires_at is not None and new.expires_at * 1000 < self.now():
            del self._records[new.key]
            return None
        return stored


# -- several callers


@wrong("writes a record in two steps", "calls_at_once_have_one_history")
class WritesInSteps(MemoryStore):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        old = self.get(new.key)
        if old is not None and old.revision == expected:
            self._records[new.key] = replace(new, result=old.result)
            time.sleep(0.02)
        stored = super().swap(new, new.revision if old is not None and old.revision == expected else expected)
        return new if stored is not None and stored.revision == new.revision else stored


@wrong("answers reads from a replica", "calls_at_once_have_one_history", "answers_as_a_register_does")
class LagsBehind(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.replica: dict[str, Record] = {}

    def get(self, key: str) -> Record | None:
        threading.Timer(0.01, self.replica.update, [dict(self._records)]).start()
        return self.replica.get(key)


@wrong("answers another thread from a snapshot", "calls_at_once_have_one_history")
class SnapshotsByThread(MemoryStore):
    """A session whose transaction was never ended."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = threading.local()
        self.creator = threading.get_ident()

    def get(self, key: str) -> Record | None:
        if threading.get_ident() == self.creator:
            return super().get(key)
        if not hasattr(self.mine, "snapshot"):
            self.mine.snapshot = dict(self._records)
        found: Record | None = self.mine.snapshot.get(key)
        return found


@wrong("may be used by one thread only", "calls_at_once_have_one_history")
class OneThreadOnly(MemoryStore):
    """sqlite3's default."""

    def __init__(self) -> None:
        super().__init__()
        self.creator = threading.get_ident()

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if threading.get_ident() != self.creator:
            raise BrokenInside("objects created in a thread can only be used in that same thread")
        return super().swap(new, expected)


# -- operators


@wrong("deletes unconditionally", "answers_as_a_register_does")
class DeletesAnything(MemoryStore):
    def delete(self, key: str, expected: str) -> bool:
        return self._records.pop(key, None) is not None


@wrong("calls every deletion done", "answers_as_a_register_does")
class AlwaysDeleted(MemoryStore):
    def delete(self, key: str, expected: str) -> bool:
        super().delete(key, expected)
        return True


@wrong("calls no deletion done", "answers_as_a_register_does")
class NeverDeleted(MemoryStore):
    def delete(self, key: str, expected: str) -> bool:
        super().delete(key, expected)
        return False


class Scans(MemoryStore):
    """Chooses by its own lights."""

    def __init__(self, chooses: Callable[[Record, Any, Any], bool]) -> None:
        super().__init__()
        self.chooses = chooses

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        found = (each for each in list(self._records.values()) if self.chooses(each, status, task))
        return (each for each in found if label in (None, each.label))


class ScansLabels(MemoryStore):
    """Chooses by its own lights where it is asked for a label."""

    def __init__(self, chooses: Callable[[Record, str], bool]) -> None:
        super().__init__()
        self.chooses = chooses

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        found = super().scan(status=status, task=task)
        return found if label is None else (each for each in found if self.chooses(each, label))


for name, finds in (
    ("passes over the label", lambda record, label: True),
    ("scans for labels with a case-blind collation", lambda record, label: record.label.lower() == label.lower()),
    ("trims labels", lambda record, label: record.label.strip() == label),
    ("takes a label for a pattern", lambda record, label: fnmatch(record.label, label)),
    ("finds what has no label by every one", lambda record, label: record.label in ("", label)),
    ("finds no label", lambda record, label: False),
):
    wrong(name, "scan_finds_what_is_asked_for", chooses=finds)(ScansLabels)


for name, chooses in (
    ("scans for one status too many", lambda record, status, task: task in (None, record.task)),
    ("scans for one task too many", lambda record, status, task: status in (None, record.status)),
    (
        "scans with a case-blind collation",
        lambda record, status, task: (
            status in (None, record.status) and (task is None or task.lower() == record.task.lower())
        ),
    ),
    (
        "scans for the start of a name",
        lambda record, status, task: status in (None, record.status) and (task is None or record.task.startswith(task)),
    ),
    (
        "takes a name for a pattern",
        lambda record, status, task: status in (None, record.status) and fnmatch(record.task, task or "*"),
    ),
    ("needs a task to scan for", lambda record, status, task: status in (None, record.status) and task == record.task),
):
    wrong(name, "scan_finds_what_is_asked_for", chooses=chooses)(Scans)


@wrong("finds what is not there", "answers_as_a_register_does")
class FindsAnything(MemoryStore):
    def get(self, key: str) -> Record | None:
        return super().get(key) or replace(a_record(), key=key)


@wrong("scans one page", "calls_at_once_have_one_history")
class ScansOnePage(MemoryStore):
    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        return itertools.islice(super().scan(status=status, task=task, label=label), 5)


@wrong("scans while the ground moves", "calls_at_once_have_one_history")
class ScansMovingGround(MemoryStore):
    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        for each in self._records.values():
            time.sleep(0.0001)
            if task in (None, each.task) and status in (None, each.status) and label in (None, each.label):
                yield each


@wrong("scans half-written records", "calls_at_once_have_one_history")
class ScansInSteps(MemoryStore):
    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        for each in super().scan(status=status, task=task, label=label):
            time.sleep(0.0001)
            now = self.get(each.key)
            yield replace(each, status=now.status if now else Status.FAILED)


@wrong("provisions anew", "provisioning_and_closing_again_are_harmless")
class WipesOnProvision(MemoryStore):
    def provision(self) -> None:
        self._records.clear()


@wrong("provisions once only", "provisioning_and_closing_again_are_harmless")
class ProvisionsAlone(MemoryStore):
    is_provisioning = False

    def provision(self) -> None:
        if self.is_provisioning:
            raise BrokenInside("relation already exists")
        self.is_provisioning = True
        time.sleep(0.001)
        self.is_provisioning = False


@wrong("can be closed once", "provisioning_and_closing_again_are_harmless")
class ClosesOnce(MemoryStore):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise BrokenInside("already closed")
        self.is_closed = True


@wrong("is of no use once closed", "provisioning_and_closing_again_are_harmless")
class StaysClosed(ClosesOnce):
    def close(self) -> None:
        self.is_closed = True

    def get(self, key: str) -> Record | None:
        if self.is_closed:
            raise BrokenInside("closed")
        return super().get(key)


# -- the clock

wrong("counts seconds", "clock_counts_milliseconds_and_does_not_jump", now=lambda: time.time_ns() // 1_000_000_000)(
    MemoryStore
)
wrong("counts fractions", "clock_counts_milliseconds_and_does_not_jump", now=lambda: time.time() * 1000)(MemoryStore)
wrong("counts since boot", "clock_counts_milliseconds_and_does_not_jump", now=lambda: time.monotonic_ns() // 1_000_000)(
    MemoryStore
)
wrong("stands", "clock_counts_milliseconds_and_does_not_jump", now=lambda: 1_800_000_000_000)(MemoryStore)
wrong(
    "jumps by seconds",
    "clock_counts_milliseconds_and_does_not_jump",
    now=lambda: time.time_ns() // 1_000_000_000 * 1000 + 999,
)(MemoryStore)
wrong("runs twice as fast", "clock_counts_milliseconds_and_does_not_jump", now=lambda: time.time_ns() // 500_000)(
    MemoryStore
)
wrong(
    "takes local time for UTC",
    "clock_counts_milliseconds_and_does_not_jump",
    now=lambda: int(datetime.now(UTC).replace(tzinfo=None).timestamp() * 1000),
)(MemoryStore)
wrong(
    "runs backwards",
    "clock_counts_milliseconds_and_does_not_jump",
    now=lambda: 3_600_000_000_000 - time.time_ns() // 1_000_000,
)(MemoryStore)


@wrong("learns the time in the wrong unit", "clock_counts_milliseconds_and_does_not_jump")
class LearnsWrongly(MemoryStore):
    offset = 0

    def __init__(self) -> None:
        super().__init__(lambda: time.time_ns() // 1_000_000 + self.offset)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self.offset -= 3_600_000
        return super().swap(new, expected)


# -- several instances and processes


@wrong("keeps a cache in the instance", "calls_at_once_have_one_history")
class Caches(StoreWrapper):
    records: ClassVar[MemoryStore] = MemoryStore()

    def __init__(self) -> None:
        super().__init__(self.records)
        self.cache: dict[str, Record | None] = {}

    def get(self, key: str) -> Record | None:
        if key not in self.cache:
            self.cache[key] = self.store.get(key)
        return self.cache[key]

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self.cache[new.key] = self.store.swap(new, expected)
        return self.cache[new.key]


@wrong("locks in the instance only", "calls_at_once_have_one_history")
class LocksInstances(MemoryStore):
    shared: ClassVar[dict[str, Record]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._records = self.shared

    def swap(self, new: Record, expected: str | None) -> Record | None:
        with self._lock():
            stored = self.shared.get(new.key)
            if (stored.revision if stored else None) != expected:
                return stored
            time.sleep(0.0002)
            self.shared[new.key] = new
            return new


class ModestContract(StoreContract):
    """The contract within one process, on two instances if ``make`` makes them over the same records."""

    shared_by_processes = False

    def __init__(self, make: Callable[[], Store] | None = None) -> None:
        self.make = make

    def reopen(self, store: Store) -> Store:
        return self.make() if self.make else store


@pytest.mark.parametrize("mistake", WRONG, ids=lambda mistake: mistake.name)
def test_wrong_store_is_noticed(mistake: Wrong) -> None:
    """A store with this mistake fails each of the tests that are there to notice it."""
    contract = ModestContract(mistake.make if _shares(mistake.make) else None)

    for name in mistake.noticed_by:
        test = getattr(contract, f"test_{name}")
        assert _is_noticed(partial(test, mistake.make()) for _ in range(_CHANCES)), name


_CHANCES = 5
"""A race is met by chance, and on a busy machine a test may run without one."""


def _is_noticed(tests: Iterable[Callable[[], object]]) -> bool:
    for test in tests:
        try:
            test()
        except (AssertionError, BrokenInside, StoreUnavailable, RuntimeError, TypeError):
            return True
    return False


def _shares(make: Callable[[], Store]) -> bool:
    """Whether two instances are two views of the same records; two memories are not."""
    record = a_record()
    make().swap(record, None)
    return make().get(record.key) == record


class Files:
    """A file for each record, under a lock that other processes do not see or, rightly, under one that they do."""

    def __init__(self, folder: Path, flaw: str) -> None:
        self.folder = folder
        self.flaw = flaw
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.now = MemoryStore().now

    def _path(self, key: str) -> Path:
        return self.folder / key.encode().hex()[-200:]

    def get(self, key: str) -> Record | None:
        if self.flaw == "inherited" and os.getpid() != self.pid:
            raise BrokenInside("lost connection")
        if self.flaw == "hangs" and os.getpid() != self.pid:
            time.sleep(60)
        if (self.folder / "goodbye").exists() and os.getpid() == self.pid:
            raise BrokenInside("server closed the connection")
        try:
            return Record.from_fields(json.loads(self._path(key).read_text()), store="files")
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        with self.lock:
            stored = self.get(new.key)
            if (stored.revision if stored else None) != expected:
                return stored
            time.sleep(0.002)
            self._path(new.key).write_text(json.dumps(new.to_fields()))
            return new

    def delete(self, key: str, expected: str) -> bool:
        stored = self.get(key)
        self._path(key).unlink()
        return stored is not None

    def provision(self) -> None: ...

    def scan(self) -> Iterator[Record]:
        keys = (bytes.fromhex(each.name).decode() for each in self.folder.iterdir())
        if self.flaw == "ends a scan":
            return (record for key in keys if (record := self.get(key)))
        return readable(keys, self.get, str)

    def close(self) -> None:
        if self.flaw == "says goodbye for its parent" and os.getpid() != self.pid:
            (self.folder / "goodbye").touch()
        if self.flaw == "forgets" and os.getpid() == self.pid:
            for each in self.folder.iterdir():
                each.unlink()


@pytest.mark.parametrize(
    ("flaw", "noticed_by"),
    [
        ("locks threads only", "calls_of_processes_have_one_history"),
        ("inherited", "store_survives_a_fork"),
        ("hangs", "store_survives_a_fork"),
        ("says goodbye for its parent", "store_survives_a_fork"),
        ("forgets", "store_survives_a_fork"),
        ("forgets", "provisioning_and_closing_again_are_harmless"),
        ("ends a scan", "newer_layout_is_refused_and_left_alone"),
    ],
)
def test_store_that_cannot_share_with_processes_is_noticed(
    flaw: str, noticed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks that only threads see, connections that a child inherited, and locks that nobody gives back."""
    monkeypatch.setattr("celery_idempotent.testing.contract.parallel._CHILD_ANSWERS_WITHIN", 1)

    with pytest.raises((AssertionError, BrokenInside, StoreMisconfigured)):
        getattr(StoreContract(), f"test_{noticed_by}")(Files(tmp_path, flaw))


def test_files_without_a_flaw_are_right(tmp_path: Path) -> None:
    """The negative control of the stores above; but for their lock, which no other process sees."""
    for name in (
        "store_survives_a_fork",
        "provisioning_and_closing_again_are_harmless",
        "newer_layout_is_refused_and_left_alone",
    ):
        getattr(StoreContract(), f"test_{name}")(Files(tmp_path, ""))


def test_memories_without_a_mistake_are_right() -> None:
    """The negative control of those that keep something else, or fold keys."""
    for name in ("answers_as_a_register_does", "keeps_keys_apart"):
        getattr(ModestContract(), f"test_{name}")(Keeps(lambda record: record))
        getattr(ModestContract(), f"test_{name}")(FoldsKeys(str))


def test_memory_that_claims_to_be_shared_is_noticed() -> None:
    """Records that no other process sees, and that carry no schema to be refused, need the test's word for it."""
    for name in (
        "store_survives_a_fork",
        "calls_of_processes_have_one_history",
        "newer_layout_is_refused_and_left_alone",
    ):
        with pytest.raises(AssertionError):
            getattr(StoreContract(), f"test_{name}")(MemoryStore())


def test_shared_store_that_claims_to_be_memory_is_noticed(tmp_path: Path) -> None:
    """The claim is checked, not believed."""
    with pytest.raises(AssertionError):
        ModestContract().test_store_survives_a_fork(Files(tmp_path, ""))  # type: ignore[arg-type]


class Outage(StoreWrapper):
    """No server; what the store makes of it is the subject."""

    def __init__(self, flaw: str, of: str = "") -> None:
        super().__init__(MemoryStore())
        self.flaw = flaw
        self.of = of

    def _fail(self, verb: str, answer: Any) -> Any:
        match self.flaw if verb == self.of else "":
            case "answers":
                return answer
            case "raw":
                raise BrokenInside("connection refused")
            case "no cause":
                raise StoreUnavailable("outage", "swap", "connection refused")
            case "misconfigured":
                raise StoreMisconfigured("outage", "swap", "no such host") from BrokenInside("refused")
            case "slow":
                time.sleep(0.05)
        raise StoreUnavailable("outage", "swap", "connection refused") from BrokenInside("refused")

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._fail("swap", new)  # type: ignore[no-any-return]

    def get(self, key: str) -> Record | None:
        return self._fail("get", None)  # type: ignore[no-any-return]

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        return iter(self._fail("scan", ()))

    def delete(self, key: str, expected: str) -> bool:
        return self._fail("delete", False)  # type: ignore[no-any-return]

    def close(self) -> None:
        if self.flaw == "raw":
            raise BrokenInside("cannot say goodbye")


class QuickOutageContract(OutageContract):
    """So that slowness is noticed soon."""

    answers_within = 0.04


@pytest.mark.parametrize("verb", ["swap", "get", "scan", "delete"])
@pytest.mark.parametrize("flaw", ["answers", "raw", "no cause", "misconfigured", "slow"])
def test_wrong_behaviour_in_an_outage_is_noticed(flaw: str, verb: str) -> None:
    """An invented answer, a raw error, a false alarm, a missing cause and endless waiting are noticed."""
    with pytest.raises((AssertionError, BrokenInside)):
        QuickOutageContract().test_no_answer_is_no_answer(Outage(flaw, verb))


def test_store_that_cannot_be_closed_in_an_outage_is_noticed() -> None:
    """So is an error on the way out."""
    with pytest.raises(BrokenInside):
        OutageContract().test_closing_without_a_server_is_harmless(Outage("raw"))


class TestRightBehaviourInAnOutage(QuickOutageContract):
    """The negative control: nothing is wrong with this one."""

    @pytest.fixture
    def unreachable_store(self) -> Outage:
        return Outage("")


class Purges(MemoryStore):
    """Deletes what ``chooses`` says, by way of ``deletes``."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw

    def purge(self, limit: int) -> int:
        now = self.now()
        chosen = [each for each in self.scan() if self._is_chosen(each, now)][
            : 1000 if self.flaw == "unlimited" else limit
        ]
        for each in chosen:
            if self.flaw == "checks, then acts":
                time.sleep(0.0002)
                self._records.pop(each.key, None)
            elif self.flaw != "idle":
                self.delete(each.key, each.revision)
        return {"miscounts": 0, "idle": 0, "boasts": limit}.get(self.flaw, len(chosen))

    def _is_chosen(self, record: Record, now: int) -> bool:
        if self.flaw == "every outcome":
            return record.status in {Status.COMPLETED, Status.FAILED}
        if self.flaw == "old ones":
            return record.updated_at < now - 600_000 and record.expires_at is None
        if self.flaw == "over leases":
            return record.lease_until < now
        if self.flaw == "seconds for milliseconds":
            return record.expires_at is not None and record.expires_at < now
        return record.expires_at is not None and record.expires_at * 1000 <= now


PURGES = {
    "every outcome": "purge_deletes_forgotten_outcomes_only",
    "old ones": "purge_deletes_forgotten_outcomes_only",
    "over leases": "purge_deletes_forgotten_outcomes_only",
    "seconds for milliseconds": "purge_deletes_forgotten_outcomes_only",
    "unlimited": "purge_keeps_to_its_limit",
    "miscounts": "purge_keeps_to_its_limit",
    "boasts": "purge_deletes_forgotten_outcomes_only",
    "idle": "purge_keeps_to_its_limit",
    "checks, then acts": "purge_lets_claims_win",
}


@pytest.mark.parametrize("flaw", PURGES)
def test_wrong_purge_is_noticed(flaw: str) -> None:
    """Purging too much, too little, without a limit, or over the head of a claim is noticed."""
    test = getattr(PurgeableContract(), f"test_{PURGES[flaw]}")

    assert _is_noticed(partial(test, Purges(flaw)) for _ in range(_CHANCES))


class TestRightPurge(PurgeableContract):
    """The negative control."""

    @pytest.fixture
    def store(self) -> Purges:
        return Purges("")


class Verifies(MemoryStore):
    """Misconfigured or not, and right about it or not."""

    def __init__(self, is_usable: bool, flaw: str) -> None:
        super().__init__()
        self.is_usable = is_usable
        self.flaw = flaw

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if not self.is_usable and self.flaw != "believes it works":
            raise StoreMisconfigured("m", "swap", "no such table")
        return super().swap(new, expected)

    def verify(self) -> None:
        if self.flaw == "leaves a trace":
            super().swap(a_record(), None)
        if self.flaw == "clears up":
            self._records.clear()
        if self.flaw == "is not sure":
            raise StoreUnavailable("m", "verify", "who knows")
        if not self.is_usable and self.flaw != "looks away":
            raise StoreMisconfigured("m", "verify", "no such table")


@pytest.mark.parametrize(
    ("flaw", "is_usable", "noticed_by"),
    [
        ("leaves a trace", True, "verify_accepts_a_working_store_and_writes_nothing"),
        ("clears up", True, "verify_accepts_a_working_store_and_writes_nothing"),
        ("is not sure", True, "verify_accepts_a_working_store_and_writes_nothing"),
        ("is not sure", False, "verify_refuses_a_store_that_cannot_work"),
        ("looks away", False, "verify_refuses_a_store_that_cannot_work"),
        ("believes it works", False, "verify_refuses_a_store_that_cannot_work"),
    ],
)
def test_wrong_check_is_noticed(flaw: str, is_usable: bool, noticed_by: str) -> None:
    """A check that writes, that is unsure, or that lets a worker start on a store that cannot work is noticed."""
    with pytest.raises((AssertionError, StoreUnavailable)):
        getattr(VerifiableContract(), f"test_{noticed_by}")(Verifies(is_usable, flaw))


class TestRightCheck(VerifiableContract):
    """The negative control."""

    @pytest.fixture
    def store(self) -> Verifies:
        return Verifies(True, "")

    @pytest.fixture
    def misconfigured_store(self) -> Verifies:
        return Verifies(False, "")


def test_every_test_of_the_contract_can_fail() -> None:
    """Each is the one that notices some mistake above; a test that nothing fails proves nothing."""
    noticing = {name for mistake in WRONG for name in mistake.noticed_by} | {
        "calls_of_processes_have_one_history",
        "store_survives_a_fork",
        "newer_layout_is_refused_and_left_alone",
    }
    assert noticing == {name.removeprefix("test_") for name in dir(StoreContract) if name.startswith("test_")}
    assert set(PURGES.values()) == {
        name.removeprefix("test_") for name in dir(PurgeableContract) if name.startswith("test_")
    }
