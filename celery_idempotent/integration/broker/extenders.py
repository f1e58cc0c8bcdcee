"""How brokers extend messages and get them back, by what kombu has of them; every part of kombu used is named here."""

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from celery_idempotent import clock as local_clock
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe
from celery_idempotent.stores.forks import making

logger = logging.getLogger(__name__)


class Missing(Exception):
    """Something inside of kombu or Celery that is not there any more."""


def require(whole: Any, *names: str) -> None:
    """Raise :class:`Missing` if a class or a module of Celery's, or an object of kombu's, has not all of these."""
    whose = f"Celery's {whole.__name__}" if hasattr(whole, "__name__") else f"kombu's {type(whole).__name__}"
    for name in names:
        if not hasattr(whole, name):
            raise Missing(f"{name} of {whose}")


@dataclass(frozen=True)
class Refused:
    """The messages that a broker did not extend, by tag, with the reason; it did extend the others."""

    gone: Mapping[str, str] = field(default_factory=dict)  # those that are not this worker's any more
    failed: Mapping[str, str] = field(default_factory=dict)  # those to ask for again


class RedisExtender:
    """kombu keeps the time of each delivery in a sorted set, and delivers again what stands there for too long."""

    size = 1000  # messages in one request
    longest = float("inf")  # seconds for which a message can be held in all
    queues: tuple[str, ...] = ("",)  # what has to be looked after though no message of it is held

    def __init__(self, channel: Any) -> None:
        require(channel, "conn_or_acquire", "unacked_index_key", "visibility_timeout", "qos")
        require(channel.qos, "restore_visible")
        if not {"num", "interval"} <= inspect.signature(channel.qos.restore_visible).parameters.keys():
            raise Missing("arguments num and interval of kombu's restore_visible")
        self._channel = channel

    def queue_of(self, message: Any) -> str:
        """What the visibility timeout of a message belongs to: all queues share one."""
        return ""

    def visibility(self, queue: str) -> float:
        """The visibility timeout in seconds."""
        return float(self._channel.visibility_timeout)

    def extend(self, queue: str, seconds: Mapping[str, int]) -> Refused:
        """As if they had just been delivered, on the clock of this machine, as kombu does; what is gone stays gone."""
        now = time.time()
        with self._channel.conn_or_acquire() as client:
            client.zadd(self._channel.unacked_index_key, dict.fromkeys(seconds, now), xx=True)
        return Refused()

    def restore(self) -> None:
        """What kombu itself does, by default, every hundred seconds, and in some pools never."""
        limit = getattr(self._channel, "unacked_restore_limit", None)
        self._channel.qos.restore_visible(num=limit, interval=1)


class SqsExtender:
    """SQS counts by itself, and is told by the receipt of each message, which is kombu's delivery tag."""

    size = 10
    longest = 12 * 3600.0 - 60  # SQS's limit since it handed the message out, which may have been on its way
    queues: tuple[str, ...] = ()

    def __init__(self, channel: Any) -> None:
        require(channel, "sqs", "predefined_queues", "visibility_timeout", "basic_ack", "basic_reject", "qos")
        require(channel.qos, "ack")
        self._channel = channel
        self._timeouts: dict[str, tuple[float, float]] = {}
        self._quick: dict[Any, tuple[Any, Any]] = {}

    def queue_of(self, message: Any) -> str:
        try:
            return str(message.delivery_info["sqs_queue"])
        except KeyError:
            raise Missing("delivery_info['sqs_queue'] of a message of kombu's") from None

    def visibility(self, queue: str) -> float:
        """That of the queue: kombu receives without one, and sets its own only on queues that it creates."""
        timeout, ends_at = self._timeouts.get(queue, (0.0, 0.0))
        if ends_at < local_clock.monotonic():
            try:
                answer = self._client(queue).get_queue_attributes(QueueUrl=queue, AttributeNames=["VisibilityTimeout"])
                timeout = float(answer["Attributes"]["VisibilityTimeout"])
            except Exception as error:
                if not code_of(error).startswith("AccessDenied"):
                    raise
                assumed = self._channel.visibility_timeout
                say(logger.warning, "visibility_unknown", queue=queue, assumed=assumed, reason=describe(error))
                timeout = float(assumed)
            self._timeouts[queue] = timeout, local_clock.monotonic() + 600  # people can change it
        return timeout

    def extend(self, queue: str, seconds: Mapping[str, int]) -> Refused:
        """One request; SQS answers for each message by itself."""
        tags = list(seconds)
        entries = [
            {"Id": str(number), "ReceiptHandle": tag, "VisibilityTimeout": seconds[tag]}
            for number, tag in enumerate(tags)
        ]
        answer = self._client(queue).change_message_visibility_batch(QueueUrl=queue, Entries=entries)
        gone: dict[str, str] = {}
        failed: dict[str, str] = {}
        for each in answer.get("Failed", ()):
            found = gone if is_gone(each["Code"]) else failed
            found[tags[int(each["Id"])]] = f"{each['Code']}: {each.get('Message', '')}"
        return Refused(gone, failed)

    def restore(self) -> None:
        """SQS does so by itself."""

    def _client(self, queue: str) -> Any:
        """As kombu's for this queue, renewed tokens included, but with timeouts that a visibility timeout survives."""
        predefined = self._channel.predefined_queues
        name = next((name for name, each in predefined.items() if each.get("url") == queue), None)
        client = self._channel.sqs(queue=name)
        credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
        if credentials is None:
            return client
        frozen, meta = credentials.get_frozen_credentials(), client.meta
        known, quick = self._quick.get(name, (None, None))
        if known != (client, frozen):
            from kombu.asynchronous.aws.ext import boto3  # type: ignore[attr-defined]  # the one that kombu found

            with making:
                session = boto3.Session(frozen.access_key, frozen.secret_key, frozen.token, meta.region_name)
                short = type(meta.config)(connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2})
                quick = session.client("sqs", endpoint_url=meta.endpoint_url, config=meta.config.merge(short))
            self._quick[name] = (client, frozen), quick
        return quick


