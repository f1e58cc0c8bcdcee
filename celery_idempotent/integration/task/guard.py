"""The guard of an operation that no task makes: of a function, a request, a record of a batch.

It takes an identity and a body, and does what a task's class does; only conflicts and outages are the caller's to meet,
as there is no message to postpone. It records by an app's settings, or in a store alone.
"""

import inspect
import logging
import os
import platform
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any
from uuid import uuid4

from celery import Celery, current_app

from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt, executed_by, execution
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Body, Conflict, ControlFlow, Delivery, Outcome
from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import KeyMissing, PolicyError
from celery_idempotent.integration import binding, events
from celery_idempotent.integration.context import at_once
from celery_idempotent.integration.settings import CONTROL_FLOW, NOTHING_BEGUN, Runtime, runtime_alone, runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.keys import CallSignature, Identity, identify
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.store import Store


def place_of(store: str | Store | None, app: Celery | None) -> Callable[[], Runtime]:
    """Tells the settings by the ``store`` or ``app`` that an author named; by neither, those of the current app."""
    if app is not None and not isinstance(app, Celery):
        raise PolicyError("app", repr(app), "must be a Celery app")
    if store is None:
        return lambda: runtime_of(app or current_app)
    if app is not None:
        raise PolicyError("store", "beside an app", "an app has a store, by idempotency_store; give one of the two")
    runtime = runtime_alone(store)
    if isinstance(store, str):
        runtime = _by_url.setdefault(store, runtime)
    return lambda: runtime


_by_url: dict[str, Runtime] = {}

logger = logging.getLogger(__name__)


def check_policy(policy: Policy, signature: inspect.Signature) -> None:
    """Refuse a policy that cannot be a gate's whose calls have this signature: nothing here is about messages."""
    if policy.publish != "always":
        raise PolicyError("publish", repr(policy.publish), "it is about messages of tasks; leave it out")
    if policy.on_conflict == "skip":
        raise PolicyError(
            "on_conflict", "'skip'", "it ends a task's message; a call has to be answered: catch InFlight instead"
        )
    binding.check_policy(policy, signature)


def attempt_of(runtime: Runtime, policy: Policy, identity: Callable[[], Identity], claim: Claim | None) -> Attempt:
    """What a body gets to know; without a claim nothing protects it, unless it is part of a body that is."""
    if claim is None:
        around = execution()
        return Attempt(identity, around.attempt if around else None)
    return ProtectedAttempt(claim, runtime.codec_of(policy), NOTHING_BEGUN, policy.effects)


def delivery_of(
    runtime: Runtime, operation: Operation, control: ControlFlow, tell: Callable[[Event], None], *, until: float = inf
) -> Delivery:
    """The delivery of ``operation`` to this process, which ends at ``until`` by the local clock."""
    opened, codec = runtime.opened, runtime.codec_of(operation.policy)
    return Delivery(operation, opened.store, codec, heartbeat, control, tell, breaker=opened.breaker, until=until)


