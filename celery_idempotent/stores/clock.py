"""The clock of a server, learned from its replies: a store's ``now()`` where the server reports milliseconds."""

from collections.abc import Callable

from celery_idempotent import clock as local_clock


class ServerClock:
    """Milliseconds since the epoch on a server's clock, from a local clock and what replies have said.

    Every reply that carries the server's time bounds the offset between both clocks: the server read its
    clock after the request was sent and before the reply came. An offset within the bounds is kept, so that
    jitter of the network does not become jitter of the clock; one outside is moved just inside.

    The ``local`` clock, in milliseconds, is never set back, so a step of this machine's date moves nothing; it goes on
    in suspend, as the server's does. Threads may share it: an offset is one assignment. A forked child goes on with
    what its parent knew.
    """

    def __init__(self, ask: Callable[[], int], local: Callable[[], int] = lambda: int(local_clock.monotonic() * 1000)):
        self._ask = ask
        self._local = local
        self._offset: int | None = None

    def now(self) -> int:
        """The server's time. Costs a request once per process tree, and only if no reply came before."""
        if self._offset is None:
            asked_at = self.before_asking()
            self.learn(self._ask(), asked_at)
        assert self._offset is not None
        return self._local() + self._offset

    def before_asking(self) -> int:
        """What to hand to :meth:`learn` with the reply."""
        return self._local()

    def learn(self, server: int, asked_at: int) -> None:
        """Learn from a reply: ``server`` is truncated, not rounded, ``asked_at`` from :meth:`before_asking`."""
        earliest, latest = server - self._local(), server + 1 - asked_at
        offset = self._offset if self._offset is not None else (earliest + latest) // 2
        self._offset = min(max(offset, earliest), latest)
