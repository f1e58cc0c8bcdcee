"""What belongs to one process is made once by it, and never taken from a parent."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from celery_idempotent.stores import forks
from celery_idempotent.stores.forks import PerProcess
from celery_idempotent.testing.contract.parallel import race

_T = TypeVar("_T")


class _Met(PerProcess[_T]):
    """One whose first looks all find nothing, because each waits for the others'."""

    def __init__(self, make: Callable[[], _T], parties: int, *, alone: bool) -> None:
        super().__init__(make, alone=alone)
        self._all_looked, self._looked = threading.Barrier(parties), threading.local()

    def made(self) -> _T | None:
        found = super().made()
        if not hasattr(self._looked, "once"):
            self._looked.once = True
            self._all_looked.wait(10)
        return found


@pytest.mark.parametrize("alone", [True, False])
def test_threads_that_come_at_once_take_one_value(alone: bool) -> None:
    """One makes it, while nobody forks; or all do, as a maker that waits for a server keeps nobody back, nor a fork."""
    made: list[tuple[object, bool]] = []
    all_make, asking = threading.Barrier(1 if alone else 4), threading.Lock()

    def could_fork() -> bool:
        if could := forks.making.acquire(blocking=False):
            forks.making.release()
        return could

    def make() -> object:
        all_make.wait(10)
        with asking, ThreadPoolExecutor(1) as another:
            made.append((value := object(), another.submit(could_fork).result()))
        return value

    got = race([_Met(make, 4, alone=alone)] * 4)
    assert [was_free for _, was_free in made] == ([False] if alone else [True] * 4)
    assert len(set(got)) == 1
    assert got[0] in [each for each, _ in made]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("os.getpid", lambda: -1),
        # A system gives the id of a process that is gone to another; what that one has made crossed forks since.
        ("celery_idempotent.stores.forks._forks", [*forks._forks, None, None]),
    ],
)
def test_child_makes_its_own_and_keeps_what_it_inherits(name: str, changed: Any, monkeypatch: Any) -> None:
    """It neither uses nor closes what its parent uses, nor lets it be collected."""
    value = PerProcess(object)
    parents = value()
    monkeypatch.setattr(name, changed)
    assert value.made() is None
    assert value() is value.made() is not parents
    value.forget()
    assert list(value._values.values()) == [parents]