@dataclass(eq=False)  # it sends signals, and who does must have a hash
class Guard:
    """Lets each operation called ``name`` through once."""

    name: str  # in records, logs and, where the policy has no scope, keys
    declared: Policy | None  # None for that of the settings
    where: Callable[[], Runtime]  # tells the settings; asked at the first call
    sender: Any = None  # of its signals; default: the guard itself
    until: float = inf  # when this process ends, by the local clock
    reserve: int = 0  # the shortest time that a takeover waits after a lease, in milliseconds

    def introduce(self, caller: Any, key_for: Callable[..., str]) -> None:
        """Have what people call, and name where they connect signals, tell its name, keys and promise."""
        caller.name = self.name
        caller.idempotency_key_for = key_for
        caller.guarantee = lambda: self.policy.guarantee(self.name)
        self.sender = caller

    @property
    def policy(self) -> Policy:
        return self.declared or self.where().default_policy

    def identity(
        self, signature: CallSignature, args: Iterable[Any], kwargs: Mapping[str, Any], *, explicit: str | None = None
    ) -> Identity:
        """The identity of a call; raises as ``idempotency_key_for`` of a task does."""
        policy = self.policy
        scope, bound = self.where().scope_of(policy, self.name), signature.bind(args, kwargs)
        return identify(scope, bound, policy.selectors, task=self.name, explicit=explicit)

    def call(self, identity: Callable[[], Identity], body: Callable[[], Any]) -> Outcome | Conflict:
        """Run ``body``, or tell what is recorded; raises as ``identity`` and :meth:`Delivery.run` do."""
        identity = at_once(identity)  # the body may change what it follows from
        known = self._known(identity)

        def execute(claim: Claim | None) -> Any:
            with executed_by(attempt_of(self.where(), self.policy, identity, claim), self.name, None, Guard):
                value = body()
                binding.refuse_unfinished(value, self.name)
                return value

        return Outcome(execute(None)) if known is None else self._run(known)(execute)

    async def call_on_loop(
        self, identity: Callable[[], Identity], body: Callable[[], Awaitable[Any]]
    ) -> Outcome | Conflict:
        """As :meth:`call`, for a body that is awaited; the event loop is not blocked."""
        from celery_idempotent.engine.loops import awaited  # a process without an event loop imports none

        identity = at_once(identity)
        known = self._known(identity)

        async def execute(claim: Claim | None) -> Any:
            with executed_by(attempt_of(self.where(), self.policy, identity, claim), self.name, None, Guard):
                value = await body()
                binding.refuse_unfinished(value, self.name)
                return value

        if known is None:
            return Outcome(await execute(None))
        return await awaited(lambda body: self._run(known)(body), execute)  # to open a store may take long, too

    def pause_after(self, conflict: Conflict, conflicts: int) -> float:
        """Seconds after which to ask again, for somebody who has met that many conflicts before."""
        policy, draw = self.policy, random.random()  # noqa: S311 - it keeps no secret
        grace, bounds = self.where().grace, (900_000,)  # somebody waits in his own thread; this only keeps numbers sane
        running_for, left = conflict.running_for, conflict.error.retry_after
        return policy.conflict_delay_ms(conflicts, running_for, left, bounds=bounds, draw=draw, grace=grace) / 1000

    def _known(self, identity: Callable[[], Identity]) -> Identity | None:
        """What is to happen once; None where the body is to run in any case."""
        mode = self.policy.mode
        if mode == "off":
            return None
        try:
            known = identity()
        except Exception as error:
            if isinstance(error, KeyMissing):
                self._tell(None, Event(EventName.KEY_MISSING, "", None, str(error)))
            if mode == "enforce":
                raise
            reason = type(error).__name__ if self.policy.private else repr(error)
            say(logger.warning, "not_observed", task=self.name, reason=reason)
            return None
        around = execution()
        return None if around is not None and around.holds(known.key) else known

    def _run(self, known: Identity) -> Callable[[Body], Outcome | Conflict]:
        """What runs a body; it is asked for, so that no frame of it is in the body's traceback."""
        call_id = str(uuid4())
        operation = Operation(
            identity=known,
            policy=self.policy,
            task=self.name,
            task_id=call_id,
            worker=f"{os.getpid()}@{platform.node()}",
            process=this_process(),
            trace=events.read_trace(),
            grace=max(self.where().grace, self.reserve),
        )
        tell = partial(self._tell, call_id)
        delivery = delivery_of(self.where(), operation, CONTROL_FLOW, tell, until=self.until)
        return (lambda body: Outcome(delivery.observe(body))) if self.policy.mode == "observe" else delivery.run

    def _tell(self, call_id: str | None, event: Event) -> None:
        events.report(self.sender or self, call_id, event, observed=self.policy.mode == "observe")
