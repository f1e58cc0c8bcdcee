"""AWS Lambda: a function of one message becomes the handler of a queue's batches, with each effect once.

An invocation ends at a moment that is known, and then its process is frozen or killed. So no claim lasts longer, no
step begins shortly before it, and when the handler returns nothing is under way. Messages that are to come again are
named in the response: the event source mapping must have ``ReportBatchItemFailures``, or Lambda deletes them with the
rest.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NoReturn, Protocol

from celery import Celery

from celery_idempotent import clock
from celery_idempotent.contrib.sns import unwrap
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.errors import IdempotencyError, InFlight, KeyMissing, PolicyError, ResultLost
from celery_idempotent.integration import binding
from celery_idempotent.integration.task.functions import is_async, is_method, name_of, refuse_what_is_no_function
from celery_idempotent.integration.task.guard import Guard, check_policy, place_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.effects import Duration, is_duration, milliseconds
from celery_idempotent.protocol.keys import CallSignature, Identity
from celery_idempotent.protocol.policy import MIN_LEASE, Policy
from celery_idempotent.protocol.store import Store

__all__ = ["sqs_batch"]

logger = logging.getLogger(__name__)

_Message = Mapping[str, Any]
"""A record of the event, as Lambda gives it."""


class BatchHandler(Protocol):
    """What Lambda calls."""

    name: str
    """In records, logs and keys."""

    def __call__(self, event: Mapping[str, Any], context: Any) -> dict[str, list[dict[str, str]]]:
        """Handle a batch; the response names the messages that are to come again."""

    def idempotency_key_for(self, **arguments: Any) -> str:
        """The key of a message with these members."""

    def guarantee(self) -> str:
        """What is promised, in words."""


def sqs_batch(
    policy: Policy | None = None,
    *,
    store: str | Store | None = None,
    app: Celery | None = None,
    name: str | None = None,
    record: str | None = None,
    key: Callable[[_Message], str | None] | None = None,
    needs: Duration = 0,
    reserve: Duration = 1,
) -> Callable[[Callable[..., Any]], BatchHandler]:
    """Make a Lambda handler of a function that handles one message of SQS::

        @sqs_batch(Policy("order_id"), store="dynamodb://@eu-west-1/idempotency")
        def handler(order_id: str, cents: int) -> None: ...

    A message's body is a JSON object, or the envelope that SNS puts around one. Its members are the function's
    arguments, by name. Others are ignored, so that a publisher may add some; a parameter ``**rest`` takes them.

    A message comes again unless its operation has a result: after any exception, also one that is remembered, and when
    another invocation has the operation in flight. What keeps failing ends in the queue's dead-letter queue, with its
    body. In a FIFO queue the later messages of its group come again with it, and run after it.

    Args:
        policy: As of :func:`~celery_idempotent.idempotent`. Its ``lease`` and ``deadline`` are cut to what is left of
            the invocation, without ``reserve``, and a takeover waits for at least ``reserve`` after a lease.
        store: Likewise where operations are recorded.
        app: Likewise the app whose settings count.
        name: Likewise what the function is called; default: module and qualified name.
        record: Which parameter gets the whole record of the event: ``messageId``, ``attributes``,
            ``messageAttributes``. It differs from delivery to delivery, so it is no part of key and fingerprint.
        key: Gives the key by the record, in place of the policy's, such as ``itemgetter("messageId")``, which tells
            apart what a publisher sent twice. None or an empty text is ``KeyMissing``.
        needs: Seconds that a message takes. With less time left, none is begun; the rest comes again.
        reserve: Seconds at the end of the invocation in which nothing begins, neither a message nor a step.

    Raises:
        PolicyError: At the definition, as of :func:`~celery_idempotent.idempotent`, or as ``record`` is no parameter.
            From the handler: the event is not one of SQS.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError("policy", repr(policy), "write @sqs_batch(Policy(...), store=...)")
    for option, seconds in (("needs", needs), ("reserve", reserve)):
        if not is_duration(seconds):
            raise PolicyError(option, repr(seconds), "must be seconds or a timedelta, not negative")
    where = place_of(store, app)

    def decorated(function: Callable[..., Any]) -> BatchHandler:
        refuse_what_is_no_function(function)
        named = name or name_of(function)
        with binding.named(named):
            consumer = _Consumer(function, Guard(named, policy, where), record, key)

        def handler(event: Mapping[str, Any], context: Any) -> dict[str, list[dict[str, str]]]:
            messages = _messages(event)
            remaining: Callable[[], float] = context.get_remaining_time_in_millis if context else lambda: inf
            least = max(milliseconds(needs), MIN_LEASE * 1000)
            returned = consumer.unfinished(messages, remaining, least, milliseconds(reserve))
            return {"batchItemFailures": [{"itemIdentifier": each} for each in returned]}

        made: Any = handler
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        consumer.gate.introduce(made, lambda **arguments: consumer.key_for(arguments))
        found: BatchHandler = made
        return found

    return decorated


class _Unusable(Exception):
    """A message that the function cannot be called with; the text says why, and quotes nothing of it."""


