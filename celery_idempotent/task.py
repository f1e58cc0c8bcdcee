"""The task class: the gate that every delivery passes, and what a task's author sees.

``__call__`` is the only place where Celery lets a task be answered without running it: signal receivers
cannot stop a task, and ``before_start`` can only raise. It sits outside ``autoretry_for``, so it sees the
``Retry`` that a failing body has become.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Celery, Task
from kombu.utils.uuid import uuid

from celery_idempotent import binding, conflicts, publishing, signals
from celery_idempotent.attempt import Attempt
from celery_idempotent.errors import (
    IdempotencyError,
    LeaseLost,
    PolicyError,
    StoreUnavailable,
)
from celery_idempotent.guard import Conflict, Event, EventName, Guard, Operation
from celery_idempotent.handle import AttemptHandle, Unprotected, current_attempt, executed_by, execution
from celery_idempotent.heartbeat import heartbeat
from celery_idempotent.keys import WHOLE_CALL, CallSignature, Identity, identify
from celery_idempotent.outbox import relay_at_start
from celery_idempotent.policy import Policy
from celery_idempotent.protected import Protected
from celery_idempotent.runtime import CONTROL_FLOW, NOTHING_BEGUN, runtime_of
from celery_idempotent.startup import check_at_start

__all__ = ["IdempotentMixin", "IdempotentTask"]

logger = logging.getLogger("celery_idempotent")

_LEVELS = {
    EventName.CLAIMED: logging.DEBUG,
    EventName.COMPLETED: logging.DEBUG,
    EventName.TAKEN_OVER: logging.WARNING,
    EventName.LEASE_LOST: logging.WARNING,
    EventName.STORE_UNAVAILABLE: logging.WARNING,
    EventName.OUTCOME_UNKNOWN: logging.ERROR,
}
"""INFO for the rest."""


if TYPE_CHECKING:
    _Base = Task
else:
    _Base = object


class IdempotentMixin(_Base):  # type: ignore[misc, valid-type]  # Celery has no types
    """Makes a task class of your own idempotent: ``class MyTask(IdempotentMixin, MyBase)``, mixin first.

    See :class:`IdempotentTask` for what it does.
    """

    idempotent: ClassVar[Policy | None] = None
    """The task's policy; None for the app's ``idempotency_policy``, or the defaults."""

    _call_signature: ClassVar[CallSignature | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._call_signature = None
        binding.refuse_unsupported_body(cls)
        if cls.idempotent is not None and not isinstance(cls.idempotent, Policy):
            raise PolicyError(
                "idempotent", repr(cls.idempotent), f"must be a Policy: {cls.__name__}(idempotent=Policy(key=...))"
            )

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the policy against the task's signature and the broker; called by Celery."""
        super().on_bound(app)
        if binding.is_builtin(cls.name):
            return
        if cls.idempotent is not None:
            binding.check_selectors(cls.idempotent, binding.body_signature(cls))
        check_at_start(app)
        relay_at_start(app)
        binding.warn_about_delivery(cls, app)

    @property
    def attempt(self) -> AttemptHandle:
        """The attempt that executes this task's body; same as :func:`current_attempt`."""
        return current_attempt()

    @property
    def idempotency_policy(self) -> Policy:
        """The policy in force."""
        return self.idempotent or runtime_of(self.app).default_policy

    def guarantee(self) -> str:
        """What this task promises, for people: a line for the task and one for each effect its policy declares."""
        return self.idempotency_policy.guarantee(self.name)

    def idempotency_key_for(self, *args: Any, **kwargs: Any) -> str:
        """The key that ``delay(*args, **kwargs)`` would use; for people, logs and tools.

        Raises:
            KeyMissing: The call has no key.
            PolicyError: An argument has no canonical form.
            TypeError: The arguments do not fit the task.
        """
        return self.idempotency_identity(*publishing.wire_form(self, args, kwargs), headers={}, task_id="").key

    def idempotency_identity(self, args: Any, kwargs: Any, *, headers: Mapping[str, Any], task_id: str) -> Identity:
        """The identity of a delivery with these arguments, as they came off the wire, and headers.

        Raises:
            KeyMissing: The call has no key.
            PolicyError: An argument has no canonical form.
            TypeError: The arguments do not fit the task.
        """
        policy = self.idempotency_policy
        explicit = headers.get(publishing.KEY_HEADER)
        # Every tick of beat sends the same arguments and means another operation.
        is_tick = policy.key == WHOLE_CALL and bool(headers.get("celery_beat_task"))
        return identify(
            policy.scope_of(self.name),
            self._signature().bind(args, kwargs),
            task=self.name,
            key=policy.key_selector,
            fingerprint=policy.fingerprint_selector,
            explicit=None if explicit is None else publishing.checked_key(explicit, self.name),
            occurrence=task_id if is_tick else None,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, or answer with its recorded outcome; Celery's worker calls this for every delivery."""
        if binding.is_builtin(self.name):
            return super().__call__(*args, **kwargs)
        request = self.request
        outer = execution()
        body = partial(super().__call__, *args, **kwargs)

        def unprotected() -> AttemptHandle:
            return Unprotected(lambda: self._delivered(args, kwargs).key, outer.handle if outer else None)

        def run(attempt: Attempt | None) -> Any:
            handle = self._protected(attempt) if attempt else unprotected()
            with executed_by(handle, self.name, request.id):
                return body()

        mode = self.idempotency_policy.mode
        is_recursion = outer is not None and outer.is_delivery_of(self.name, request.id)
        if request.called_directly or is_recursion or mode == "off":
            return run(None)
        if mode == "observe":
            return self._observed(args, kwargs, run)
        return self._enforced(args, kwargs, run)

    def _enforced(self, args: Any, kwargs: Any, run: Callable[[Attempt | None], Any]) -> Any:
        operation = self._operation(self._delivered(args, kwargs))
        try:
            outcome = self._guard(observed=False).run(operation, run)
        except (LeaseLost, StoreUnavailable) as error:
            conflicts.outage(self, operation.policy, error)
        if isinstance(outcome, Conflict):
            conflicts.conflict(self, operation.policy, outcome)
        return outcome.value

    def _observed(self, args: Any, kwargs: Any, run: Callable[[Attempt | None], Any]) -> Any:
        try:
            identity = self._delivered(args, kwargs)
        except IdempotencyError as error:
            logger.warning("idempotency.no_key task=%s task_id=%s reason=%s", self.name, self.request.id, error)
            return run(None)
        return self._guard(observed=True).observe(self._operation(identity), run)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *positional: Any,
        **options: Any,
    ) -> Any:
        """As Celery's, plus ``idempotency_key``: the key of the intended effect, in place of the policy's.

        Raises:
            KeyMissing: ``idempotency_key`` is null or empty.
            PolicyError: ``idempotency_key`` is no text.
        """
        task_id = task_id or uuid()  # Celery would make it too late: FIFO's deduplication id may contain it
        options = publishing.prepared(self, args, kwargs, options, task_id)
        return super().apply_async(args, kwargs, task_id, *positional, **options)

    def apply(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, plus ``idempotency_key``; guarded like a delivery, and a conflict raises ``InFlight``."""
        return super().apply(args, kwargs, *positional, **publishing.with_key_in_headers(self, options))

    def signature_from_request(self, request: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, and keeps the message group of SQS, which Celery drops on a retry."""
        request = self.request if request is None else request
        return super().signature_from_request(request, *positional, **{**publishing.fifo_options(request), **options})

    def _delivered(self, args: Any, kwargs: Any) -> Identity:
        request = self.request
        return self.idempotency_identity(args, kwargs, headers=request.headers or {}, task_id=request.id or "")

    def _signature(self) -> CallSignature:
        cls = type(self)
        if cls._call_signature is None:
            signature = binding.body_signature(cls)
            cls._call_signature = CallSignature(signature, binding.model_converters(cls, signature))
        return cls._call_signature

    def _operation(self, identity: Identity) -> Operation:
        request = self.request
        return Operation(
            identity=identity,
            policy=self.idempotency_policy,
            task=self.name,
            task_id=request.id,
            worker=request.hostname or "",
        )

    def _protected(self, attempt: Attempt) -> Protected:
        runtime = runtime_of(self.app)
        return Protected(attempt, runtime.codec, NOTHING_BEGUN, self.idempotency_policy.effects, runtime.message_codec)

    def _guard(self, *, observed: bool) -> Guard:
        runtime = runtime_of(self.app)
        report = partial(_report, self, self.request.id, observed)
        return Guard(runtime.store, runtime.codec, heartbeat, CONTROL_FLOW, report)


class IdempotentTask(IdempotentMixin, Task):  # type: ignore[misc]  # Celery has no types
    """A task whose effect happens once however often it is delivered.

    Before the body runs, a conditional write claims the call's idempotency key. The result is recorded and
    given to every duplicate; a duplicate that meets the body running is put off; if the worker dies, another
    takes over when the lease is over. What exactly is promised for which kind of effect stands in the README.

    Set it as a task's ``base``, or for a whole app with ``Celery(task_cls="celery_idempotent:IdempotentTask")``.
    Its one option is ``idempotent=Policy(...)``. It needs a delivery that comes back when a worker dies, so set
    ``acks_late`` and ``reject_on_worker_lost``; without them, binding it warns.

    A direct call ``task(...)`` is a function call and passes through. ``apply()`` and eager mode are guarded.
    """

    abstract = True


def _report(task: IdempotentMixin, task_id: str, observed: bool, event: Event) -> None:
    logger.log(
        _LEVELS.get(event.name, logging.INFO),
        "idempotency.%s task=%s task_id=%s key=%s token=%s observed=%s reason=%s",
        event.name,
        task.name,
        task_id,
        event.key,
        event.fencing_token,
        observed,
        event.reason,
    )
    signals.BY_EVENT[event.name].send(
        sender=task,
        key=event.key,
        fencing_token=event.fencing_token,
        task_id=task_id,
        reason=event.reason,
        observed=observed,
    )
