"""The races of the store contract end, whatever becomes of their threads."""

import threading
from functools import partial

import pytest

from celery_idempotent.testing.contract import parallel
from celery_idempotent.testing.contract.parallel import race


def test_race_without_one_of_its_threads_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are at the start do not wait for one that the system refuses."""
    start, left = threading.Thread.start, iter([True, True, False])

    def refuse_the_third(self: threading.Thread) -> None:
        if not next(left):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        race([int] * 4)


def test_race_that_one_of_its_threads_does_not_come_to_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started, and ended before its first step; nobody tells those at the start."""
    calls: list[None] = []
    run, left = threading.Thread.run, iter([False])

    def end_the_first(self: threading.Thread) -> None:
        if next(left, True):
            run(self)

    monkeypatch.setattr(threading.Thread, "run", end_the_first)
    monkeypatch.setattr(parallel, "_RACERS_COME_WITHIN", 0.1)

    with pytest.raises(threading.BrokenBarrierError):
        race([partial(calls.append, None)] * 4)

    assert calls == []