class _Consumer:
    """What is done with one message."""

    def __init__(
        self,
        function: Callable[..., Any],
        gate: Guard,
        record: str | None,
        key: Callable[[_Message], str | None] | None,
    ) -> None:
        self._function = function
        self.gate = gate
        self._record = record
        self._key = key
        if is_async(function):
            remedy = "Lambda awaits nothing; write def, and asyncio.run(...) in the body"
            raise PolicyError("function", "async def", remedy)
        if is_method(function):
            raise PolicyError("function", "a method", "Lambda calls a function of a module")
        parameters = dict(inspect.signature(function).parameters)
        for each in parameters.values():
            if each.kind in {each.POSITIONAL_ONLY, each.VAR_POSITIONAL}:
                remedy = "arguments are given by name; this parameter can get none"
                raise PolicyError("function", str(each), remedy)
        if record is not None and parameters.pop(record, None) is None:
            raise PolicyError("record", repr(record), f"the function has no such parameter: {list(parameters)}")
        self._signature = CallSignature(inspect.Signature(list(parameters.values())))
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if gate.declared is not None:
            check_policy(gate.declared, self._signature.signature)

    def unfinished(
        self, messages: list[_Message], remaining: Callable[[], float], least: float, reserve: int
    ) -> Iterator[str]:
        """Handle the messages; the ids of those that are to come again. All times are milliseconds."""
        blocked: set[str] = set()
        for place, message in enumerate(messages):
            left = remaining() - reserve
            if left < least:
                advice = "a smaller batch or a longer timeout of the function leaves more"
                reason = f"{max(left, 0) / 1000:.1f} s are left; {advice}"
                unstarted = len(messages) - place
                say(logger.warning, "messages_unstarted", task=self.gate.name, messages=unstarted, reason=reason)
                yield from (each["messageId"] for each in messages[place:])
                return
            # Within a group order counts. A standard queue has groups, too, for fairness, and no order.
            is_ordered = message.get("eventSourceARN", "").endswith(".fifo")
            group = message.get("attributes", {}).get("MessageGroupId") if is_ordered else None
            if group in blocked:
                reason = "it comes after one of its group that comes again"
                _tell(logging.INFO, self.gate.name, message, reason)
            elif self._consume(message, _bound(self.gate, left, reserve)):
                continue
            elif group is not None:
                blocked.add(group)
            yield message["messageId"]

    def _consume(self, message: _Message, gate: Guard) -> bool:
        """Have the message's effect happen, unless it has happened; False where the message is to come again."""
        try:
            arguments = self._arguments(message)

            given = {} if self._record is None else {self._record: message}
            body = partial(self._function, **arguments, **given)
            found = gate.call(partial(self._identity, message, arguments), body)
            if isinstance(found, Conflict):
                raise found.error
        except ResultLost:
            return True  # the effect has happened, and nobody asks for its result
        except InFlight as error:
            _tell(logging.INFO, gate.name, message, error)
        except (_Unusable, IdempotencyError) as error:
            _tell(logging.ERROR, gate.name, message, error)
        except Exception as error:  # noqa: BLE001 - the body's own: the others of the batch are none of its business
            is_secret = gate.policy.private
            reason = type(error).__name__ if is_secret else f"{type(error).__name__}: {error}"
            _tell(logging.ERROR, gate.name, message, reason, exc_info=None if is_secret else error)
        else:
            return True
        return False

    def key_for(self, arguments: Mapping[str, Any]) -> str:
        """The key of a message with these members, by the policy."""
        return self.gate.identity(self._signature, (), self._known(arguments)).key

    def _identity(self, message: _Message, arguments: Mapping[str, Any]) -> Identity:
        explicit = None if self._key is None else self._key(message)
        if self._key is not None and not explicit:
            raise KeyMissing(self.gate.name, f"key={self._key!r}")
        return self.gate.identity(self._signature, (), arguments, explicit=explicit)

    def _arguments(self, message: _Message) -> dict[str, Any]:
        body = message["body"]
        notification = unwrap(body)
        if notification is not None and notification.kind != "Notification":
            raise _Unusable(f"nobody published it: it is a {notification.kind} of SNS")
        try:
            members = json.loads(notification.text if notification else body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _Unusable(f"the body is no JSON: {error}") from None
        if not isinstance(members, dict):
            raise _Unusable(f"the body is no JSON object, but a {type(members).__name__}")
        arguments = self._known(members)
        try:
            self._signature.bind((), arguments)
        except TypeError as error:
            raise _Unusable(f"the body does not fit the function: {error}") from None
        return arguments

    def _known(self, members: Mapping[str, Any]) -> dict[str, Any]:
        known = self._signature.signature.parameters
        return {
            name: value
            for name, value in members.items()
            if (name in known or self._takes_all) and name != self._record
        }


def _bound(gate: Guard, left: float, reserve: int) -> Guard:
    """``gate`` for an operation that has to end within ``left`` milliseconds."""
    if left == inf:
        return gate
    policy = gate.policy
    longest = min(policy.deadline_ms, left)
    bounded = replace(policy, lease=min(policy.lease_ms, longest) / 1000, deadline=longest / 1000)
    # Until the end of the reserve something can be running.
    return replace(gate, declared=bounded, until=clock.monotonic() + left / 1000, reserve=reserve)


def _tell(level: int, task: str, message: _Message, reason: object, exc_info: BaseException | None = None) -> None:
    say(
        partial(logger.log, level, exc_info=exc_info),
        "message_returned",
        task=task,
        message_id=message["messageId"],
        received=message.get("attributes", {}).get("ApproximateReceiveCount"),
        reason=reason,
    )


_ONLY = "sqs_batch handles the batches of an SQS queue, and nothing else"


def _messages(event: Mapping[str, Any]) -> list[_Message]:
    records = event.get("Records") if isinstance(event, Mapping) else None
    if not isinstance(records, list):
        raise PolicyError("event", type(event).__name__, f"it has no Records; {_ONLY}")
    for each in records:
        if each.get("eventSource") != "aws:sqs":
            raise PolicyError("eventSource", repr(each.get("eventSource")), _ONLY)
    return records


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
