"""The command that takes all operations along to another store."""
# mypy: allow-untyped-decorators

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.stores import memory, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.commands import run


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Two stores on disk."""
    found = [f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("source", "target")]
    for each in found:
        open_store(each).provision()
    return found


@pytest.fixture
def stores(urls: list[str]) -> Iterator[list[Store]]:
    opened = [open_store(each) for each in urls]
    yield opened
    for each in opened:
        each.close()


def _copy(*words: str) -> Any:
    return run(Celery(set_as_current=False), "copy", *words)


def _keep(store: Store, **values: Any) -> Record:
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record


def test_everything_is_copied_as_it_is_and_told(urls: list[str], stores: list[Store]) -> None:
    """Each status, whatever is in the record; again, it is there already."""
    source, target = stores
    records = [
        _keep(source, takeovers=2, steps={"charge": {"result": "1"}}, process="p", lease_until=1),
        _keep(source, status=Status.UNKNOWN, error="why", verdict={"by": "ann"}),
        _keep(source, status=Status.RELEASED, fingerprint=None, task="mail"),
        a_completion(a_record()).but(result=b"\xff", content_type="x/y", expires_at=4_000_000_000, task="mail"),
    ]
    source.swap(records[-1], None)
    other = len([each for each in records if each.task != "mail"])

    shown = _copy(*urls, "--dry-run")
    assert (shown.exit_code, "2 of mail to copy" in shown.output) == (1, True)
    assert "nothing would be left" in shown.output
    assert list(target.scan()) == []
    for _ in range(2):
        done = _copy(*urls)
        assert (done.exit_code, "2 of mail copied" in done.output, "nothing is left" in done.output) == (0, True, True)
        assert {each.key: each for each in target.scan()} == {each.key: each for each in records}
    told = json.loads(_copy(*urls, "--json").stdout)
    assert told == {"copied": {"mail": 2, a_record().task: other}, "left": 0, "unreadable": []}


def test_what_no_longer_counts_stays_but_for_a_proof(urls: list[str], stores: list[Store]) -> None:
    """A verdict is kept for longer than the outcome that it was about."""
    source, target = stores
    now = source.now()
    proof = {"by": "ann", "counts_until": now - 1000, "kept_until": now + 600_000}
    _keep(source, status=Status.COMPLETED, expires_at=now // 1000 - 1)
    judged = _keep(source, status=Status.COMPLETED, expires_at=now // 1000 + 600, verdict=proof)

    assert _copy(*urls).exit_code == 0
    assert list(target.scan()) == [judged]


def test_what_is_left_fails_the_command(urls: list[str], stores: list[Store]) -> None:
    """An attempt that runs, a record that was used, or one that cannot be read: each would be lost, or run again."""
    source, target = stores
    running = _keep(source, lease_until=source.now() + 60_000)
    assert "1 left: an attempt is running" in _copy(*urls).output
    source.delete(running.key, running.revision)

    moved = _keep(source, status=Status.RELEASED)
    used = moved.but(revision="other")
    target.swap(used, None)
    for words in ((), ("--dry-run",)):
        done = _copy(*urls, *words)
        assert (done.exit_code, "1 left" in done.output, target.get(moved.key)) == (1, True, used)
    source.delete(moved.key, moved.revision)

    broken = _keep(source, schema=2)
    done = _copy(*urls)
    assert (done.exit_code, "1 left that cannot be read" in done.output) == (1, True)
    assert json.loads(_copy(*urls, "--json").stdout)["unreadable"] == [broken.key]


def test_outcome_is_copied_without_a_result_that_is_too_large(
    urls: list[str], stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect has happened: that is kept, and why the result is not. Of another record, nothing can be left out."""

    class Small(MemoryStore):
        def swap(self, new: Record, expected: str | None) -> Record | None:
            if new.result is not None or new.label == "large":
                raise RecordTooLarge("no room")
            return super().swap(new, expected)

    small = Small()
    monkeypatch.setattr(memory.MemoryStore, "from_url", lambda url: small)
    outcome = _keep(stores[0], status=Status.COMPLETED, result="x", content_type="t", expires_at=4_000_000_000)
    _keep(stores[0], status=Status.RELEASED, label="large")

    assert "1 left" in _copy(urls[0], "memory://").output
    assert list(small.scan()) == [outcome.but(result=None, content_type=None, error="no room")]


def test_store_that_cannot_be_opened_is_named(urls: list[str]) -> None:
    """As by every command."""
    done = _copy(urls[0], "nosuch://")
    assert (done.exit_code, "no store has this scheme" in done.output) == (1, True)
