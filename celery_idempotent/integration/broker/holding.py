"""The keeper: while a worker lives, no message that it holds is delivered again.

Otherwise a body that takes longer than the visibility timeout, a message that waits behind it, and one whose time has
not come yet are delivered to others, who can only postpone them.
"""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any
from weakref import WeakSet, ref

import click
from celery import bootsteps
from celery.signals import task_received

from celery_idempotent.clock import monotonic
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import idempotent_tasks, mode_of
from celery_idempotent.integration.broker.extenders import Extender, Missing, Refused, extender_of, require
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe

logger = logging.getLogger(__name__)

_SHARE = 3
"""A message is extended when that part of its visibility timeout is over: two more tries fit in before the rest is."""


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that a worker has and has not acknowledged; times are seconds on one clock that never jumps."""

    tag: str  # what the broker knows this delivery by
    queue: str  # what its visibility timeout belongs to
    received: float
    extended: float  # when its visibility timeout began to run again; at first, when it came
    request: Callable[[], Any]  # Celery's, or None; it is not kept alive here, as Celery does so until it is done
    deadline: float = inf  # seconds that its body may run; infinite where nothing says so
    is_warned: bool = False  # whether people were told that its broker will extend it no further
    began: bool = False
    running_since: float = inf

    def is_over(self) -> bool:
        """Whether it is acknowledged or given back, or its task has ended without either."""
        # As by a time limit under acks_on_failure_or_timeout=False: only a delivery that comes again is left of it,
        # and to hold it would be to lose it.
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

    def tell(self, event: str, reason: str) -> None:
        """Log what becomes of it, unless it was acknowledged meanwhile."""
        request = self.request()
        if request is not None and not request.acknowledged:
            say(logger.warning, event, task=request.name, task_id=request.id, reason=reason)


def due(messages: Iterable[HeldMessage], visibility: float, now: float, size: int) -> Sequence[HeldMessage]:
    """What to extend now, the oldest first; where that leaves room in a request of ``size``, what is soon due, too."""
    every = visibility / _SHARE
    oldest_first = sorted(messages, key=lambda each: each.extended)
    requests = -(-sum(now - each.extended >= every for each in oldest_first) // size)
    soon = [each for each in oldest_first if now - each.extended >= every / 2]
    return soon[: requests * size]


def pause(visibilities: Iterable[float]) -> float:
    """Seconds until the next look, which asks nobody; a message is extended at most so much later than it is due."""
    return min([1.0, *(each / 12 for each in visibilities)])


def pause_after(failures: int, visibility: float) -> float:
    """Seconds until a broker is asked again that failed as often as that in a row."""
    return min(2.0 ** min(failures - 1, 30), visibility / _SHARE / 2)


@dataclass(slots=True)
class _Queue:
    visibility: float = 0.0  # in seconds; 0: nobody knows it yet
    failures: int = 0
    outage_ends_at: float = 0.0


class HeldMessages:
    """The messages that a worker has got by one connection, and what becomes of them.

    kombu gives back what came by an earlier one: to extend that would only keep it from those who are to have it. Under
    ``everything`` messages of tasks that are not idempotent are held, too.
    """

    def __init__(self, extender: Extender, *, everything: bool, clock: Callable[[], float] = monotonic) -> None:
        self._extender, self._everything, self._clock = extender, everything, clock
        self._is_impossible = False
        #: By tag, as of the last look. Celery's thread adds, the keeper's deletes: each is atomic.
        self.messages: dict[str, HeldMessage] = {}
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._restored = clock()
        self.stopping = threading.Event()

    def receive(self, request: Any, **_: Any) -> None:
        """Hold the message of ``request`` from now on, which Celery has just made."""
        mode = mode_of(request.task)
        if self._is_impossible or (mode == "off" and not self._everything):
            return
        now = self._clock()
        try:
            tag, queue = request.message.delivery_tag, self._extender.queue_of(request.message)
        except Missing as missing:
            self._is_impossible = True
            _tell_of(missing)
        else:
            deadline = request.task.idempotency_policy.deadline_ms / 1000 if mode == "enforce" else inf
            self.messages[tag] = HeldMessage(tag, queue, now, now, ref(request), deadline)

    def run(self) -> None:
        seconds = 0.0
        while not self.stopping.wait(seconds):
            seconds = self.look()

    def look(self) -> float:
        """Extend what is due, and say in how many seconds to look again; nothing that a broker does is raised."""
        by_queue: dict[str, list[HeldMessage]] = defaultdict(list, {queue: [] for queue in self._extender.queues})
        for message in list(self.messages.values()):
            if message.is_over():
                del self.messages[message.tag]
            elif message.is_late(self._clock()):
                message.tell("hold_ended", "its body is past its deadline")
                del self.messages[message.tag]
            else:
                by_queue[message.queue].append(message)
        for name, messages in by_queue.items():
            self._attend(name, self._queues[name], messages)
        return pause(self._queues[name].visibility for name in by_queue if self._queues[name].visibility)

    def _attend(self, name: str, queue: _Queue, messages: Sequence[HeldMessage]) -> None:
        if queue.failures and self._clock() < queue.outage_ends_at:
            return
        size = self._extender.size
        try:
            # Somebody can have set less than a second: looks would be a busy loop.
            queue.visibility = max(self._extender.visibility(name), 1.0)
            chosen = due(messages, queue.visibility, self._clock(), size)
            for first in range(0, len(chosen), size):
                self._extend(name, chosen[first : first + size], queue.visibility)
            if name in self._extender.queues and self._clock() - self._restored >= queue.visibility / _SHARE:
                self._restored = self._clock()
                self._extender.restore()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the next look may fare better
            queue.failures += 1
            queue.outage_ends_at = self._clock() + pause_after(queue.failures, queue.visibility or _SHARE * 2)
            if queue.failures == 1:
                say(
                    logger.warning,
                    "hold_failed",
                    queue=name,
                    messages=len(messages),
                    visibility_timeout=f"{queue.visibility:g}" if queue.visibility else "unknown",
                    reason=f"{type(error).__name__}: {describe(error)}",
                )
        else:
            if queue.failures:
                queue.failures = 0
                say(logger.info, "hold_recovered", queue=name)

    def _extend(self, queue: str, messages: Sequence[HeldMessage], visibility: float) -> None:
        now, longest = self._clock(), self._extender.longest
        seconds: dict[str, int] = {}
        for each in messages:
            left = each.received + longest - now
            if left <= 3600 and not each.is_warned:
                each.tell("hold_ends", f"the broker allows {longest / 3600:.1f} h in all")
                each.is_warned = True
            if left >= 1:
                seconds[each.tag] = int(min(visibility, left))
            else:
                del self.messages[each.tag]
        refused = self._extender.extend(queue, seconds) if seconds else Refused()
        for each in messages:
            if each.tag in refused.gone:
                each.tell("hold_lost", refused.gone[each.tag])
                del self.messages[each.tag]
            elif each.tag not in refused.failed:
                each.extended = now
        if refused.failed:
            raise NotExtended(next(iter(refused.failed.values())))


class NotExtended(Exception):
    """The broker did not extend a message this time."""


def _tell_of(missing: Missing) -> None:
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
    return sum(len(each.messages) for each in list(_holdings)) if _holdings else None


class Keeper(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Holds messages in a thread of the worker's main process, from the first connection to the broker to the last."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    _held: HeldMessages | None = None
    _thread: threading.Thread | None = None

    def include_if(self, parent: Any) -> bool:
        try:
            setting = runtime_of(parent.app).hold_messages
        except PolicyError as error:  # an app of plain tasks, of which nothing else is checked
            raise click.ClickException(f"celery-idempotent: {error}") from error
        return setting == "all" or (setting and bool(idempotent_tasks(parent.app)))

    def start(self, parent: Any) -> None:
        from celery.worker import state
        from celery.worker.request import Request

        self._let_go(parent)  # a thread that hangs in a connection that is lost ends when it no longer does
        try:
            extender = extender_of(parent.connection.transport.driver_type, parent.task_consumer.channel)
            if extender is None:
                return
            require(Request, "acknowledged", "message", "task")
            require(state, "active_requests", "reserved_requests")
        except Missing as missing:
            _tell_of(missing)
            return
        self._held = HeldMessages(extender, everything=runtime_of(parent.app).hold_messages == "all")
        _holdings.add(self._held)
        task_received.connect(self._held.receive, sender=parent, weak=False)
        self._thread = threading.Thread(target=self._held.run, name="celery-idempotent-keeper", daemon=True)
        self._thread.start()

    def shutdown(self, parent: Any) -> None:
        """Let go: what was not begun is given back next. Not at ``stop``, after which bodies come to their end."""
        self._let_go(parent)
        if self._thread is not None:
            self._thread.join(5)

    def _let_go(self, parent: Any) -> None:
        if self._held is not None:
            self._held.stopping.set()
            task_received.disconnect(self._held.receive, sender=parent)
            _holdings.discard(self._held)
