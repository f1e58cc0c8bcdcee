"""The command that takes all operations along to another store."""

import json
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
from tests.support.stores import kept

FAR = 4_000_000_000


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Two stores on disk."""
    return [f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("source", "target")]


@pytest.fixture
def stores(urls: list[str]) -> list[Any]:
    opened = [open_store(each) for each in urls]
    for each in opened:
        each.provision()
    return opened


def _copy(*words: str) -> tuple[int, str]:
    done = run(Celery(set_as_current=False), "copy", *words)
    return done.exit_code, done.output


def test_everything_is_copied_as_it_is_and_told(urls: list[str], stores: list[Store]) -> None:
    """Each status, whatever is in the record; again, it is there already."""
    source, target = stores
    outcome = {**a_completion(a_record()).to_fields(), "result": b"\xff", "content_type": "x/y", "task": "mail"}
    records = [
        kept(source, takeovers=2, steps={"charge": {"result": "1"}}, process="p", lease_until=1),
        kept(source, status=Status.UNKNOWN, error="why", verdict={"by": "ann"}),
        kept(source, status=Status.RELEASED, fingerprint=None, task="mail"),
        kept(source, **{**outcome, "status": Status.COMPLETED, "expires_at": FAR}),
    ]

    code, shown = _copy(*urls, "--dry-run")
    assert (code, "2 of mail to copy" in shown, "nothing would be left" in shown) == (1, True, True)
    assert list(target.scan()) == []
    for _ in range(2):
        code, told = _copy(*urls)
        assert (code, "2 of mail copied" in told, "nothing is left" in told) == (0, True, True)
        assert {each.key: each for each in target.scan()} == {each.key: each for each in records}
    counted = {"copied": {"mail": 2, a_record().task: 2}, "left": 0, "unreadable": []}
    assert json.loads(_copy(*urls, "--json")[1]) == counted


def test_what_no_longer_counts_stays_but_for_a_proof(urls: list[str], stores: list[Store]) -> None:
    """A verdict is kept for longer than the outcome that it was about."""
    source, target = stores
    now = source.now()
    proof = {"by": "ann", "counts_until": now - 1000, "kept_until": now + 600_000}
    kept(source, status=Status.COMPLETED, expires_at=now // 1000 - 1)
    judged = kept(source, status=Status.COMPLETED, expires_at=now // 1000 + 600, verdict=proof)

    assert _copy(*urls)[0] == 0
    assert list(target.scan()) == [judged]


def test_what_is_left_fails_the_command(urls: list[str], stores: list[Store]) -> None:
    """An attempt that runs, a record that was used, or one that cannot be read: each would be lost, or run again."""
    source, target = stores
    running = kept(source, lease_until=source.now() + 60_000)
    assert "1 left: an attempt is running" in _copy(*urls)[1]
    source.delete(running.key, running.revision)

    moved = kept(source, status=Status.RELEASED)
    used = moved.but(revision="other")
    target.swap(used, None)
    for words in ((), ("--dry-run",)):
        code, told = _copy(*urls, *words)
        assert (code, "1 left" in told, target.get(moved.key)) == (1, True, used)
    source.delete(moved.key, moved.revision)

    broken = kept(source, schema=2)
    code, told = _copy(*urls)
    assert (code, "1 left that cannot be read" in told) == (1, True)
    assert json.loads(run(Celery(set_as_current=False), "copy", *urls, "--json").stdout)["unreadable"] == [broken.key]


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
    outcome = kept(stores[0], status=Status.COMPLETED, result="x", content_type="t", expires_at=FAR)
    kept(stores[0], status=Status.RELEASED, label="large")

    assert "1 left" in _copy(urls[0], "memory://")[1]
    assert list(small.scan()) == [outcome.but(result=None, content_type=None, error="no room")]
