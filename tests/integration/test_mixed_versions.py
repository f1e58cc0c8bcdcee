"""Records, one version's read and written by the other: nothing runs twice, and what is lost is for people alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import Record, Status, StoreUnavailable, open_store
from celery_idempotent.engine import verdicts
from celery_idempotent.protocol.record import marked, trace_of
from celery_idempotent.protocol.store import Store
from tests.integration.rolling_shop import act, app
from tests.support.previous import ROOT, Previous, python
from tests.support.stores import a_store

STORES = ("dynamodb", "redis", "postgres")
SHOP = ("-m", "tests.integration.rolling_shop")
CLI = ("-m", "celery", "-A", "tests.integration.rolling_shop", "idempotency")
ORDER = "o-1"
KEY = app.tasks["charge"].idempotency_key_for(ORDER)


@dataclass(frozen=True)
class Shop:
    """One store, and a shop of each version on it."""

    url: str
    store: Store
    previous: Previous
    folder: Path

    @property
    def is_sql(self) -> bool:
        """Whether a row keeps what the previous version does not know."""
        return self.url.startswith("postgres")

    def before(self, *arguments: str) -> str:
        """What the previous version prints."""
        return self.previous.run(*arguments, environ={"STORE": self.url})

    def now(self, *arguments: str) -> str:
        """What this version prints."""
        return python(*arguments, environ={"STORE": self.url, "PYTHONPATH": str(ROOT)}, cwd=self.folder)

    def charged_before(self) -> Any:
        """The previous version's charge."""
        return json.loads(self.before(*SHOP, "charge", ORDER))

    def charged_now(self) -> Any:
        """This version's."""
        return act(self.store, "charge", ORDER)

    def record(self) -> Record:
        """What this version reads."""
        found = self.store.get(KEY)
        assert found is not None
        return found


@pytest.fixture(scope="module", params=STORES)
def url(request: pytest.FixtureRequest, previous: Previous) -> Iterator[str]:
    """A store that the previous version has provisioned, and this one after it."""
    with a_store(request.param) as site:
        previous.run(*SHOP, "provision", "", environ={"STORE": site.url})
        yield site.url


@pytest.fixture
def shop(url: str, previous: Previous, tmp_path: Path) -> Iterator[Shop]:
    """Both versions on an empty store."""
    store = open_store(url)
    store.provision()
    for each in list(store.scan()):
        store.delete(each.key, each.revision)
    yield Shop(url, store, previous, tmp_path)
    store.close()


def test_what_is_frozen_is_what_the_previous_version_says(previous: Previous) -> None:
    """The unit tests hold this version against a list; the list is held against that version here."""
    frozen = json.loads((ROOT / "tests" / "unit" / "previous_version.json").read_text())
    assert json.loads(previous.run("-m", "tests.support.wire_names")) == frozen


def test_an_outcome_of_either_version_is_replayed_by_the_other(shop: Shop) -> None:
    """The same key, fingerprint and encoding of results; what the other one does not know is not missed."""
    first = shop.charged_now()
    assert first["ran"] == [ORDER]
    assert shop.charged_before() == {"result": first["result"], "ran": []}
    assert shop.store.delete(KEY, shop.record().revision)
    second = shop.charged_before()
    assert second["ran"] == [ORDER]
    assert second["result"]["package"] != first["result"]["package"]
    assert second["result"]["effect_key"] == first["result"]["effect_key"]
    assert shop.charged_now() == {"result": second["result"], "ran": []}


def test_what_either_publisher_recorded_is_run_by_the_other(shop: Shop) -> None:
    """A record without an attempt is nobody's outcome and nobody's claim."""
    shop.before(*SHOP, "publish", ORDER)
    assert shop.record().attempts == 0
    assert shop.charged_now()["ran"] == [ORDER]
    assert shop.store.delete(KEY, shop.record().revision)
    act(shop.store, "publish", ORDER)
    assert shop.record().attempts == 0
    assert shop.charged_before()["ran"] == [ORDER]


