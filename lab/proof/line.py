"""The line between workers and a store, which a campaign can cut at the next write."""

from __future__ import annotations

import re
from collections import Counter

from celery_idempotent.testing.stores import Fault
from lab.proxy import Proxy

_NONCE = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""Revisions and owners. Two writes that name the same ones are the same write."""


class Line(Proxy):
    """Forwards to one server; ``writes`` finds, in a request that writes a record, its task as the first group."""

    def __init__(self, host: str, port: int, writes: str) -> None:
        super().__init__(port, host=host)
        #: How many writes went through, or were lost, by task; and how many whose reply was lost were sent again.
        self.by_task: Counter[str] = Counter()
        self.healed: Counter[str] = Counter()
        self._writes = re.compile(writes.encode())
        self._planned: list[Fault] = []
        self._unanswered: set[tuple[bytes, ...]] = set()

    def lose(self, what: Fault) -> None:
        """Cut the next write's connection before the server gets it, or when the server has answered it."""
        with self._lock:
            self._planned.append(what)

    def decide(self, request: bytes, before: bytes) -> Fault:
        found = self._writes.search(request)
        if found is None:
            return "none"
        task, nonces = found[1].decode(), tuple(_NONCE.findall(request))
        self.by_task[task] += 1
        fault = self._planned.pop(0) if self._planned else "none"
        if fault == "reply lost":
            self._unanswered.add(nonces)
        elif fault == "none" and nonces in self._unanswered:
            self._unanswered.discard(nonces)
            self.healed[task] += 1
        return fault
