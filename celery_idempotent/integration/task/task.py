"""The task class: the gate that every delivery passes, and what a task's author sees.

``__call__`` is the only place where Celery lets a task be answered without running it: signal receivers
cannot stop a task, and ``before_start`` can only raise. It sits outside ``autoretry_for``, so it sees the
``Retry`` that a failing body has become, and outside every ``__call__`` of the author's, which is part of the body.

The author's handlers belong to the body, too: ``before_start`` comes after the claim, ``on_success`` once the result is
recorded. A replay, a postponed delivery and a body whose outcome another attempt recorded tell none of them: who counts
money in ``on_success`` counts it once. Celery's signals tell every delivery, as they serve monitoring.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Celery, Task, current_task
from celery._state import connect_on_app_finalize
from celery.app.task import Context
from celery.exceptions import Retry
from celery.states import FAILURE
from celery.utils.imports import symbol_by_name
from kombu.utils.uuid import uuid

from celery_idempotent.engine.attempt import executed_by, execution, passing
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Body, Conflict, Delivery
from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import KeyMissing, LeaseLost, PolicyError, StoreUnavailable
from celery_idempotent.integration import binding, context, events
from celery_idempotent.integration import headers as wire
from celery_idempotent.integration.broker import recovery
from celery_idempotent.integration.messages import postpone, publishing
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.integration.task.guard import attempt_of, delivery_of
from celery_idempotent.integration.versions import KeepsRequest
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import own_failure
from celery_idempotent.protocol.keys import WHOLE_CALL, CallSignature, Identity, identify, label_of
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import ITEM

_HANDLERS = ("before_start", "on_success", "on_failure", "on_retry", "after_return")


def _told_of_bodies_only(name: str, handler: Any) -> Callable[..., Any]:
    @wraps(handler)
    def told(self: Task, *args: Any, **kwargs: Any) -> Any:
        arrival = context.arrival_of(self.request)
        if arrival is not None:
            # What Celery cannot encode as a result is a failure to Celery; the effect has happened, and is recorded.
            is_failure = name == "on_failure" or (name == "after_return" and args[:1] == (FAILURE,))
            is_of_body = not arrival.is_answered and not (is_failure and arrival.is_completed)
            if not (arrival.body_began if name == "before_start" else is_of_body):
                return None
        # What is no function, such as a partial, is called without the task, as by Celery.
        own = handler.__get__(self, type(self)) if hasattr(type(handler), "__get__") else handler
        return own(*args, **kwargs)

    told._is_ours = told  # type: ignore[attr-defined]
    return told


def _gate(cls: type, own: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, the author's ``__call__``, as a part of the body, whether it asks ``super()`` or calls ``self.run``."""

    @wraps(own)
    def gate(self: "IdempotentMixin", *args: Any, **kwargs: Any) -> Any:
        return self._guarded(cls, partial(own, self), args, kwargs)

    gate._is_ours = gate  # type: ignore[attr-defined]
    return gate


def _stand_before(cls: type) -> None:
    """Have the handlers of ``cls``, wherever they are defined, and its ``__call__`` pass by us; safe to repeat."""
    for name in (*_HANDLERS, "__call__"):
        own = inspect.getattr_static(cls, name, None)
        # functools.wraps copies attributes, so a mark alone may be a copy.
        if own is not None and own is not vars(Task).get(name) and getattr(own, "_is_ours", None) is not own:
            setattr(cls, name, _gate(cls, cls.__call__) if name == "__call__" else _told_of_bodies_only(name, own))


logger = logging.getLogger(__name__)

_CONTROL_FLOW = CONTROL_FLOW._replace(is_death=recovery.is_death, is_stopped=recovery.is_out_of_time)

