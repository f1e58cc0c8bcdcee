"""The keeper: while a worker lives, no message that it holds is delivered again.

Otherwise a body that takes longer than the visibility timeout, a message that waits behind it, and one whose time has
not come yet are delivered to others, who can only postpone them.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import click
from celery import bootsteps
from celery._state import connect_on_app_finalize
from celery.signals import task_received

from celery_idempotent import clock as local_clock
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import idempotent_tasks, is_enforced, is_protected
from celery_idempotent.integration.broker.extenders import (
    Extender,
    Missing,
    SqsExtender,
    extender_of,
    survive_expired_receipts,
)
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe

logger = logging.getLogger(__name__)

SHARE = 3
"""A message is extended when that part of its visibility timeout is over: two more tries fit in before the rest is."""

_LOOKS = 12
"""Looks within a visibility timeout: a message is extended at most that part later than it is due."""

_LONGEST_PAUSE = 1.0
"""Seconds; looking costs no request."""

_FIRST_PAUSE = 1.0

WARNED_BEFORE = 3600.0
"""Seconds before the end of what a broker allows at which people are told."""


@dataclass(frozen=True, slots=True)
class Held:
    """A message that a worker has and has not acknowledged; times are seconds on one clock that never jumps.

    Args:
        tag: What the broker knows this delivery by.
        queue: What its visibility timeout belongs to.
        received: When it came.
        extended: When its visibility timeout began to run again; at first, when it came.
        is_warned: Whether people were told that its broker will extend it no further.
    """

    tag: str
    queue: str
    received: float
    extended: float
    is_warned: bool = False


def due(held: Iterable[Held], visibility: float, now: float, size: int) -> Sequence[Held]:
    """What to extend now, the oldest first; where that leaves room in a request of ``size``, what is soon due, too.

    A request costs the same with one message in it as with ten.
    """
    every = visibility / SHARE
    oldest_first = sorted(held, key=lambda each: each.extended)
    requests = -(-sum(now - each.extended >= every for each in oldest_first) // size)
    soon = [each for each in oldest_first if now - each.extended >= every / 2]
    return soon[: requests * size]


def extension(held: Held, visibility: float, now: float, longest: float) -> int:
    """Seconds from now for which ``held`` can be made invisible; 0: no more.

    Args:
        held: The message.
        visibility: Its visibility timeout.
        now: The time.
        longest: Seconds after it was received that its broker allows in all.
    """
    return max(0, int(min(visibility, held.received + longest - now)))


def ends_soon(held: Held, now: float, longest: float) -> bool:
    """Whether it is time to tell people that the broker will extend ``held`` no further, and nobody has."""
    return not held.is_warned and now >= held.received + longest - WARNED_BEFORE


def pause(visibilities: Iterable[float]) -> float:
    """Seconds until the next look."""
    return min(_LONGEST_PAUSE, *(each / _LOOKS for each in visibilities), _LONGEST_PAUSE)


def pause_after(failures: int, visibility: float) -> float:
    """Seconds until a broker is asked again that failed as often as that in a row."""
    return float(min(_FIRST_PAUSE * 2 ** min(failures - 1, 30), visibility / SHARE / 2))


@dataclass(slots=True)
class _Watched:
    """A message, and Celery's request for it. Nothing here keeps the request alive: Celery does, until it is done."""

    request: ReferenceType[Any]
    held: Held
    deadline: float
    """Seconds that its body may run; infinite where nothing says so."""
    began: bool = False
    running_since: float = inf

    def is_over(self) -> bool:
        """Whether the worker is done with it: it is acknowledged, or given back.

        Or its task ended without either, as by a time limit under ``acks_on_failure_or_timeout=False``: only a
        delivery that comes again is left of it, and to hold it would be to lose it.
        """
        from celery.worker.state import active_requests, reserved_requests

        request = self.request()
        if request is None or request.acknowledged:
            return True
        # A warm shutdown of Celery before 5.7 forgets what it had reserved, also of what runs.
        began, self.began = self.began, request in reserved_requests or request in active_requests
        return began and not self.began

    def is_late(self, now: float) -> bool:
        """Whether its body runs for longer than it may: the message is to reach others, who may take over."""
        from celery.worker.state import active_requests

        if self.running_since == inf and self.request() in active_requests:
            self.running_since = now
        return now - self.running_since >= self.deadline


