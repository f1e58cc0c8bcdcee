"""A pool process that died in a body: its lease is ended before its message goes back to the broker.

The next delivery may reach another machine, where nobody can tell that the process is gone, and would wait for the
lease. A thread tells the store: one that hangs must not stop the worker's loop, and after a few seconds the message
goes back without it.
"""

import logging
import mmap
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import bootsteps, current_task
from celery.app.task import Context
from celery.exceptions import Reject, WorkerShutdown, WorkerTerminate

from celery_idempotent.engine.claim import end_lease
from celery_idempotent.engine.processes import is_gone
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Status, process_of

logger = logging.getLogger(__name__)

_PATIENCE = 3.0
"""Seconds until the message goes back, whatever has become of the lease."""

_LOOK = 0.05
"""Seconds between two looks at what a thread has done."""

_DEATHS_EVERY = 0.2
"""Seconds between two looks for dead pool processes. Celery learns of a death when its pipe closes, which is before the
process can be waited for; where it comes too early, and that is often, it looks again after up to five seconds."""


class Recovery(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Has a worker notice soon that a process of its pool has died, and end no sooner than it has dealt with that."""

    # Before these are shut down, messages can still be acknowledged and given back.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    _looking: Any = None

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        #: The worker's event loop; None where there is none, and billiard's threads tell of lost processes.
        self._loop: Any = None
        #: What is not done yet, and the thread that does it; None: the loop.
        self.under_way: dict[Iterator[None], threading.Thread | None] = {}
        super().__init__(parent, **kwargs)

    def start(self, parent: Any) -> None:
        _started[runtime_of(parent.app)] = self
        loop = self._loop = parent.hub if parent.controller.use_eventloop else None
        self._looking = loop.call_repeatedly(_DEATHS_EVERY, parent.pool.maintain_pool) if loop else None

    def stop(self, parent: Any) -> None:
        """Look no more, and end what the loop began: Celery before 5.6 has it forget that when the broker is lost."""
        if self._looking is not None:
            self._looking.cancel()
        for steps, thread in list(self.under_way.items()):
            if thread is None:
                self._take(steps)

    def shutdown(self, parent: Any) -> None:
        """End all: the loop does not run any more, and threads end with the process."""
        self.stop(parent)
        for thread in filter(None, list(self.under_way.values())):
            thread.join(3 * _PATIENCE)

    def begin(self, steps: Iterator[None]) -> None:
        """Take the steps in the worker's event loop where this is its thread; in a thread where there is none."""
        if self._loop is not None and threading.current_thread() is threading.main_thread():
            self.under_way[steps] = None
            self._take(steps, self._loop)
        else:
            thread = self.under_way[steps] = _in_thread(partial(self._take, steps))
            if not thread.ident:
                self._take(steps)

    def _take(self, steps: Iterator[None], loop: Any = None) -> None:
        """All of them; in a loop one now, and the others in a moment each."""
        try:
            for _ in steps:
                if loop is not None:
                    loop.call_later(_LOOK, self._take, steps, loop)
                    return
                time.sleep(_LOOK)
        except Exception:  # noqa: BLE001 - it is logged whole
            say(logger.exception, "message_not_returned")
        self.under_way.pop(steps, None)


_started: "WeakKeyDictionary[Runtime, Recovery]" = WeakKeyDictionary()


class ColdShutdown(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Marks what runs as stopped before the pool is ended as a whole, which no request is told of."""

    requires = ("celery.worker.components:Pool",)

    def terminate(self, parent: Any) -> None:
        from celery.worker.state import active_requests  # a publisher shall not load a worker

        for request in list(active_requests):
            mark(request.id, is_stopped=True)


def is_death(error: BaseException) -> bool:
    """Whether a body ends its own process by ``error``, or what its pool takes for one; its worker did not stop it."""
    # After these two Celery settles no message, or gives it back. The first ends a whole worker, not a pool process
    # alone; the second a body raises when it asks for the result of a task whose process was lost.
    is_failure = isinstance(error, Exception) and not isinstance(error, MemoryError | WorkerLostError)
    if is_failure or isinstance(error, WorkerShutdown | WorkerTerminate):
        return False
    return not current_task.request.is_eager and not _is_stopped()


def is_out_of_time() -> bool:
    """Whether this worker has stopped the body, after the time that it gives to bodies when it shuts down."""
    return bool(current_task.app.conf.get("worker_soft_shutdown_timeout")) and _is_stopped()


_stopped = mmap.mmap(-1, 1 << 16)
"""By a hash of task ids, the requests whose bodies this worker has told its pool to end. A pool process that gets a
signal cannot tell who sent it; it is forked, and shares this. Where two ids have one hash, a stop may pass for a death,
or a death for a stop: the next attempt is a takeover, or is none, once."""


def mark(task_id: str, *, is_stopped: bool) -> None:
    """Note whether this worker has told its pool to end the body of that request."""
    _stopped[_place(task_id)] = is_stopped


def _is_stopped() -> bool:
    return bool(_stopped[_place(current_task.request.id)])


def _place(task_id: str) -> int:
    return zlib.crc32(str(task_id).encode(errors="surrogatepass")) % len(_stopped)


def return_if_killed(error: BaseException, request: Context) -> None:
    """Have the message go back to the broker: Celery takes a greenlet that was killed for one that succeeded."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and isinstance(error, greenlet.GreenletExit) and not request.is_eager:
        raise Reject("its greenlet was killed", requeue=True) from error


class RecoversLease:
    """Ends the lease of a pool process that died, and then does with the message what Celery does."""

    id: str
    task: Any
    _is_returned = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        on_success = vars(cls).get("on_success")  # Celery makes a class with one for each task
        if on_success is None:
            return

        @wraps(on_success)
        def settle(request: Any, returned: Any, **options: Any) -> Any:
            # What pools without processes make of a body that raised SystemExit: on_success cannot unpack it. Its
            # message would be settled by nobody and, as its worker lives, be held for ever.
            if isinstance(returned, ExceptionInfo):
                return request.on_failure(returned)
            return on_success(request, returned, **options)

        cls.on_success = settle  # type: ignore[attr-defined]

    def cancel(self, *args: Any, **options: Any) -> None:
        """As Celery's at a cold shutdown; a pool that cannot stop a body lets it end."""
        mark(self.id, is_stopped=True)
        # Under solo it would be raised in the body, which runs in the main thread as Celery's signal handler does.
        with suppress(NotImplementedError):
            super().cancel(*args, **options)  # type: ignore[misc]  # of Celery's Request

    def terminate(self, *args: Any, **options: Any) -> None:
        mark(self.id, is_stopped=True)
        super().terminate(*args, **options)  # type: ignore[misc]  # of Celery's Request

    def reject(self, requeue: bool = False) -> None:
        self._is_returned = requeue
        super().reject(requeue)  # type: ignore[misc]  # of Celery's Request

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """After a hard limit its pool ends the body. What comes again and is too long each time is to end UNKNOWN."""
        try:
            super().on_timeout(soft, timeout)  # type: ignore[misc]  # of Celery's Request
        finally:  # whatever becomes of its result
            if not soft and not self._is_returned:
                mark(self.id, is_stopped=True)

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> None:
        """As Celery's, some moments later if the pool process is lost."""
        go_on = partial(super().on_failure, exc_info, *args, **options)  # type: ignore[misc]  # of Celery's Request
        error = exc_info.exception
        # billiard wraps what it tells, and tells of an exit before the process has ended.
        if isinstance(getattr(error, "exc", error), WorkerLostError | SystemExit | Terminated):
            step = _started.get(runtime_of(self.task.app)) or Recovery(None)
            step.begin(_recovered(self, go_on))
        else:
            go_on()


def _recovered(request: Any, go_on: Callable[[], None]) -> Iterator[None]:
    """In steps, between which the worker's loop goes on for a moment."""
    message = request.message
    info = dict(message.delivery_info or {})  # Celery's rejection takes away what SQS needs to know
    ending = _in_thread(partial(_end_lease, request))
    give_up_at = time.monotonic() + _PATIENCE
    while ending.is_alive() and time.monotonic() < give_up_at:
        yield
    go_on()
    if "sqs_message" in info:
        while not message.acknowledged and time.monotonic() < give_up_at + _PATIENCE:
            yield
        if message._state == "REJECTED":
            from celery_idempotent.integration.broker.extenders import make_visible  # a publisher extends nothing

            _in_thread(partial(make_visible, message.channel, info))


def _in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, name="celery-idempotent-recovery", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: the lease counts, as it does where this is not known at all
        say(logger.warning, "recovery_skipped", reason="no thread can be started")
    return thread


def _end_lease(request: Any) -> None:
    task = request.task
    try:
        key = task.idempotency_identity_of(request._context).key
        store = runtime_of(task.app).store
        if getattr(store, "dialect", "") == "sqlite":
            # The next delivery, on this machine, sees for itself that the process is gone; and one that is forked while
            # a thread of its parent uses SQLite would inherit what tears the file.
            return
        record = store.get(key)
        if record is None or record.status is not Status.IN_PROGRESS or not record.lease_until:
            return  # the body has ended it
        give_up_at = time.monotonic() + _PATIENCE / 2
        while not is_gone(process_of(record)):  # it may be within a moment
            if time.monotonic() > give_up_at:
                return
            time.sleep(_LOOK)
        end_lease(store, record)
    except Exception as error:  # noqa: BLE001 - whatever is wrong, the lease ends by itself
        reason = type(error).__name__
    else:
        reason = "its process is gone"
    say(logger.warning, "lease_ended", task=task.name, task_id=request.id, reason=reason)
