"""The contract of a store, held against stores that are wrong on purpose: each must fail the test that names it.

Every one is a mistake that a store's author can make in an afternoon, and most were made by somebody.
"""

import json
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_record

OUTCOMES = {Status.COMPLETED, Status.FAILED}
_swap, _get, _delete, _scan = MemoryStore.swap, MemoryStore.get, MemoryStore.delete, MemoryStore.scan

Make = Callable[[], Any]


class BrokenInside(Exception):
    """What a driver lets out."""


class Wrong(MemoryStore):
    """Right but for the verbs that it is given; each is called with the store and with what the store is asked."""

    def __init__(self, **verbs: Any) -> None:
        super().__init__()
        self.verbs = verbs
        self.notes: Any = {}
        self.mine: Any = threading.local()
        self.alone = threading.Lock()
        self.creator = threading.get_ident()
        vars(self).update({name: partial(verb, self) for name, verb in verbs.items()})

    def reopened(self) -> "Wrong":
        """Another instance over the same records."""
        other = Wrong(**self.verbs)
        other._records, other.notes = self._records, self.notes
        return other


def _wrong(**verbs: Any) -> Make:
    return lambda: Wrong(**verbs)


def _put(store: Any, record: Record) -> Record:
    store._records[record.key] = record
    return record


def _after(seconds: float, call: Make) -> Any:
    time.sleep(seconds)
    return call()


def _raise(error: Exception, cause: Exception | None = None) -> Any:
    raise error from cause


def _takes(matches: Callable[[Any, Record, Record, Any], Any]) -> Make:
    """Takes what is stored for what was expected if it matches."""

    def swap(s: Any, new: Record, expected: str | None) -> Record | None:
        stored = _get(s, new.key)
        return _swap(s, new, stored.revision if stored and matches(s, stored, new, expected) else expected)

    return _wrong(swap=swap)


def _replies(reply: Callable[[Any, Record, Record | None, Record | None], Any]) -> Make:
    """Replies something else than what is stored, knowing also what was asked and what was there before."""

    def swap(s: Any, new: Record, expected: str | None) -> Any:
        before = _get(s, new.key)
        return reply(s, new, before, _swap(s, new, expected))

    return _wrong(swap=swap)


def _checks_then_acts(s: Any, new: Record, expected: str | None) -> Any:
    stored = _get(s, new.key)
    return _after(0.0005, lambda: _put(s, new)) if (stored.revision if stored else None) == expected else stored


def _keeps(change: Callable[[Record], Record]) -> Make:
    def swap(s: Any, new: Record, expected: str | None) -> Record | None:
        kept = change(new)
        stored = _swap(s, kept, expected)
        return new if stored is kept else stored

    return _wrong(swap=swap)


def _keeps_fields(names: Iterable[str], kind: Any, change: Callable[[Any], Any]) -> Make:
    def changed(record: Record) -> dict[str, Any]:
        return {name: change(value) for name in names if isinstance(value := getattr(record, name), kind)}

    return _keeps(lambda record: replace(record, **changed(record)))


_texts = partial(_keeps_fields, ("task", "task_id", "worker", "app", "error", "result", "content_type"), str)
_numbers = partial(_keeps_fields, ("fencing_token", "lease_until", "created_at", "updated_at"), int)
_results = partial(_keeps_fields, ("result",), (str, bytes))


def _merges(s: Any, new: Record, before: Record | None, stored: Record | None) -> Record | None:
    """UpdateItem, HSET and UPDATE of the columns that were given."""
    if before is not None and stored is new:
        _put(s, Record.from_fields({**before.to_fields(), **new.to_fields()}, store="merging"))
    return stored


_ABSENT: dict[str, Any] = {each.name: getattr(a_record(), each.name) for each in fields(Record)}
_ABSENT |= {"status": Status.IN_PROGRESS, "task_id": "", "revision": "r", "owner": "", "fingerprint": None}


def _folds_keys(fold: Callable[[str], str]) -> Make:
    def swap(s: Any, new: Record, expected: str | None) -> Record | None:
        known = replace(new, key=s.notes.setdefault(fold(new.key), new.key))
        stored = _swap(s, known, expected)
        return new if stored is known else stored

    return _wrong(swap=swap, get=lambda s, key: _get(s, s.notes.get(fold(key), key)))


