"""What is asked of kombu and of the brokers behind it, and what their answers mean."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.integration.broker.extenders import (
    Missing,
    RedisExtender,
    Refused,
    SqsExtender,
    extender_of,
    survive_expired_receipts,
)
from tests.unit.test_visibility import AwsRefusal

URL = "https://sqs.eu-west-1.amazonaws.com/1/orders"


class RedisChannel:
    """The part of kombu's that is used."""

    ack_emulation = True
    unacked_index_key = "index"
    visibility_timeout = 60

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.restored: list[Any] = []
        self.qos = SimpleNamespace(restore_visible=self._restore)

    @contextmanager
    def conn_or_acquire(self) -> Iterator[Any]:
        """A client."""
        yield SimpleNamespace(zadd=lambda key, scores, xx: self.added.append((key, scores, xx)))

    def _restore(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        self.restored.append((num, interval))


class SqsClient:
    """The part of boto3's that is used; ``refusals`` has what it raises or says next."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.batches: list[Any] = []
        self.failed: list[dict[str, str]] = []
        self.error: Exception | None = None

    def get_queue_attributes(self, QueueUrl: str, AttributeNames: list[str]) -> Any:  # noqa: N803 - boto3's names
        """The timeout."""
        self.asked.append(QueueUrl)
        if self.error is not None:
            raise self.error
        assert AttributeNames == ["VisibilityTimeout"]
        return {"Attributes": {"VisibilityTimeout": "30"}}

    def change_message_visibility_batch(self, QueueUrl: str, Entries: list[dict[str, Any]]) -> Any:  # noqa: N803
        """Keep what was asked for."""
        self.batches.append((QueueUrl, Entries))
        return {"Successful": [], "Failed": self.failed} if self.failed else {"Successful": []}


class SqsChannel:
    """The part of kombu's that is used."""

    visibility_timeout = 1800

    def __init__(self, **predefined: str) -> None:
        self.client = SqsClient()
        self.predefined_queues = {name: {"url": url} for name, url in predefined.items()}
        self.queues: list[str | None] = []
        self.settled: list[Any] = []
        self.error: Exception | None = None
        self.qos = SimpleNamespace(ack=lambda tag: self.settled.append(("forgotten", tag)))

    def sqs(self, queue: str | None = None) -> Any:
        """The client of a queue."""
        self.queues.append(queue)
        return self.client

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge."""
        self._settle(("ack", delivery_tag, multiple))

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give back."""
        self._settle(("reject", delivery_tag, requeue))

    def _settle(self, asked: Any) -> None:
        if self.error is not None:
            raise self.error
        self.settled.append(asked)


def without(channel: Any, name: str) -> Any:
    """The same channel in a kombu that has no such thing."""
    kept = {each: getattr(channel, each) for each in dir(channel) if each != name and not each.startswith("__")}
    return SimpleNamespace(**kept)


@pytest.mark.parametrize("driver", ["amqp", "memory", "gcpubsub", "N/A"])
def test_other_brokers_have_nothing_to_hold(driver: str) -> None:
    """They do not take messages back from a worker that lives, or know how to be told by themselves."""
    assert extender_of(driver, SimpleNamespace()) is None


class TestRedis:
    """Redis, by kombu's sorted set."""

    def test_a_message_counts_as_delivered_just_now(self) -> None:
        """Only if it is still there: nothing that was acknowledged comes to life again."""
        channel = RedisChannel()
        extender = extender_of("redis", channel)
        assert isinstance(extender, RedisExtender)
        before = time.time()
        assert extender.extend(extender.queue_of(None), {"a": 60, "b": 60}) == Refused()
        ((key, scores, only_there),) = channel.added
        assert (key, set(scores), only_there) == ("index", {"a", "b"}, True)
        assert all(before <= score <= time.time() for score in scores.values())
        assert extender.visibility("") == 60

    def test_what_nobody_holds_is_looked_for_at_once(self) -> None:
        """Not at each tenth call, as kombu would; with the limit that is set."""
        channel: Any = RedisChannel()
        RedisExtender(channel).restore()
        channel.unacked_restore_limit = 7
        RedisExtender(channel).restore()
        assert channel.restored == [(None, 1), (7, 1)]

    def test_a_channel_without_acknowledgements_has_nothing_to_hold(self) -> None:
        """``ack_emulation=False``: kombu forgets a message when it delivers it."""
        channel = RedisChannel()
        channel.ack_emulation = False
        assert extender_of("redis", channel) is None

    @pytest.mark.parametrize(
        "name", ["ack_emulation", "conn_or_acquire", "unacked_index_key", "visibility_timeout", "qos"]
    )
    def test_what_kombu_does_not_have_any_more_is_named(self, name: str) -> None:
        """When the worker starts."""
        with pytest.raises(Missing, match=f"^{name} of kombu's"):
            extender_of("redis", without(RedisChannel(), name))

    def test_another_restore_is_named(self) -> None:
        """Its arguments are kombu's."""
        channel = RedisChannel()
        channel.qos = SimpleNamespace(restore_visible=lambda start=0: None)
        with pytest.raises(Missing, match="restore_visible"):
            extender_of("redis", channel)


class TestSqs:
    """SQS, by receipts."""

    def test_messages_are_extended_in_one_request(self) -> None:
        """Each by its own receipt and number of seconds."""
        channel = SqsChannel()
        extender = extender_of("sqs", channel)
        assert isinstance(extender, SqsExtender)
        assert extender.extend(URL, {"a": 30, "b": 7}) == Refused()
        assert channel.client.batches == [
            (
                URL,
                [
                    {"Id": "0", "ReceiptHandle": "a", "VisibilityTimeout": 30},
                    {"Id": "1", "ReceiptHandle": "b", "VisibilityTimeout": 7},
                ],
            )
        ]
        extender.restore()
        assert len(channel.client.batches) == 1

    def test_each_message_has_its_own_answer(self) -> None:
        """One is gone, another one has to be asked for again, the rest is extended."""
        channel = SqsChannel()
        channel.client.failed = [
            {"Id": "0", "Code": "ReceiptHandleIsInvalid", "Message": "expired"},
            {"Id": "2", "Code": "InternalError"},
        ]
        answer = SqsExtender(channel).extend(URL, {"a": 30, "b": 30, "c": 30})
        assert answer == Refused({"a": "ReceiptHandleIsInvalid: expired"}, {"c": "InternalError: "})

    def test_the_timeout_is_that_of_the_queue(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not that of the transport, which kombu sets only on queues that it creates; asked for now and then."""
        channel, now = SqsChannel(), [1000.0]
        monkeypatch.setattr("celery_idempotent.integration.broker.extenders.local_clock.monotonic", lambda: now[0])
        extender = SqsExtender(channel)
        assert [extender.visibility(URL), extender.visibility(URL)] == [30, 30]
        assert channel.client.asked == [URL]
        now[0] += 601
        assert extender.visibility(URL) == 30
        assert channel.client.asked == [URL, URL]

    def test_a_worker_that_may_not_ask_takes_the_transports(self, caplog: pytest.LogCaptureFixture) -> None:
        """And says that it does, and of which queue."""
        channel = SqsChannel()
        channel.client.error = AwsRefusal({"Error": {"Code": "AccessDenied"}})
        with caplog.at_level(logging.WARNING):
            assert SqsExtender(channel).visibility(URL) == 1800
        assert f"idempotency.visibility_unknown queue={URL} assumed=1800" in caplog.text

    @pytest.mark.parametrize("error", [OSError("reset"), AwsRefusal({"Error": {"Code": "RequestThrottled"}})])
    def test_a_broker_that_does_not_answer_is_asked_again(self, error: Exception) -> None:
        """Nothing is assumed."""
        channel = SqsChannel()
        channel.client.error = error
        with pytest.raises(type(error)):
            SqsExtender(channel).visibility(URL)

    def test_a_predefined_queue_is_asked_with_its_own_credentials(self) -> None:
        """kombu has a client for each."""
        channel = SqsChannel(other="https://elsewhere", orders=URL)
        SqsExtender(channel).extend(URL, {"a": 30})
        SqsExtender(channel).extend("https://not/predefined", {"a": 30})
        assert channel.queues == ["orders", None]

    def test_a_message_tells_its_queue(self) -> None:
        """Or it is said what is missing."""
        extender = SqsExtender(SqsChannel())
        assert extender.queue_of(SimpleNamespace(delivery_info={"sqs_queue": URL})) == URL
        with pytest.raises(Missing, match="sqs_queue"):
            extender.queue_of(SimpleNamespace(delivery_info={}))

    def test_requests_do_not_hang_for_botocores_minute(self) -> None:
        """A client of our own with kombu's endpoint and credentials; another one when these are renewed."""
        boto3 = pytest.importorskip("boto3")
        channel = SqsChannel()
        theirs = boto3.Session("key", "secret", "token", "eu-west-1").client("sqs", endpoint_url="http://localhost:1")
        channel.client = theirs
        extender = SqsExtender(channel)
        mine = extender._client(URL)
        assert mine is extender._client(URL)
        assert (mine.meta.endpoint_url, mine.meta.region_name) == ("http://localhost:1", "eu-west-1")
        assert (mine.meta.config.connect_timeout, mine.meta.config.read_timeout) == (3, 5)
        theirs._request_signer._credentials.secret_key = "renewed"
        assert extender._client(URL) is not mine

    @pytest.mark.parametrize(
        "name", ["sqs", "predefined_queues", "visibility_timeout", "basic_ack", "basic_reject", "qos"]
    )
    def test_what_kombu_does_not_have_any_more_is_named(self, name: str) -> None:
        """When the worker starts."""
        with pytest.raises(Missing, match=f"^{name} of kombu's"):
            extender_of("sqs", without(SqsChannel(), name))


class TestExpiredReceipts:
    """kombu issue 1391."""

    def test_a_message_that_is_settled_in_time_is_settled_as_ever(self) -> None:
        """With its arguments."""
        channel = SqsChannel()
        survive_expired_receipts(channel)
        channel.basic_ack("a", multiple=True)
        channel.basic_reject("b", requeue=True)
        assert channel.settled == [("ack", "a", True), ("reject", "b", True)]

    @pytest.mark.parametrize("name", ["basic_ack", "basic_reject"])
    def test_one_that_comes_too_late_is_forgotten(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        """And the worker goes on, with a free place for another message."""
        channel = SqsChannel()
        survive_expired_receipts(channel)
        channel.error = AwsRefusal({"Error": {"Code": "InvalidParameterValue", "Message": "has expired"}})
        with caplog.at_level(logging.WARNING):
            getattr(channel, name)("a")
        assert channel.settled == [("forgotten", "a")]
        assert f"idempotency.receipt_expired method={name}" in caplog.text

    @pytest.mark.parametrize("error", [OSError("reset"), AwsRefusal({"Error": {"Code": "AccessDenied"}})])
    def test_other_errors_are_celerys(self, error: Exception) -> None:
        """They are about the connection or the settings."""
        channel = SqsChannel()
        survive_expired_receipts(channel)
        channel.error = error
        with pytest.raises(type(error)):
            channel.basic_ack("a")