@dataclass(slots=True)
class _Outage:
    failures: int
    ends_at: float


class HeldMessages:
    """The messages that a worker holds, and what becomes of them.

    Args:
        extender: Extends them.
        everything: Whether messages of tasks that are not idempotent are held, too.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, extender: Extender, *, everything: bool, clock: Callable[[], float] = local_clock.monotonic
    ) -> None:
        self._clock = clock
        self._everything = everything
        self._is_impossible = False
        self.begin(extender)

    def begin(self, extender: Extender) -> None:
        """Hold what comes from now on, by another connection. kombu has given back what came before, or will.

        To extend it once more would only keep it from those who are to have it.
        """
        self.extender = extender
        # Written by Celery's thread and by the keeper's: single operations on a dict are atomic.
        self._messages: dict[str, _Watched] = {}
        self._outages: dict[str, _Outage] = {}
        self._visibilities: dict[str, float] = {}
        self._restored = self._clock()

    @property
    def count(self) -> int:
        """How many messages are held, as of the last look."""
        return len(self._messages)

    def receive(self, request: Any, **_: Any) -> None:
        """Hold the message of ``request`` from now on; Celery has just made it, and tells so by a signal."""
        if self._is_impossible or not (self._everything or is_protected(request.task)):
            return
        now = self._clock()
        try:
            tag, queue = request.message.delivery_tag, self.extender.queue_of(request.message)
        except Missing as missing:
            self._is_impossible = True
            tell_of(missing)
        else:
            policy = request.task.idempotency_policy if is_enforced(request.task) else None
            deadline = policy.deadline_ms / 1000 if policy is not None else inf
            self._messages[tag] = _Watched(ref(request), Held(tag, queue, now, now), deadline)

    def look(self) -> float:
        """Extend what is due, and say in how many seconds to look again; nothing that a broker does is raised."""
        by_queue: dict[str, list[Held]] = defaultdict(list, {queue: [] for queue in self.extender.queues})
        for tag, message in list(self._messages.items()):
            if message.is_over():
                self._messages.pop(tag, None)
            elif message.is_late(self._clock()):
                self._tell(tag, "hold_ended", "its body is past its deadline")
                self._messages.pop(tag, None)
            else:
                by_queue[message.held.queue].append(message.held)
        for queue, held in by_queue.items():
            self._attend(queue, held)
        return pause(self._visibilities[queue] for queue in by_queue if queue in self._visibilities)

    def _attend(self, queue: str, held: Sequence[Held]) -> None:
        outage = self._outages.get(queue)
        if outage is not None and self._clock() < outage.ends_at:
            return
        try:
            visibility = self._visibilities[queue] = self.extender.visibility(queue)
            size = self.extender.size
            chosen = due(held, visibility, self._clock(), size)
            for first in range(0, len(chosen), size):
                self._extend(queue, chosen[first : first + size], visibility)
            now = self._clock()
            if queue in self.extender.queues and now - self._restored >= visibility / SHARE:
                self._restored = now
                self.extender.restore()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the next look may fare better
            self._fail(queue, len(held), error)
        else:
            if self._outages.pop(queue, None) is not None:
                say(logger.info, "hold_recovered", queue=queue)

    def _extend(self, queue: str, held: Sequence[Held], visibility: float) -> None:
        now, longest = self._clock(), self.extender.longest
        seconds: dict[str, int] = {}
        for each in held:
            if ends_soon(each, now, longest):
                self._tell(each.tag, "hold_ends", f"the broker allows {longest / 3600:.1f} h in all")
                self._note(each.tag, is_warned=True)
            allowed = extension(each, visibility, now, longest)
            if allowed:
                seconds[each.tag] = allowed
            else:
                self._messages.pop(each.tag, None)
        if not seconds:
            return
        refused = self.extender.extend(queue, seconds)
        for tag in seconds.keys() - refused.gone.keys() - refused.failed.keys():
            self._note(tag, extended=now)
        for tag, reason in refused.gone.items():
            self._tell(tag, "hold_lost", reason)
            self._messages.pop(tag, None)
        if refused.failed:
            raise NotExtended(next(iter(refused.failed.values())))

    def _note(self, tag: str, **changes: Any) -> None:
        message = self._messages.get(tag)
        if message is not None:
            message.held = replace(message.held, **changes)

    def _tell(self, tag: str, event: str, reason: str) -> None:
        """Log what becomes of a message, unless it was acknowledged meanwhile."""
        message = self._messages.get(tag)
        request = message.request() if message is not None else None
        if request is not None and not request.acknowledged:
            say(logger.warning, event, task=request.name, task_id=request.id, reason=reason)

    def _fail(self, queue: str, count: int, error: Exception) -> None:
        known = self._outages.get(queue)
        failures = known.failures + 1 if known is not None else 1
        visibility = self._visibilities.get(queue, 0.0)
        self._outages[queue] = _Outage(failures, self._clock() + pause_after(failures, visibility or SHARE * 2))
        if known is None:
            say(
                logger.warning,
                "hold_failed",
                queue=queue,
                messages=count,
                visibility_timeout=f"{visibility:g}" if visibility else "unknown",
                reason=f"{type(error).__name__}: {describe(error)}",
            )


class NotExtended(Exception):
    """The broker did not extend a message this time."""


def tell_of(missing: Missing) -> None:
    """Say that nothing is held, and why."""
    say(
        logger.warning,
        "hold_impossible",
        missing=missing,
        reason="this version of Celery or kombu lacks it, so no message is held, and those that take longer than the "
        "visibility timeout are delivered again; use a version that this library was tested with, or set "
        "idempotency_hold_messages=False",
    )


_holdings: "WeakSet[HeldMessages]" = WeakSet()
"""Those of the workers of this process."""

os.register_at_fork(after_in_child=_holdings.clear)  # a pool process holds nothing


def held() -> int | None:
    """How many messages the workers of this process hold; None where there is no worker, or it holds none at all."""
    return sum(each.count for each in list(_holdings)) if _holdings else None


class Keeper(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Holds messages in a thread of the worker's main process, from the first connection to the broker to the last."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._holding: HeldMessages | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(parent, **kwargs)

    def include_if(self, parent: Any) -> bool:
        """Only where there is something to hold, and it is not switched off."""
        try:
            setting = runtime_of(parent.app).hold_messages
        except PolicyError as error:  # an app of plain tasks, of which nothing else is checked
            raise click.ClickException(f"celery-idempotent: {error}") from error
        return setting == "all" or (setting and bool(idempotent_tasks(parent.app)))

    def start(self, parent: Any) -> None:
        self._stopping.set()  # a thread that hangs in a connection that is lost ends when it no longer does
        try:
            channel = parent.task_consumer.channel
            extender = extender_of(parent.connection.transport.driver_type, channel)
            if isinstance(extender, SqsExtender):
                survive_expired_receipts(channel)
            if extender is not None:
                check_celery()
        except Missing as missing:
            tell_of(missing)
            return
        if extender is None:
            return
        if self._holding is None:
            self._holding = HeldMessages(extender, everything=runtime_of(parent.app).hold_messages == "all")
            _holdings.add(self._holding)
            task_received.connect(self._holding.receive, sender=parent, weak=False)
        else:
            self._holding.begin(extender)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._holding, self._stopping), name="celery-idempotent-keeper", daemon=True
        )
        self._thread.start()

    def shutdown(self, parent: Any) -> None:
        """Let go: what was not begun is given back next. Not at ``stop``, after which bodies come to their end."""
        self._stopping.set()
        if self._holding is not None:
            task_received.disconnect(self._holding.receive, sender=parent)
            _holdings.discard(self._holding)
        if self._thread is not None:
            self._thread.join(5)

    def _run(self, holding: HeldMessages, stopping: threading.Event) -> None:
        seconds = 0.0
        while not stopping.wait(seconds):
            seconds = holding.look()


def check_celery() -> None:
    """Check what is used of Celery's worker.

    Raises:
        Missing: Something is not there.
    """
    from celery.worker import state
    from celery.worker.request import Request

    for whole, name in (
        (Request, "acknowledged"),
        (Request, "message"),
        (Request, "task"),
        (state, "active_requests"),
        (state, "reserved_requests"),
    ):
        if not hasattr(whole, name):
            raise Missing(f"{name} of Celery's {whole.__name__}")


connect_on_app_finalize(lambda app: app.steps["consumer"].add(Keeper))  # plain tasks may be held, too
