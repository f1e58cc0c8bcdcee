"""The proxy of the tests: it loses requests and replies that a test names by what stands in them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from celery_idempotent.testing.stores import Fault
from lab.proxy import Proxy

__all__ = ["Cut", "TcpProxy"]


@dataclass
class Cut:
    """A fault of the requests that contain all ``markers``: of ``times`` of them, from the ``nth`` on."""

    fault: Fault
    markers: tuple[bytes, ...]
    nth: int
    times: float
    #: Requests that contained the markers.
    seen: int = 0

    @property
    def struck(self) -> float:
        """Requests that met the fault."""
        return min(max(self.seen - self.nth + 1, 0), self.times)

    def strikes(self, request: bytes, before: bytes) -> bool:
        """Count what now has all markers, and tell whether it meets the fault; see :meth:`lab.proxy.Proxy.decide`."""
        if not self._are_in(before + request) or (before and self._are_in(before)):
            return False
        struck = self.struck
        self.seen += 1
        return self.struck > struck

    def _are_in(self, data: bytes) -> bool:
        return all(marker in data for marker in self.markers)


class TcpProxy(Proxy):
    """A proxy that loses what a test says; see :class:`lab.proxy.Proxy`."""

    def __init__(self, upstream: int, **options: Any) -> None:
        super().__init__(upstream, **options)
        self._cuts: list[Cut] = []

    def cut_request(self, *markers: bytes, nth: int = 1, times: int = 1) -> Cut:
        """Close the connection instead of forwarding the n-th next request that contains all ``markers``."""
        return self._add(Cut("request lost", markers, nth, times))

    def cut_reply(self, *markers: bytes, nth: int = 1, times: int = 1) -> Cut:
        """Close the connection once the server has replied to the n-th next request that contains all ``markers``."""
        return self._add(Cut("reply lost", markers, nth, times))

    @contextlib.contextmanager
    def losing(self, *markers: bytes) -> Iterator[Cut]:
        """Let no request that contains all ``markers`` reach the server inside the block."""
        cut = self._add(Cut("request lost", markers, 1, inf))
        try:
            yield cut
        finally:
            with self._lock:
                self._cuts.remove(cut)

    def decide(self, request: bytes, before: bytes) -> Fault:
        """See :meth:`lab.proxy.Proxy.decide`; the first cut that strikes."""
        struck = [cut.fault for cut in self._cuts if cut.strikes(request, before)]
        return struck[0] if struck else "none"

    def _add(self, cut: Cut) -> Cut:
        with self._lock:
            self._cuts.append(cut)
        return cut
