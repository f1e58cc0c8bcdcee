"""The races of the store contract end, whatever becomes of their threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.testing.contract.parallel import race


def test_race_without_one_of_its_threads_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are at the start do not wait for one that the system refuses."""
    start: Callable[..., int] = threading._start_new_thread  # type: ignore[attr-defined]
    left = iter([True, True, False])

    def refuse_the_third(*arguments: Any) -> int:
        if next(left):
            return start(*arguments)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refuse_the_third)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        race([int] * 4)
