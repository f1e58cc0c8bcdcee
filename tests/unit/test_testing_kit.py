"""What the test kit gives to users: a store, its place behind an app, and the check of concurrent histories."""

import itertools
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import Policy, idempotent
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import FakeStore
from celery_idempotent.testing.contract import a_record, parallel
from celery_idempotent.testing.contract.parallel import Exchange, is_linearizable, race
from celery_idempotent.testing.stores import installed
from tests.support.deliveries import an_app


def test_fake_store_keeps_time_by_hand_shows_its_records_and_meets_faults() -> None:
    """Its clock stands until it is advanced, forwards or backwards; what was planned happens to the coming swaps."""
    store = FakeStore("request lost", "reply lost")
    before = store.now()
    store.advance(1.5)
    store.advance(-2)
    assert store.now() == before - 500

    lost, written = a_record(), a_record()
    for record in (lost, written):
        with pytest.raises(StoreUnavailable, match=r"FakeStore\(\)"):
            store.swap(record, None)

    assert store.records == [written]
    assert [each.status for each in store.swaps] == [Status.IN_PROGRESS] * 2


def test_installed_store_gives_way_to_what_was_there() -> None:
    """A store, a URL or nothing; also if the block raises."""
    for before in (None, "memory://", FakeStore()):
        app = Celery("a", set_as_current=False)
        if before is not None:
            app.conf.idempotency_store = before
        store: Store = FakeStore()
        with suppress(KeyError), installed(store, app):
            assert app.conf.idempotency_store is store
            raise KeyError
        assert app.conf.get("idempotency_store") is before


def test_store_is_behind_all_that_records() -> None:
    """Behind an app that is not named, in place of a ``store=``, and beside an app whose settings nobody can load."""
    broken, unnamed = Celery("broken", set_as_current=False, config_source="no.such.module"), an_app()
    store = FakeStore()

    @idempotent(Policy("order"), store="memory://")
    def ship(order: str) -> None: ...

    @idempotent(Policy("order"), app=unnamed)
    def pack(order: str) -> None: ...

    with installed(store, broken):
        ship("o-1")
        pack("o-1")

    assert len(store.records) == 2
    assert runtime_of(unnamed).store is not store


def calls(text: str) -> list[Exchange]:
    """``swap a>b=reply 0-1``, ``get =reply 0-1`` and ``delete a>=True 0-1``, with "-" for nothing."""
    words: dict[str, Any] = {"-": None, "": None, "True": True}
    found = []
    for kind, asked, during in (each.split(" ") for each in text.split(", ") if each):
        (expected, _, new), reply = asked.partition("=")[0].partition(">"), asked.partition("=")[2]
        given = [words.get(each, each) for each in (new, expected, reply)]
        found.append(Exchange(kind, *given, *map(int, during.split("-"))))
    return found


FIRST = "swap ->a=a 0-1"
POSSIBLE = {
    "nothing happened": "",
    "one after the other": f"{FIRST}, swap a>b=b 2-3, get =b 4-5",
    "a loser is told who won": "swap ->a=a 0-5, swap ->b=a 0-5",
    "a resend finds its own write": f"{FIRST}, swap ->a=a 2-3",
    "a read beside a write sees the old or the new": f"{FIRST}, swap a>b=b 2-9, get =a 3-4, get =b 5-6, get =b 7-8",
    "a key can be claimed again once deleted": f"{FIRST}, delete a>=True 2-9, swap ->b=b 2-9, swap ->c=b 2-9",
    "a replacement finds nothing beside a deletion": f"{FIRST}, swap a>b=- 2-9, delete a>=True 2-9",
}
IMPOSSIBLE = {
    "two winners of an empty key": "swap ->a=a 0-5, swap ->b=b 0-5",
    "two winners of one revision": f"{FIRST}, swap a>b=b 2-9, swap a>c=c 2-9",
    "a read that goes back": f"{FIRST}, swap a>b=b 2-9, get =b 3-4, get =a 5-6",
    "an acknowledged write that is not seen": f"{FIRST}, get =- 2-3",
    "a write seen before it was asked for": "get =a 0-1, swap ->a=a 2-3",
    "a loser that had won": "swap ->a=- 0-1, get =a 2-3",
    "a deletion of another revision": f"{FIRST}, delete b>=True 2-3",
    "two deletions of one revision": f"{FIRST}, delete a>=True 2-9, delete a>=True 2-9",
    "a record that comes back": f"{FIRST}, delete a>=True 2-3, get =a 4-5",
    "a resend that overwrites a successor": f"{FIRST}, swap a>b=b 2-3, swap ->a=a 4-5",
}


@pytest.mark.parametrize("name", [*POSSIBLE, *IMPOSSIBLE])
def test_history_is_accepted_if_it_is_possible(name: str) -> None:
    """In whatever order its calls are listed."""
    answers = {is_linearizable(each) for each in itertools.permutations(calls((POSSIBLE | IMPOSSIBLE)[name]))}
    assert answers == {name in POSSIBLE}


def test_race_without_one_of_its_threads_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are at the start do not wait for one that the system refuses."""
    start, fates = threading.Thread.start, iter([None, None, RuntimeError("can't start new thread")])

    def refuse_the_third(self: threading.Thread) -> None:
        if error := next(fates):
            raise error
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        race([int] * 4)


def test_race_that_one_of_its_threads_does_not_come_to_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started, and ended before its first step; nobody tells those at the start."""
    made: list[None] = []
    run, left = threading.Thread.run, iter([False])
    monkeypatch.setattr(threading.Thread, "run", lambda self: run(self) if next(left, True) else None)
    monkeypatch.setattr(parallel, "_RACERS_COME_WITHIN", 0.1)
    with pytest.raises(threading.BrokenBarrierError):
        race([partial(made.append, None)] * 4)
    assert made == []