Extender = RedisExtender | SqsExtender
"""Extends the messages of a worker, over a channel of its consumer's; may ask the broker."""


def extender_of(driver: str, channel: Any) -> Extender | None:
    """What extends messages of a channel; None where the broker takes none back; :class:`Missing` by another kombu."""
    if driver == "redis":
        require(channel, "ack_emulation")
        return RedisExtender(channel) if channel.ack_emulation else None
    if driver == "sqs":
        extender = SqsExtender(channel)
        survive_expired_receipts(channel)
        return extender
    return None


def survive_expired_receipts(channel: Any) -> None:
    """Have a worker outlive messages of SQS that it acknowledges or gives back too late, and somebody else gets."""
    # SQS may refuse to delete such a message or to show it again. kombu 5.3 to 5.6 let that end the worker where a
    # backoff policy is set, and every kombu does where the message is given back (celery/kombu issue 1391).

    def surviving(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def settle(delivery_tag: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(delivery_tag, *args, **kwargs)
            except Exception as error:
                if not is_gone(code_of(error)):
                    raise
                # Otherwise the place that it takes in the prefetch window would never be free again.
                channel.qos.ack(delivery_tag)
                say(logger.warning, "receipt_expired", method=method.__name__, reason=describe(error))

        return settle

    channel.basic_ack, channel.basic_reject = surviving(channel.basic_ack), surviving(channel.basic_reject)


def make_visible(channel: Any, delivery_info: Mapping[str, Any]) -> None:
    """Have SQS show a message that was given back: it would hide it for as long as a worker polls, 10 seconds."""
    try:
        client = channel.sqs(queue=channel.canonical_queue_name(delivery_info.get("routing_key")))
        receipt = delivery_info["sqs_message"]["ReceiptHandle"]
        client.change_message_visibility(
            QueueUrl=delivery_info["sqs_queue"], ReceiptHandle=receipt, VisibilityTimeout=0
        )
    except Exception as error:  # noqa: BLE001 - it comes all the same, only later
        say(logger.info, "message_comes_later", reason=type(error).__name__)


_GONE = {"InvalidParameterValue", "MessageNotInflight", "ReceiptHandleIsInvalid"}


def is_gone(code: str) -> bool:
    """Whether SQS means by ``code`` that a message is nobody's, or somebody else's: acknowledged, or out of time."""
    # Both protocols of SQS put a namespace before some codes: "AWS.SimpleQueueService.", "com.amazonaws.sqs#".
    return code.replace("#", ".").rpartition(".")[2] in _GONE


def code_of(error: BaseException) -> str:
    """The code in a refusal of AWS; empty where it is something else, such as a connection that broke."""
    response: Any = getattr(error, "response", None)
    told = response.get("Error") if isinstance(response, Mapping) else None
    return str(told.get("Code", "")) if isinstance(told, Mapping) else ""