def test_a_forgotten_operation_is_a_new_one_for_the_previous_version(shop: Shop) -> None:
    """It knows no verdict `forget`: what it sees is an outcome past its time, and the token grows from there."""
    first = shop.charged_now()["result"]
    forgotten = verdicts.forget(shop.store, KEY, by="ann", reason="asked for by the customer")
    second = shop.charged_before()
    assert second["ran"] == [ORDER]
    assert shop.record().label == ""
    assert shop.record().verdict == (forgotten.verdict if shop.is_sql else {})
    assert second["result"]["token"] > max(first["token"], forgotten.fencing_token)
    assert shop.charged_now() == {"result": second["result"], "ran": []}


def test_a_verdict_of_this_version_is_obeyed_by_the_previous_one(shop: Shop) -> None:
    """What it does not know stays in an SQL row; in other stores label, trace and verdict are lost, and no more."""
    seen = unknown(shop)
    released = verdicts.rerun(shop.store, KEY, by="ann", reason="the provider has no such charge")
    assert released.verdict["by"] == "ann"
    told = shop.charged_before()
    assert told["ran"] == [ORDER]
    record = shop.record()
    assert (record.status, record.attempts, record.created_at) == (Status.COMPLETED, seen.attempts + 1, seen.created_at)
    assert record.fencing_token == told["result"]["token"] > seen.fencing_token
    kept = (record.label, record.trace, record.verdict)
    assert kept == ((released.label, released.trace, released.verdict) if shop.is_sql else ("", "", {}))
    assert trace_of(record) == "", "it is not that of the attempt that did the work"


@pytest.mark.parametrize("url", ["redis"], indirect=True)  # what commands show depends on no store
def test_commands_of_each_version_show_records_of_the_other(shop: Shop) -> None:
    """A record that lacks what this version shows is shown without it; one that has more is shown without that."""
    shop.charged_before()
    assert KEY in shop.now(*CLI, "show", KEY)
    assert "COMPLETED" in shop.now(*CLI, "list")
    shop.store.delete(KEY, shop.record().revision)
    unknown(shop)
    assert KEY in shop.before(*CLI, "show", KEY)
    shop.before(*CLI, "resolve", KEY, "--rerun", "--yes")
    assert shop.record().status is Status.RELEASED
    assert shop.charged_now()["ran"] == [ORDER]


def unknown(shop: Shop) -> Record:
    """An operation of this version whose outcome nobody knows, with all that the previous version does not know."""
    record = in_doubt(shop.store.now())
    assert shop.store.swap(record, None) == record
    return record


def in_doubt(now: int) -> Record:
    """As a store of this version gets it."""
    return Record(
        key=KEY,
        status=Status.UNKNOWN,
        revision="1" * 32,
        owner="2" * 32,
        fencing_token=now,
        lease_until=now,
        fingerprint=None,
        attempts=3,
        created_at=now - 1000,
        updated_at=now,
        task="charge",
        task_id="t-1",
        worker="worker@host",
        label="o-1",
        trace=marked("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "2" * 32),
        verdict={"action": "release", "by": "bob", "reason": "", "at": now, "status": "IN_PROGRESS", "attempt": 2},
        error="nobody knows",
    )


@pytest.mark.parametrize("name", ["postgres", "mariadb", "sqlite"])
def test_a_table_that_is_not_upgraded_yet_runs_nothing_and_says_so(
    name: str, previous: Previous, tmp_path: Path
) -> None:
    """This version before its `provision` is an outage, and the previous one goes on undisturbed."""
    with a_store(name) as site:
        previous.run(*SHOP, "provision", "", environ={"STORE": site.url})
        store = open_store(site.url)
        shop = Shop(site.url, store, previous, tmp_path)
        with pytest.raises(StoreUnavailable, match="provision"):
            store.get(KEY)
        with pytest.raises(StoreUnavailable, match="provision"):
            store.swap(in_doubt(1), None)
        first = shop.charged_before()
        assert first["ran"] == [ORDER]
        store.provision()
        assert shop.charged_now() == {"result": first["result"], "ran": []}
        store.close()
