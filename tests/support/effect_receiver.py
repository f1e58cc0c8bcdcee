"""A receiver of effects: it repeats what comes without a key, and recognises what comes with one."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

charges: Counter[str] = Counter()
_known: set[str] = set()


def charge(order: str, _key: str = "") -> None:
    """An effect that is repeated, whatever its key."""
    charges[order] += 1


def charge_once(order: str, key: str) -> None:
    """An effect under a key that the receiver knows again."""
    if key not in _known:
        _known.add(key)
        charges[order] += 1


async def slowly(call: Callable[[], None]) -> None:
    """A client that waits before it sends."""
    await asyncio.sleep(0)
    call()


class Booking:
    """A transaction of somebody else's, which locks its table, and is committed unless an exception leaves it."""

    _table = threading.Lock()

    def __init__(self, order: str) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._table.acquire()

    def __exit__(self, kind: Any, *_: Any) -> None:
        charges[self._order] += kind is None
        self._table.release()


class Charging:
    """A context manager of somebody else's, that charges on its way in."""

    def __init__(self, order: str) -> None:
        self._order = order

    def __enter__(self) -> None:
        charge(self._order)

    def __exit__(self, *_: Any) -> None: ...