def _limited(too_large: Callable[..., Any]) -> Make:
    """Holds results of 64 KB, and does something about larger ones."""
    return _wrong(swap=lambda s, new, old: (too_large if len(new.result or "") > 65_535 else _swap)(s, new, old))


def _refuses_and_writes(s: Any, new: Record, expected: str | None) -> Any:
    _swap(s, replace(new, result=None), expected)
    raise RecordTooLarge("written all the same")


def _is_over(s: Any, record: Record) -> bool:
    return record.expires_at is not None and record.expires_at * 1000 < s.now()


def _forgets(is_forgotten: Callable[[Any, Record], bool]) -> Make:
    return _wrong(get=lambda s, key: None if (found := _get(s, key)) and is_forgotten(s, found) else found)


def _unless_over(s: Any, record: Record | None) -> Record | None:
    return None if record and _is_over(s, record) else record


def _lags_behind(s: Any, key: str) -> Record | None:
    threading.Timer(0.01, s.notes.update, [dict(s._records)]).start()
    found: Record | None = s.notes.get(key)
    return found


def _reads_a_snapshot(s: Any, key: str) -> Record | None:
    """A session whose transaction was never ended."""
    if threading.get_ident() == s.creator:
        return _get(s, key)
    found: Record | None = vars(s.mine).setdefault("snapshot", dict(s._records)).get(key)
    return found


def _one_thread_only(s: Any, new: Record, expected: str | None) -> Record | None:
    """sqlite3's default."""
    return _swap(s, new, expected) if threading.get_ident() == s.creator else _raise(BrokenInside("of that thread"))


def _scans(**finds: Any) -> Make:
    """Compares by its own lights what it is asked for."""

    def is_found(record: Record, wanted: dict[str, Any]) -> bool:
        known = dict.fromkeys(("status", "task", "label"), operator.eq) | finds
        asked = [(name, value) for name, value in wanted.items() if value is not None and name in known]
        return all(known[name](getattr(record, name, ""), value) for name, value in asked)

    def scan(s: Any, **wanted: Any) -> Iterator[Record]:
        return (each for each in list(s._records.values()) if is_found(each, wanted))

    return _wrong(scan=scan, reads_all=lambda s, **wanted: True)


def _provisions_alone(s: Any) -> None:
    if not s.alone.acquire(blocking=False):
        raise BrokenInside("relation already exists")
    _after(0.001, s.alone.release)


