"""A search as an address has it: what is asked for, and which page of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from celery_idempotent.engine.search import FORGOTTEN, Filter, found
from celery_idempotent.protocol.cipher import Cipher
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.secrecy import revealed
from celery_idempotent.protocol.store import Store

PAGE = 50
"""Records on a page, and of one verdict at most."""

STATUSES = ("UNKNOWN", "IN_PROGRESS", "FAILED", "RELEASED", "COMPLETED", FORGOTTEN)
"""In the order in which they need somebody."""

_LAST_PAGE = 2000
"""Beyond it a search is narrowed: a store is read from its beginning up to the page."""

_OLDEST = 10**10
"""Seconds, 317 years."""

AGES: Mapping[int, str] = {60: "1 minute", 600: "10 minutes", 3600: "1 hour", 86_400: "1 day", 604_800: "7 days"}
"""By seconds, what a form offers; an address may have any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is asked for. Texts are empty where nothing is."""

    label: str = ""
    key: str = ""
    task: str = ""
    status: str = ""
    older: int | None = None
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Search":
        """As an address asks; ``ValueError`` with a sentence where it cannot be understood."""
        status = query.get("status", "").strip().upper()
        if status and status not in STATUSES:
            raise ValueError(f"There is no status {status}; there are {', '.join(STATUSES)}.")
        return cls(
            label=query.get("label", "").strip(),
            key=query.get("key", "").strip(),
            task=query.get("task", "").strip(),
            status=status,
            older=_number("age", query.get("older", ""), _OLDEST),
            page=_number("page", query.get("page", ""), _LAST_PAGE) or 1,
        )

    def query(self, **changes: object) -> dict[str, object]:
        """The same as an address, with ``changes``."""
        asked = {"label": self.label, "key": self.key, "task": self.task, "status": self.status, "older": self.older}
        return {name: value for name, value in {**asked, "page": self.page, **changes}.items() if value}

    def filter(self) -> Filter:
        """Which records are meant."""
        return Filter(
            status=self.status or None,
            task=self.task or None,
            label=self.label or None,
            key=self.key or None,
            older_than=None if self.older is None else self.older * 1000,
        )


def _number(name: str, text: str, most: int) -> int | None:
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise ValueError(f"The {name} is a number of at most {most}.")
    return int(text)


def answer(store: Store, search: Search, cipher: Cipher | None = None) -> tuple[list[Record], bool]:
    """The records of the page, the oldest write first, and whether there are more behind them.

    Reads up to the end of the page and no further. A whole key is one request.
    """
    wanted = search.filter()
    record = store.get(search.key) if search.key else None
    if record is not None:
        record = revealed(cipher, record)
        return [record] if wanted.matches(record, store.now()) else [], False
    first = (search.page - 1) * PAGE
    records = list(islice(found(store, wanted, cipher), first, first + PAGE + 1))
    return sorted(records[:PAGE], key=lambda each: each.updated_at), len(records) > PAGE
