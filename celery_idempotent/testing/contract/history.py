"""Histories of concurrent calls on one key, and whether a compare-and-swap register can have produced them.

A history is linearizable (Herlihy and Wing, 1990) if every call can be given one moment between its start
and its end such that the replies are those of a register to which the calls came one after the other, in
the order of these moments. Revisions are unique, so the search has hardly ever a choice; it is the search
of Wing and Gong (1993) with Lowe's memory of configurations seen (2017).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store

_Kind = Literal["swap", "get", "delete"]
_Reply = TypeVar("_Reply", Record | None, bool)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call on one key, and the revision or verdict that came back; in nanoseconds of one clock."""

    kind: _Kind
    new: str | None
    expected: str | None
    reply: str | bool | None
    started: int
    ended: int


def is_linearizable(calls: Sequence[Exchange]) -> bool:
    """Whether a register that was empty at first can have given these replies."""
    everything = (1 << len(calls)) - 1
    seen: set[tuple[int, str | None]] = set()
    configurations: list[tuple[int, str | None]] = [(0, None)]
    while configurations:
        done, stored = configurations.pop()
        if done == everything:
            return True
        if (done, stored) in seen:
            continue
        seen.add((done, stored))
        waiting = [index for index in range(len(calls)) if not done >> index & 1]
        first_end = min(calls[index].ended for index in waiting)
        for index in waiting:
            call = calls[index]
            changes = call.kind != "get" and stored == call.expected
            after = call.new if changes else stored
            if call.started <= first_end and call.reply == (changes if call.kind == "delete" else after):
                configurations.append((done | 1 << index, after))
    return False


def shown(calls: Sequence[Exchange]) -> str:
    """The calls in order of their starts, one a line, for the message of a failed test."""
    origin = min((call.started for call in calls), default=0)
    asked = {"get": "get", "swap": "swap {0.expected} by {0.new}", "delete": "delete {0.expected}"}
    return "\n".join(
        f"{(call.started - origin) / 1e6:9.3f} to {(call.ended - origin) / 1e6:9.3f} ms  "
        f"{asked[call.kind].format(call)} -> {call.reply}"
        for call in sorted(calls, key=lambda call: call.started)
    )


class RecordedKey:
    """A store narrowed to one key, which keeps the history of it; for use by several threads."""

    def __init__(self, store: Store, key: str) -> None:
        self.key = key
        self._store = store
        self._written: dict[str, Record] = {}
        #: What was asked and replied so far.
        self.calls: list[Exchange] = []

    def swap(self, new: Record, expected: str | None) -> Record | None:
        assert new.key == self.key
        self._written[new.revision] = new
        return self._ask("swap", new.revision, expected, lambda: self._store.swap(new, expected))

    def get(self) -> Record | None:
        return self._ask("get", None, None, lambda: self._store.get(self.key))

    def delete(self, expected: str) -> bool:
        return self._ask("delete", None, expected, lambda: self._store.delete(self.key, expected))

    def _ask(self, kind: _Kind, new: str | None, expected: str | None, ask: Callable[[], _Reply]) -> _Reply:
        started = time.monotonic_ns()
        reply = ask()
        ended = time.monotonic_ns()
        if isinstance(reply, Record):
            assert reply == self._written.get(reply.revision), f"nobody wrote this record: {reply}"
        told = reply.revision if isinstance(reply, Record) else reply
        self.calls.append(Exchange(kind, new, expected, told, started, ended))
        return reply