FLAWS: dict[str, dict[str, Make]] = {
    "answers_as_a_register_does": {
        "writes unconditionally": _wrong(swap=lambda s, new, old: _put(s, new)),
        "replaces unconditionally": _takes(lambda s, got, new, old: old is not None),
        "compares revisions as a case-blind collation does": _takes(
            lambda s, got, new, old: old and got.revision.lower() == old.lower()
        ),
        "accepts any revision there ever was": _takes(
            lambda s, got, new, old: s.notes.update({new.revision: 1}) or old in s.notes
        ),
        "writes a resend again": _takes(lambda s, got, new, _: s.notes.setdefault(new.revision, new) is not new),
        "takes a resend for won whatever happened since": _replies(
            lambda s, new, old, got: (s.notes.setdefault if got is new else s.notes.get)(new.revision, got)
        ),
        "returns the new record although it lost": _replies(lambda s, new, old, got: new),
        "keeps fields that are gone": _replies(_merges),
        **{
            f"loses {each.name}": _keeps(lambda record, name=each.name: replace(record, **{name: _ABSENT[name]}))  # type: ignore[misc]
            for each in fields(Record)
            if each.name not in {"key", "schema", "revision"}
        },
        "keeps the status as text": _keeps_fields(("status",), Status, str),
        "rounds numbers as JavaScript does": _numbers(lambda number: int(float(number))),
        "keeps empty text as nothing": _texts(lambda text: text or None),
        "trims text": _texts(str.strip),
        "keeps three bytes of UTF-8": _texts(lambda text: "".join(each for each in text if each < "\U00010000")),
        "keeps bytes as text": _results(lambda data: data.decode("latin1") if isinstance(data, bytes) else data),
        "keeps text as bytes": _results(lambda data: data.encode() if isinstance(data, str) else data),
        "keeps empty lists in steps as mappings": _keeps(
            lambda record: replace(record, steps=json.loads(json.dumps(record.steps).replace("[]", "{}")))
        ),
        "finds what is not there": _wrong(get=lambda s, key: _get(s, key) or replace(a_record(), key=key)),
        "deletes unconditionally": _wrong(delete=lambda s, key, _: s._records.pop(key, None) is not None),
        "calls every deletion done": _wrong(delete=lambda *asked: _delete(*asked) or True),
        "answers reads from a replica": _wrong(get=_lags_behind),
    },
    "keeps_keys_apart": {
        "folds keys": _folds_keys(str.casefold),
        "takes keys for paths": _folds_keys(os.path.normpath),
        "keeps 2000 bytes of a key": _folds_keys(lambda key: key.encode()[:2000].decode()),
    },
    "large_record_is_kept_whole_or_refused_unwritten": {
        "keeps 64 KB of a result": _results(lambda data: data[:65_535]),
        "lets the driver's error out": _limited(lambda *_: _raise(BrokenInside("Data too long for column 'result'"))),
        "refuses a record and writes it": _limited(_refuses_and_writes),
    },
    "only_an_outcome_with_an_expiry_is_forgotten": {
        "takes the lease for the record's life": _forgets(lambda s, found: found.lease_until < s.now()),
        "forgets outcomes without an expiry": _forgets(
            lambda s, found: found.status in OUTCOMES and found.updated_at + 604_800_000 < s.now()
        ),
        "lets an expiry stick to its key": _wrong(  # EXPIREAT, then HSET by the next claim
            swap=lambda s, new, old: s.notes.update({new.key: new} if new.expires_at else {}) or _swap(s, new, old),
            get=lambda s, key: None if key in s.notes and _is_over(s, s.notes[key]) else _get(s, key),
        ),
        "guards final states itself": _replies(
            lambda s, new, old, got: _put(s, old) if old and old.status is not Status.IN_PROGRESS else got
        ),
    },
    "expired_outcome_is_whole_or_absent_and_gives_way": {
        "hides an expired outcome and keeps its key": _wrong(
            swap=lambda s, new, old: got if (got := _swap(s, new, old)) is new else _unless_over(s, got),
            get=lambda s, key: _unless_over(s, _get(s, key)),
        ),
        "returns half an expired outcome": _wrong(
            get=lambda s, key: replace(found, result=None) if (found := _get(s, key)) and _is_over(s, found) else found
        ),
    },
    "calls_at_once_have_one_history": {
        "checks, then acts": _wrong(
            swap=_checks_then_acts,
            delete=lambda s, key, old: (
                (got := _get(s, key)) is not None
                and got.revision == old
                and _after(0.0005, lambda: s._records.pop(key, None) is not None)
            ),
        ),
        "reads the reply in a second request": _replies(
            lambda s, new, old, got: _after(0.0005, lambda: _get(s, new.key) if got is new else got)
        ),
        "answers another thread from a snapshot": _wrong(get=_reads_a_snapshot),
        "may be used by one thread only": _wrong(swap=_one_thread_only),
        "scans one page": _wrong(scan=lambda s, **wanted: islice(_scan(s, **wanted), 5)),
        "locks in the instance only": _wrong(
            swap=lambda s, new, old: (s.alone.acquire(), _checks_then_acts(s, new, old), s.alone.release())[1]
        ),
    },
    "scan_finds_what_is_asked_for": {
        "passes over the label": _scans(label=lambda found, wanted: True),
        "scans for labels with a case-blind collation": _scans(label=lambda got, wanted: got.lower() == wanted.lower()),
        "takes a label for a pattern": _scans(label=fnmatch),
        "scans for the start of a name": _scans(task=str.startswith),
        "leaves out what has the name": _scans(name=operator.eq),
        "leaves out labels that begin so": _scans(label_prefix=operator.eq),
    },
    "provisioning_and_closing_again_are_harmless": {
        "provisions anew": _wrong(provision=lambda s: s._records.clear()),
        "provisions once only": _wrong(provision=_provisions_alone),
        "is of no use once closed": _wrong(
            close=lambda s: s.notes.update(closed=1),
            get=lambda s, key: _raise(BrokenInside("closed")) if s.notes else _get(s, key),
        ),
    },
    "clock_counts_milliseconds_and_does_not_jump": {
        "counts seconds": _wrong(now=lambda s: time.time_ns() // 1_000_000_000),
        "stands": _wrong(now=lambda s: 1_800_000_000_000),
        "jumps by seconds": _wrong(now=lambda s: time.time_ns() // 1_000_000_000 * 1000 + 999),
    },
}
for _name in ("replaces unconditionally", "answers reads from a replica"):
    FLAWS["calls_at_once_have_one_history"][_name] = FLAWS["answers_as_a_register_does"][_name]


class ModestContract(StoreContract):
    """The contract within one process, on two instances over the same records."""

    shared_by_processes = False

    def reopen(self, store: Any) -> Store:
        another: Store = store.reopened()
        return another


class Files:
    """A file for each record, under a lock that other processes do not see."""

    def __init__(self, folder: Path, flaw: str) -> None:
        self.folder, self.flaw, self.pid = folder, flaw, os.getpid()
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


FLAWS_OF_PROCESSES = {
    "calls_of_processes_have_one_history": ["locks threads only"],
    "store_survives_a_fork": ["inherited", "hangs", "says goodbye for its parent"],
    "newer_layout_is_refused_and_left_alone": ["ends a scan"],
}


@pytest.mark.parametrize(
    ("noticed_by", "flaw"), [(test, flaw) for test, flaws in FLAWS_OF_PROCESSES.items() for flaw in flaws]
)
def test_flaw_of_processes_is_noticed(
    noticed_by: str, flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks that only threads see, connections that a child inherited, and locks that nobody gives back."""
    monkeypatch.setattr("celery_idempotent.testing.contract.parallel._CHILD_ANSWERS_WITHIN", 1)

    with pytest.raises((AssertionError, BrokenInside, StoreMisconfigured)):
        getattr(StoreContract(), f"test_{noticed_by}")(Files(tmp_path, flaw))


class QuickOutageContract(OutageContract):
    """So that slowness is noticed soon."""

    answers_within = 0.04


def _fails(*_: object) -> Any:
    raise StoreUnavailable("outage", "swap", "connection refused") from BrokenInside("refused")


def _outage(**verbs: Any) -> Make:
    return _wrong(**{**dict.fromkeys(_VERBS, _fails), **verbs})


_VERBS = ("swap", "get", "scan", "delete")
_ANSWERS: dict[str, Callable[..., Any]] = {
    "lets the driver's error out": lambda *_: _raise(BrokenInside("connection refused")),
    "hides the cause": lambda *_: _raise(StoreUnavailable("outage", "swap", "connection refused")),
    "raises a false alarm": lambda *_: _raise(StoreMisconfigured("o", "swap", "no such host"), BrokenInside("refused")),
    "waits": lambda *_: _after(0.05, _fails),
}
OUTAGES: dict[str, dict[str, Make]] = {
    "no_answer_is_no_answer": {
        **{f"{verb} invents an answer": _outage(**{verb: lambda *_: ()}) for verb in _VERBS},
        **{f"swap {flaw}": _outage(swap=answer) for flaw, answer in _ANSWERS.items()},
    },
    "closing_without_a_server_is_harmless": {"cannot be closed": _outage(close=lambda s: _raise(BrokenInside("bye")))},
}


def _purges(
    chooses: Callable[[Record, int], bool] = lambda record, now: (record.expires_at or now) * 1000 <= now,
    delete: Callable[[Any, Record], object] = lambda s, each: _delete(s, each.key, each.revision),
) -> Make:
    def purge(s: Any, limit: int) -> int:
        chosen = [each for each in _scan(s) if chooses(each, s.now())][:limit]
        return len([delete(s, each) for each in chosen])

    return _wrong(purge=purge)


PURGES: dict[str, dict[str, Make]] = {
    "purge_deletes_forgotten_outcomes_only": {
        "every outcome": _purges(lambda record, now: record.status in OUTCOMES),
        "over leases": _purges(lambda record, now: record.lease_until < now),
        "seconds for milliseconds": _purges(lambda record, now: (record.expires_at or now) < now),
        "boasts": _wrong(purge=lambda s, limit: (MemoryStore.purge(s, limit), limit)[1]),
    },
    "purge_keeps_to_its_limit": {"unlimited": _wrong(purge=lambda s, limit: MemoryStore.purge(s, 1000))},
    "purge_lets_claims_win": {
        "checks, then acts": _purges(delete=lambda s, each: _after(0.0002, lambda: s._records.pop(each.key, None))),
    },
}


def _no_table(*_: object) -> Any:
    raise StoreMisconfigured("m", "verify", "no such table")


CHECKS: dict[str, dict[str, Make]] = {
    "verify_accepts_a_working_store_and_writes_nothing": {
        "leaves a trace": _wrong(verify=lambda s: _swap(s, a_record(), None)),
        "is not sure": _wrong(verify=lambda s: _raise(StoreUnavailable("m", "verify", "who knows"))),
    },
    "verify_refuses_a_store_that_cannot_work": {
        "looks away": _wrong(verify=lambda s: None, swap=_no_table),
        "believes it works": _wrong(verify=_no_table),
    },
}

CONTRACTS: dict[type, dict[str, dict[str, Make]]] = {
    ModestContract: FLAWS,
    QuickOutageContract: OUTAGES,
    PurgeableContract: PURGES,
    VerifiableContract: CHECKS,
}


@pytest.mark.parametrize(
    ("contract", "noticed_by", "flaw"),
    [
        (contract, test, flaw)
        for contract, tests in CONTRACTS.items()
        for test, flaws in tests.items()
        for flaw in flaws
    ],
)
def test_wrong_store_is_noticed(contract: type, noticed_by: str, flaw: str) -> None:
    """A store with this mistake fails the test that is there to notice it; a race is met by chance, in twenty tries."""
    make, test = CONTRACTS[contract][noticed_by][flaw], getattr(contract(), f"test_{noticed_by}")

    assert any(_fails_with(partial(test, make())) for _ in range(20))


def _fails_with(test: Callable[[], object]) -> bool:
    try:
        test()
    except (AssertionError, BrokenInside, StoreUnavailable, RuntimeError, TypeError):
        return True
    return False


def test_stores_without_a_flaw_are_right(tmp_path: Path) -> None:
    """The negative control of every way to be wrong above."""
    rights: list[tuple[Any, Iterable[str], Any]] = [
        (StoreContract(), FLAWS_OF_PROCESSES.keys() - {"calls_of_processes_have_one_history"}, Files(tmp_path, "")),
        (PurgeableContract(), PURGES, _purges()()),
        (VerifiableContract(), ["verify_accepts_a_working_store_and_writes_nothing"], Wrong(verify=lambda s: None)),
        (VerifiableContract(), ["verify_refuses_a_store_that_cannot_work"], Wrong(verify=_no_table, swap=_no_table)),
        (QuickOutageContract(), OUTAGES, _outage()()),
        (ModestContract(), ["answers_as_a_register_does"], _keeps(lambda record: record)()),
        (ModestContract(), ["keeps_keys_apart"], _folds_keys(str)()),
        (ModestContract(), ["scan_finds_what_is_asked_for"], _scans()()),
        (ModestContract(), ["calls_at_once_have_one_history"], _wrong()()),
    ]
    for contract, names, store in rights:
        for name in names:
            getattr(contract, f"test_{name}")(store)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_test_of_the_contract_can_fail(contract: type) -> None:
    """Each is the one that notices some mistake above; a test that nothing fails proves nothing."""
    noticing = {*CONTRACTS[contract], *(FLAWS_OF_PROCESSES if contract is ModestContract else ())}

    assert noticing == {name.removeprefix("test_") for name in dir(contract) if name.startswith("test_")}
