"""What belongs to one process is made once by it, and never taken from a parent."""

import threading

import pytest

from celery_idempotent.stores import forks
from celery_idempotent.stores.forks import PerProcess
from celery_idempotent.testing.contract.parallel import race


def _first_of_many(*, alone: bool) -> tuple[list[object], list[object]]:
    """What was made, and what each of four threads got, all of which found nothing made."""
    made: list[object] = []
    arrived = threading.Barrier(1 if alone else 4)

    def make() -> object:
        arrived.wait(10)
        made.append(object())
        return made[-1]

    value = PerProcess(make, alone=alone)
    return made, race([value] * 4)


def test_one_thread_makes_it_for_all() -> None:
    """Others that need it meanwhile wait."""
    made, got = _first_of_many(alone=True)
    assert got == made * 4


def test_threads_that_may_not_wait_take_the_first() -> None:
    """A maker that waits for a server keeps nobody back, and still there is one value."""
    made, got = _first_of_many(alone=False)
    assert len(made) == 4
    assert len(set(got)) == 1


def test_child_makes_its_own_and_keeps_what_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither uses nor closes what its parent uses, nor lets it be collected."""
    value = PerProcess(object)
    parents = value()
    monkeypatch.setattr("os.getpid", lambda: -1)

    assert value.made() is None
    assert value() is value.made() is not parents
    value.forget()
    assert list(value._values.values()) == [parents]


def test_process_that_got_the_id_of_an_ancestor_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system gives the id of a process that is gone to another; what that one has made crossed forks since."""
    value = PerProcess(object)
    ancestors = value()
    monkeypatch.setattr(forks, "_forks", [*forks._forks, None, None])

    assert value.made() is None
    assert value() is not ancestors
