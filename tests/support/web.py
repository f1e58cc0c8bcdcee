"""A shop whose page is looked at: its app, its records, and who looks."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from typing import Any

from celery import Celery
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from celery_idempotent import AtMostOnce, IdempotentTask, Keyed, Policy
from celery_idempotent.contrib.web import create_app
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app
from tests.support.waiting import wait_until

TOKEN = "a token that nobody guesses"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOUR = 3_600_000


class Watched(MemoryStore):
    """Counts what is asked of it, waits before a scan as long as it is told to, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.scans = 0
        self.before_scan: Callable[[], object] = lambda: None
        #: What every look at the records meets.
        self.error: Exception | None = None
        #: What the swap of a key meets.
        self.failing: dict[str, Exception] = {}

    def get(self, key: str) -> Record | None:
        if self.error:
            raise self.error
        return super().get(key)

    def scan(self, **asked: Any) -> Iterator[Record]:
        self.scans += 1
        self.before_scan()
        if self.error:
            raise self.error
        for record in super().scan(**asked):
            self.read += 1
            yield record

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if new.key in self.failing:
            raise self.failing[new.key]
        return super().swap(new, expected)


def a_shop(**settings: Any) -> Celery:
    """An app with two tasks."""
    app = an_app(**settings)

    @app.task(
        base=IdempotentTask,
        shared=False,
        name="shop.charge",
        idempotent=Policy(on_takeover="refuse", effects={"charge": Keyed(), "receipt": AtMostOnce()}),
    )
    def charge() -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="shop.refund", idempotent=Policy())
    def refund() -> None: ...

    app.finalize()
    return app


def store_of(app: Celery) -> Store:
    """Where the shop's records are."""
    return runtime_of(app).store


def a_written(shop: Celery, /, status: Status = Status.UNKNOWN, age: int = HOUR, **values: Any) -> Record:
    """A record that a worker of the shop left ``age`` milliseconds ago."""
    at = store_of(shop).now() - age
    times = {"created_at": at - 5_000, "updated_at": at, "fencing_token": at - 5_000, "lease_until": at + 60_000}
    record = replace(a_record(), **{"status": status, "task": "shop.charge", **times, **values})
    assert store_of(shop).swap(record, None) == record
    return record


def now_of(app: Celery, record: Record) -> Record:
    """The record as it is now."""
    found = store_of(app).get(record.key)
    assert found is not None
    return found


def a_program(page: ASGIApp) -> TestClient:
    """Somebody who brings the token with every request."""
    return TestClient(page, headers=BEARER)


def a_browser(page: ASGIApp, root: str = "") -> TestClient:
    """Somebody who has followed the printed link."""
    browser = TestClient(page)
    assert browser.get(f"{root}/", params={"token": TOKEN}).status_code == 200
    return browser


def a_page(app: Celery, *, write: bool = True) -> ASGIApp:
    """The page of ``app``."""
    return create_app(app, token=TOKEN, write=write)


def a_verdict(*records: Record, **fields: str) -> dict[str, Any]:
    """A form that says that it happened, or whatever ``fields`` say instead."""
    said = {"action": "completed", "result": "7", "by": "ann", "reason": "PSP-1", "checked": "yes", **fields}
    return {"seen": [f"{each.revision} {each.key}" for each in records], **said}


def form_token_in(html: str) -> str:
    """The token of the session that stands in the page's forms."""
    found = re.search(r'name="form_token" value="([^"]*)"', html)
    assert found is not None
    return found[1]


def overview_of(person: TestClient) -> str:
    """The overview, once a count is over."""
    text: str = seen(person, "/", lambda page: 'http-equiv="refresh"' not in page.text).text
    return text


def seen(person: TestClient, path: str, is_wanted: Callable[[Any], bool]) -> Any:
    """The first answer that is wanted."""
    return wait_until(lambda: [page for page in [person.get(path)] if is_wanted(page)], "it is shown")[0]


def text_of(html: str) -> str:
    """What a person reads."""
    body = html.partition("<main")[2]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
