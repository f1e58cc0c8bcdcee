"""The line between workers and a store, which a campaign can cut at the next write."""

from __future__ import annotations

import re
from collections import Counter

from celery_idempotent.testing.stores import Fault
from lab.proxy import Proxy

__all__ = ["Line"]

_NONCE = re.compile(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""Revisions and owners. Two writes that name the same ones are the same write."""


class Line(Proxy):
    """Forwards to one server; see :class:`lab.proxy.Proxy`.

    Args:
        host: Where the server is.
        port: And at which port.
        writes: Finds, in a request that writes a record, the name of its task as the first group.
    """

    def __init__(self, host: str, port: int, writes: str) -> None:
        super().__init__(port, host=host)
        self.by_task: Counter[str] = Counter()
        """How many writes went through, or were lost, by task."""
        self.healed: Counter[str] = Counter()
        """How many writes whose reply was lost were sent again, by task."""
        self._writes = re.compile(writes.encode())
        self._planned: list[Fault] = []
        self._unanswered: set[tuple[bytes, ...]] = set()

    def lose_request(self) -> None:
        """Cut the next write's connection before the server gets it."""
        with self._lock:
            self._planned.append("request lost")

    def lose_reply(self) -> None:
        """Cut the next write's connection when the server has answered it."""
        with self._lock:
            self._planned.append("reply lost")

    def decide(self, request: bytes, before: bytes) -> Fault:
        """See :meth:`lab.proxy.Proxy.decide`: what is planned, for a write, and nothing for anything else."""
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