# What every worker of an app with idempotent tasks does besides; a publisher imports none of it.
_CHECK = "celery_idempotent.integration.operating.worker:StoreCheck"
_PURGE = "celery_idempotent.integration.operating.worker:Purge"
_RELAY = "celery_idempotent.integration.messages.outbox:Relay"
_KEEPER = "celery_idempotent.integration.broker.holding:Keeper"
_STEPS = {"worker": (_CHECK, _RELAY, _PURGE, recovery.ColdShutdown), "consumer": (_KEEPER, recovery.Recovery)}


def _add_steps(app: Celery) -> None:
    app.steps["worker"].add(_CHECK)  # for a policy that protects nothing
    app.steps["consumer"].add(_KEEPER)  # plain tasks may be held, too


connect_on_app_finalize(_add_steps)


# After these, what Celery is told is not what this delivery's body did.
_ANSWERS = {EventName.REPLAYED, EventName.LEASE_LOST}
# What Celery's ``apply_async`` takes by position, after the task id.
_POSITIONAL = ("producer", "link", "link_error", "shadow")
# Celery's tasks that call another one as a function, once for each item; ``chunks`` are made of the second.
_MAPS = {"celery.map", "celery.starmap"}

if TYPE_CHECKING:
    _Base = Task
else:
    _Base = object


class _Retried(Retry):  # type: ignore[misc]  # Celery has no types
    """The body has published a retry and returned all the same: its claim is released, as by any retry."""

    def __init__(self, value: Any) -> None:
        super().__init__("retried later")
        self.value = value


