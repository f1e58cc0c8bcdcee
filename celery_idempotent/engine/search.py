"""Records as an operator looks for them: by status, task, label, worker and age, or one by whatever is known of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery_idempotent.errors import PolicyError
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.contents import reveal
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, Record, Status
from celery_idempotent.protocol.store import IndexedStore, Store, Wanted

_MOST_NAMED = 5
"""Keys that an error names where a text fits several records."""

_SHORTEST = 4
"""Characters of a beginning that can mean one record."""

FORGOTTEN = "FORGOTTEN"
"""What people are shown instead of the status of an outcome that no longer counts."""


def status_of(record: Record, now: int) -> str:
    """The status, or FORGOTTEN, at ``now`` in milliseconds on the store's clock."""
    return FORGOTTEN if is_forgotten(record, now) else str(record.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records are meant; what is None is not asked about."""

    #: Of this status, or FORGOTTEN, which is then the only status of an outcome that no longer counts.
    status: str | None = None
    #: Of this task.
    task: str | None = None
    #: With this label; a star at its end stands for any rest, as in ``"acme/*"``.
    label: str | None = None
    #: Whose last attempt ran there.
    worker: str | None = None
    #: Written last longer ago than so many milliseconds.
    older_than: int | None = None
    #: With this key, or task id, or beginning of a key or of a key's hash, also behind the task and a colon.
    key: str | None = None

    def matches(self, record: Record, now: int) -> bool:
        """Whether ``record`` is meant at ``now``, in milliseconds on the store's clock."""
        return (
            self.status in (None, status_of(record, now))
            and self.task in (None, record.task)
            and self.worker in (None, record.worker)
            and (self.older_than is None or now - record.updated_at > self.older_than)
            and (self.label is None or self._has_label(record.label))
            and (self.key is None or _is_named(record, self.key))
        )

    def question(self, now: int, oldest: int | None = None) -> Wanted:
        """What to ask a store for; it may give more."""
        return {
            "status": None if self.status in (None, FORGOTTEN) else Status(self.status),
            "task": self.task,
            "worker": self.worker,
            "label": self.whole_label,
            "label_prefix": self.label[:-1] if self.label and not self.whole_label else None,
            "name": None if "\\" in (self.key or "") else self.key,  # printed with escapes, which no store knows
            "before": None if self.older_than is None else now - self.older_than,
            # An outcome may count no longer, and nobody but this side can read every label.
            "oldest": None if self.status in (FORGOTTEN, "COMPLETED", "FAILED") or self.label or self.key else oldest,
        }

    @property
    def whole_label(self) -> str | None:
        """The label, where it is given whole, so that a store can look for it."""
        return None if self.label is None or self.label.endswith("*") else self.label

    def _has_label(self, label: str) -> bool:
        assert self.label is not None
        fits = label == self.label if self.whole_label is not None else label.startswith(self.label[:-1])
        return fits and label != ""  # a record that has none is not meant, also by a label that a script left empty


def find(store: Store, wanted: Filter, *, oldest: int | None = None) -> Iterator[Record]:
    """The records that are meant, in no order; ``PolicyError`` where a label is asked for that cannot be read here.

    With ``oldest``, perhaps only so many of them that were written first.
    """
    now = store.now()
    likely = replace(wanted, label=None)
    for record in _scan(store, wanted.question(now, oldest)):
        if not likely.matches(record, now):
            continue
        if wanted.label is not None and _is_unread(record):
            # Who erases all of a label must not be told that this was all.
            why = (
                f"the label of {record.key} is encrypted with a key that is not here, so what has this label cannot be "
                "told; set idempotency_cipher as workers have it, or ask by key, task or status"
            )
            raise PolicyError("label", repr(wanted.label), why)
        if wanted.matches(record, now):
            yield record


def _scan(store: Store, question: Wanted) -> Iterator[Record]:
    """What a store gives for the whole question, or for as much of it as every store must take."""
    if isinstance(store, IndexedStore):
        return store.scan(**question)
    return store.scan(status=question.get("status"), task=question.get("task"), label=question.get("label"))


def _is_unread(record: Record) -> bool:
    return record.label.startswith(ENCRYPTED_TEXT)


def reads_all(store: Store, wanted: Filter) -> bool:
    """Whether the store says that it must look at all its records to tell which are meant."""
    return isinstance(store, IndexedStore) and store.reads_all(**wanted.question(0))


def look_up(store: Store, text: str, *, task: str | None = None, reading: Callable[..., Any] = iter) -> Record:
    """The one record that ``text`` means: its key, the beginning of its key or of its key's hash, its task id or label.

    With ``task`` only those of that task; ``PolicyError`` for none and for several. Texts may be as they are printed,
    with escapes in place of what is unsafe. Only a whole key is found at once; for all else the store is read, and
    ``reading`` is given what it finds. The record is as people may read it, and never to be written back.
    """
    record = store.get(text)
    if record is not None and task in (None, record.task):
        return reveal(store, record)
    unread, fitting = 0, list[Record]()
    for record in reading(_scan(store, Filter(task=task, key=text).question(0))):
        unread += _is_unread(record)
        is_name = text != "" and text in (record.task_id, record.label, one_line(record.label))
        if is_name or (len(text) >= _SHORTEST and _is_named(record, text)):
            fitting.append(record)
        if len(fitting) > _MOST_NAMED:
            break
    if len(fitting) == 1:
        return reveal(store, fitting[0])
    why = "nothing is recorded under it, and it is no record's task id or label"
    if fitting:
        keys = [each.key for each in fitting[:_MOST_NAMED]]
        more = ", ..." if len(fitting) > _MOST_NAMED else ""
        why = f"it fits several records: {', '.join(keys)}{more}; give the key of one, or --task"
    elif unread:
        why += f" that can be read: {unread} are encrypted, and idempotency_cipher has no key for them here"
    raise PolicyError("key", repr(text), why)


def _is_named(record: Record, text: str) -> bool:
    hashed = record.key.rpartition(":")[2]
    task, _, digest = text.rpartition(":")
    return (
        text in (record.task_id, one_line(record.task_id))
        or any(each.startswith(text) for each in (record.key, one_line(record.key), hashed))
        or (task == record.task and hashed.startswith(digest))
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """How many records there are by status, with FORGOTTEN, and by task; when the oldest of each was written."""

    by_status: Mapping[str, int]
    by_task: Mapping[str, Mapping[str, int]]
    oldest: Mapping[str, int]


def summarised(records: Iterable[Record], now: int) -> Summary:
    by_status: Counter[str] = Counter()
    by_task: dict[str, Counter[str]] = {}
    oldest: dict[str, int] = {}
    for record in records:
        status = status_of(record, now)
        by_status[status] += 1
        by_task.setdefault(record.task, Counter())[status] += 1
        oldest[status] = min(record.updated_at, oldest.get(status, record.updated_at))
    return Summary(by_status, by_task, oldest)