class IdempotentMixin(KeepsRequest, _Base):  # type: ignore[misc, valid-type]  # Celery has no types
    """Makes a task class of your own idempotent: ``class MyTask(IdempotentMixin, MyBase)``, mixin first.

    See :class:`IdempotentTask` for what it does.
    """

    idempotent: ClassVar[Policy | None] = None
    """The task's policy; None for the app's ``idempotency_policy``, or the defaults."""

    _call_signature: ClassVar[CallSignature | None] = None
    _refusal: ClassVar[PolicyError | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._call_signature = None
        binding.check_class(cls, IdempotentMixin)
        _stand_before(cls)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the policy against the task's signature and the broker; called by Celery."""
        super().on_bound(app)
        if binding.is_builtin(cls):
            return
        try:
            binding.check_task(cls, app)
        except PolicyError as error:
            cls._refusal = error  # Celery has registered the task already, and would run it when it is used again
            raise
        cls._refusal = None
        _stand_before(cls)  # annotations can bring handlers, and a __call__
        cls.Request = _request_class(cls)
        if not isinstance(vars(cls).get("request_stack"), context.RequestStack):  # that of a bound base is another's
            cls.request_stack = context.RequestStack(lambda: cls._app._tasks.get(cls.name))
        for blueprint, steps in _STEPS.items():
            app.steps[blueprint].update(steps)
        binding.warn_about_delivery(cls, app)

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
        return self.idempotency_identity(*wire.wire_form(self, args, kwargs), headers={}, task_id="").key

    def idempotency_identity(self, args: Any, kwargs: Any, *, headers: Mapping[str, Any], task_id: str) -> Identity:
        """The identity of a delivery with these arguments, as they came off the wire; raises as above."""
        policy = self.idempotency_policy
        scope = runtime_of(self.app).scope_of(policy, self.name)
        carried = wire.identity_in(headers, scope, task_id)
        if carried is not None:
            # The header has no label: it is clear text, and the arguments tell it again.
            label = label_of(policy.selectors.label, partial(self._signature().bind, args, kwargs))
            return carried._replace(label=label)
        # Every tick of beat sends the same arguments and means another operation; the author's own key knows better.
        is_whole_call = policy.key == WHOLE_CALL
        is_sent_by_beat = is_whole_call and bool(headers.get("celery_beat_task"))
        return identify(
            scope,
            self._signature().bind(args, kwargs),
            policy.selectors,
            task=self.name,
            explicit=wire.explicit_key(headers, self.name),
            tick=wire.tick_in(headers, self.name, task_id) if is_whole_call else None,
            occurrence=task_id if is_sent_by_beat else None,
        )

    def idempotency_identity_of(self, request: Context) -> Identity:
        """The identity of the delivery of ``request``; raises as above."""
        headers, task_id = wire.headers_of(request, self.name), request.id or ""
        return self.idempotency_identity(request.args, request.kwargs, headers=headers, task_id=task_id)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, or answer with its recorded outcome; Celery's worker calls this for every delivery."""
        try:
            return self._guarded(IdempotentMixin, super().__call__, args, kwargs)
        except Retry as retry:
            arrival = context.arrival_of(self.request)
            if arrival is None or not arrival.is_answered:
                raise
            raise retry.with_traceback(None)  # noqa: B904 - it is the same; Celery copies every frame, at a price

    __call__._is_ours = __call__  # type: ignore[attr-defined]

    def _guarded(self, layer: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Come by the ``__call__`` of ``layer``: the outermost is guarded, the others are on the way to the body."""
        around = execution()
        if around is not None and around.is_of(self.name, context.arrival_of(self.request)):
            order = type(self).__mro__
            if order.index(layer) > order.index(around.layer):
                with passing(around, layer):
                    return call(*args, **kwargs)
        if binding.is_builtin(type(self)):
            return call(*args, **kwargs)
        if self._refusal is not None:
            raise self._refusal
        request = self.request  # asking is dear: Celery keeps it by thread and greenlet
        if request.called_directly:
            # Celery's own task that calls us for each of its items, if one does.
            map_of = current_task._get_current_object() if current_task else None
            if map_of is not None and map_of.name in _MAPS and not map_of.request.called_directly:
                items = context.note_list(map_of.request)
                if around is None or around.item_of is not items:
                    # An operation of its own, as if it had been sent by itself.
                    if wire.KEY_HEADER in (given := wire.headers_of(map_of.request, map_of.name)):
                        remedy = "each item is an operation of its own; publish a group of signatures with keys"
                        key = repr(given[wire.KEY_HEADER])
                        raise PolicyError("idempotency_key", key, f"{map_of.name}: {remedy}")
                    identity = self._identity_of_call(args, kwargs)
                    body = self._body(map_of.request, identity, layer, call, args, kwargs, items=items)
                    return self._deliver(map_of, map_of.request, identity, body)
            return self._call_as_function(layer, call, args, kwargs)
        arrival = context.note_delivery(self, request)
        if around is not None and around.is_around(self.name, arrival):
            return self._call_as_function(layer, call, args, kwargs)
        body = self._body(request, arrival.identity, layer, call, args, kwargs, arrival)
        return self._deliver(self, request, arrival.identity, body)

    def _call_as_function(self, layer: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A direct call, or a body that calls itself: a function call, which no claim protects."""
        identity = self._identity_of_call(args, kwargs)
        attempt = attempt_of(runtime_of(self.app), self.idempotency_policy, identity, None)
        with executed_by(attempt, self.name, context.arrival_of(self.request), layer):
            return call(*args, **kwargs)

    def _identity_of_call(self, args: Any, kwargs: Any) -> Callable[[], Identity]:
        return context.at_once(partial(self.idempotency_identity, args, kwargs, headers={}, task_id=""))

    def _body(
        self,
        request: Context,
        identity: Callable[[], Identity],
        layer: type,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        arrival: context.DeliveryContext | None = None,
        items: context.DeliveryContext | None = None,
    ) -> Body:
        policy = self.idempotency_policy

        def body(claim: Claim | None) -> Any:
            given, attempt = (args, kwargs), attempt_of(runtime_of(self.app), policy, identity, claim)
            with executed_by(attempt, self.name, arrival, layer, items):
                try:
                    if arrival is not None:
                        arrival.body_began = True
                        if type(self).before_start is not Task.before_start:
                            self.before_start(request.id, request.args, request.kwargs)
                            given = request.args, request.kwargs  # it may have changed them, as under Celery
                    value = call(*given[0], **given[1])
                except BaseException as error:
                    if claim is not None and arrival is not None and arrival.is_retried:
                        claim.raised_before_effects = error  # the retry is on its way, and must not meet an outcome
                    raise
            if claim is not None:
                if arrival is not None and arrival.is_retried:
                    raise _Retried(value)
                if policy.mode == "enforce":
                    binding.refuse_unfinished(value, self.name)
            return value

        return body

    def _deliver(self, executed: Task, request: Context, identity: Callable[[], Identity], body: Body) -> Any:
        """Do with a body what the mode of the policy says; ``executed`` is what Celery executes, which may be a map."""
        policy = self.idempotency_policy
        if policy.mode == "off":
            return body(None)
        if policy.mode == "observe":
            return self._observe(executed, request, identity, body)
        try:
            try:
                outcome = self._delivery(executed, request, identity).run(body)
            except (LeaseLost, StoreUnavailable) as error:
                postpone.outage(executed, policy, error)
            if isinstance(outcome, Conflict):
                met = policy if executed is self else replace(policy, on_conflict="retry")
                postpone.conflict(executed, met, outcome)
        except _Retried as retried:
            return retried.value
        except BaseException as error:
            recovery.return_if_killed(error, request)
            raise
        if executed is self and (arrival := context.arrival_of(request)) is not None:
            arrival.is_completed = True
        return outcome.value

    def _observe(self, executed: Task, request: Context, identity: Callable[[], Identity], body: Body) -> Any:
        prepare = partial(self._delivery, executed, request, identity)
        try:
            delivery = prepare()
        except Exception as first:  # noqa: BLE001 - whatever is wrong, observing changes nothing of what a task does
            error = first if isinstance(first, KeyMissing) else own_failure(prepare, first)
            reason = type(error).__name__ if self.idempotency_policy.private else repr(error)
            say(logger.warning, "not_observed", task=self.name, task_id=request.id, reason=reason)
            return body(None)
        try:
            with self._notes():
                return delivery.observe(body)
        except _Retried as retried:
            return retried.value

    def _notes(self) -> AbstractContextManager[None]:
        """Around an observed body: notes of its effects, where ``idempotency_watch_effects`` asks for them."""
        if not runtime_of(self.app).watch:
            return nullcontext()
        from celery_idempotent.integration.operating.watching import noting  # who does not watch imports nothing

        return noting(self.app)

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, *positional: Any, **options: Any
    ) -> Any:
        """As Celery's, plus ``idempotency_key``: the key of the intended effect, in place of the policy's.

        Under ``Policy(publish="once")`` an operation that is queued, running or has an outcome is not published again:
        the result is that of the first message, under its task id.

        Raises:
            KeyMissing: ``idempotency_key`` is null or empty.
            PolicyError: ``idempotency_key`` is not a string, is misspelt, or was given to a whole group.
        """
        task_id = task_id or uuid()  # Celery would make it too late: FIFO's deduplication id may contain it
        # By name: a base of the author's may take no more by position than arguments.
        options.update(zip(_POSITIONAL, positional, strict=False))
        options = wire.publish_options(self, args, kwargs, options, task_id)
        policy, publish = self.idempotency_policy, super().apply_async
        if wire.waiting_since(options.get("headers") or {}) is not None:
            publish = partial(Task.apply_async, self)  # a base such as celery-singleton's would take it for a duplicate
        if policy.publish == "always" or policy.mode == "off":
            return publish(args, kwargs, task_id=task_id, **options)
        return publishing.publish_once(self, publish, args, kwargs, options, task_id)

    def apply(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, plus ``idempotency_key``; guarded like a delivery, and a conflict raises ``InFlight``."""
        return super().apply(args, kwargs, *positional, **wire.eager_options(self, options))

    def retry(self, *args: Any, **options: Any) -> Any:
        """As Celery's. The retry is the same operation, whatever its arguments; it releases the claim.

        So does ``retry(throw=False)`` when the body goes on: its value is the delivery's result, and no outcome.
        """
        returned = super().retry(*args, **options)
        context.note_delivery(self, self.request).is_retried = True
        return returned

    def signature_from_request(self, request: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, and keeps what Celery drops: identity, serialiser, SQS's message group, its queue."""
        request = self.request if request is None else request
        options = wire.republish_options(request, options, self._identity_header(request))
        signature = super().signature_from_request(request, *positional, **options)
        is_rabbitmq = runtime_of(self.app).broker.is_rabbitmq
        signature.options.update(postpone.way_back(self.app, request, signature.options, is_rabbitmq=is_rabbitmq))
        return signature

    def _identity_header(self, request: Context) -> str | None:
        arrival = context.arrival_of(request)  # what has no identity was never executed, and fails again
        header = arrival and (lambda: wire.identity_header(arrival.identity(), self._scope, request.id or ""))
        return context.or_none(header) if header else None

    @property
    def _scope(self) -> str:
        return runtime_of(self.app).scope_of(self.idempotency_policy, self.name)

    def _signature(self) -> CallSignature:
        cls = type(self)
        if cls._call_signature is None:
            cls._call_signature = CallSignature(binding.body_signature(cls), binding.conversion(cls))
        return cls._call_signature

    def _delivery(self, executed: Task, request: Context, identity: Callable[[], Identity]) -> Delivery:
        runtime, policy = runtime_of(self.app), self.idempotency_policy
        tell = partial(_report, self, request, policy.mode == "observe")
        try:
            known = identity()
        except KeyMissing as error:
            tell(Event(EventName.KEY_MISSING, "", None, str(error)))
            raise
        operation = Operation(
            identity=known,
            policy=policy,
            task=self.name,
            task_id=(request.id or "") if executed is self else f"{request.id}{ITEM}",
            worker=request.hostname or "",
            app=self.app.main or "",
            process=this_process(),
            trace=events.read_trace(),
            grace=runtime.grace,
        )
        return delivery_of(runtime, operation, _CONTROL_FLOW, tell)


def _report(task: IdempotentMixin, request: Context, observed: bool, event: Event) -> None:
    if event.name in _ANSWERS and not observed and (arrival := context.arrival_of(request)) is not None:
        arrival.is_answered = True
    events.report(task, request.id, event, observed=observed, headers=request.headers or {})


class IdempotentTask(IdempotentMixin, Task):  # type: ignore[misc]  # Celery has no types
    """A task whose effect happens once however often it is delivered.

    Before the body runs, a conditional write claims the call's idempotency key. The result is recorded and
    given to every duplicate; a duplicate that meets the body running is postponed; if the worker dies, another
    takes over when the lease is over. What is promised for which effect: docs/explanation/promises.md.

    Set it as a task's ``base``, or for a whole app with ``Celery(task_cls="celery_idempotent:IdempotentTask")``.
    Its one option is ``idempotent=Policy(...)``. It needs a delivery that comes back when a worker dies, so set
    ``acks_late`` and ``reject_on_worker_lost``; without them, binding it warns.

    A direct call ``task(...)`` is a function call and passes through. ``apply()`` and eager mode are guarded.
    """

    abstract = True


def _request_class(cls: type[Task]) -> Any:
    """The class that a worker makes of a message of the task: its own, with what ``IdempotentRequestMixin`` adds."""
    if cls.Request == Task.Request:
        # By name: publishers need nothing of Celery's worker.
        return "celery_idempotent.integration.task.requests:IdempotentRequest"
    own = symbol_by_name(cls.Request)
    if hasattr(own, "is_received"):
        return cls.Request
    from celery_idempotent.integration.task.requests import IdempotentRequestMixin

    return type(own.__name__, (IdempotentRequestMixin, own), {})
