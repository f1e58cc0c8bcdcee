"""What is asked of kombu and of the brokers behind it, and what their answers mean."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.integration.broker import extenders
from celery_idempotent.integration.broker.extenders import Missing, RedisExtender, Refused, SqsExtender, extender_of

REDIS_PARTS = ["ack_emulation", "conn_or_acquire", "unacked_index_key", "visibility_timeout", "qos"]
SQS_PARTS = ["sqs", "predefined_queues", "visibility_timeout", "basic_ack", "basic_reject", "qos"]
URL = "https://sqs.eu-west-1.amazonaws.com/1/orders"


def refusal(code: str) -> Exception:
    """As botocore's."""
    error: Any = Exception(code)
    error.response = {"Error": {"Code": code, "Message": "m"}}
    return error  # type: ignore[no-any-return]


class RedisChannel:
    """The part of kombu's that is used."""

    ack_emulation = True
    unacked_index_key = "index"
    visibility_timeout = 60

    def __init__(self) -> None:
        self.added, self.restored = list[Any](), list[Any]()
        self.qos = SimpleNamespace(restore_visible=self._restore)

    @contextmanager
    def conn_or_acquire(self) -> Iterator[Any]:
        yield SimpleNamespace(zadd=lambda key, scores, xx: self.added.append((key, scores, xx)))

    def _restore(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        self.restored.append((num, interval))


class SqsChannel:
    """The part of kombu's, and of boto3's behind it, that is used; ``error`` is what they raise."""

    visibility_timeout = 1800

    def __init__(self, **predefined: str) -> None:
        self.predefined_queues = {name: {"url": url} for name, url in predefined.items()}
        self.asked, self.failed = list[Any](), list[dict[str, str]]()
        self.error: Exception | None = None
        self.client: Any = self
        self.qos = SimpleNamespace(ack=lambda tag: self.asked.append(("forgotten", tag)))

    def sqs(self, queue: str | None = None) -> Any:
        self.asked.append(("client", queue))
        return self.client

    def get_queue_attributes(self, **asked: Any) -> Any:
        self._note(asked)
        return {"Attributes": {"VisibilityTimeout": "30"}}

    def change_message_visibility_batch(self, **asked: Any) -> Any:
        self._note(asked)
        return {"Successful": [], **({"Failed": self.failed} if self.failed else {})}

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._note(("ack", delivery_tag, multiple))

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self._note(("reject", delivery_tag, requeue))

    def _note(self, asked: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(asked)


@pytest.mark.parametrize("driver", ["amqp", "memory", "gcpubsub", "N/A", "redis"])
def test_brokers_that_take_no_message_back_have_nothing_to_hold(driver: str) -> None:
    """Nor has Redis with ``ack_emulation=False``: kombu forgets a message when it delivers it."""
    assert extender_of(driver, SimpleNamespace(ack_emulation=False)) is None


@pytest.mark.parametrize(
    ("driver", "name"), [*(("redis", each) for each in REDIS_PARTS), *(("sqs", each) for each in SQS_PARTS)]
)
def test_what_kombu_does_not_have_any_more_is_named(driver: str, name: str) -> None:
    """When the worker starts."""
    channel = RedisChannel() if driver == "redis" else SqsChannel()
    kept = {each: getattr(channel, each) for each in dir(channel) if each != name and not each.startswith("__")}
    with pytest.raises(Missing, match=f"^{name} of kombu's"):
        extender_of(driver, SimpleNamespace(**kept))


def test_a_message_of_redis_counts_as_delivered_just_now() -> None:
    """Only if it is still there: nothing that was acknowledged comes to life again."""
    channel = RedisChannel()
    extender: Any = extender_of("redis", channel)
    before = time.time()
    assert extender.extend(extender.queue_of(None), {"a": 60, "b": 60}) == Refused()
    ((key, scores, only_there),) = channel.added
    assert (key, set(scores), only_there, extender.visibility("")) == ("index", {"a", "b"}, True, 60)
    assert all(before <= score <= time.time() for score in scores.values())


def test_redis_is_searched_for_what_nobody_holds_at_each_call() -> None:
    """Not at each tenth, as kombu would; with the limit that is set."""
    channel: Any = RedisChannel()
    RedisExtender(channel).restore()
    channel.unacked_restore_limit = 7
    RedisExtender(channel).restore()
    assert channel.restored == [(None, 1), (7, 1)]


def test_messages_of_sqs_are_extended_in_one_request_and_each_has_its_answer() -> None:
    """By its receipt: one is gone, another has to be asked for again, the rest is extended. SQS restores by itself."""
    channel = SqsChannel()
    extender = SqsExtender(channel)
    assert extender.extend(URL, {"a": 30}) == Refused()
    channel.failed = [
        {"Id": "0", "Code": "ReceiptHandleIsInvalid", "Message": "expired"},
        {"Id": "2", "Code": "InternalError"},
    ]
    answer = extender.extend(URL, {"a": 30, "b": 7, "c": 30})
    extender.restore()
    assert answer == Refused({"a": "ReceiptHandleIsInvalid: expired"}, {"c": "InternalError: "})
    asked = [("0", "a", 30), ("1", "b", 7), ("2", "c", 30)]
    names = "Id", "ReceiptHandle", "VisibilityTimeout"
    assert channel.asked[-1] == {"QueueUrl": URL, "Entries": [dict(zip(names, each, strict=True)) for each in asked]}


def test_the_timeout_is_that_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the transport, which kombu sets only on queues that it creates; asked for now and then."""
    channel, now = SqsChannel(), [1000.0]
    monkeypatch.setattr("celery_idempotent.integration.broker.extenders.local_clock.monotonic", lambda: now[0])
    extender = SqsExtender(channel)
    for later, requests in ((0, 1), (599, 1), (2, 2)):
        now[0] += later
        assert extender.visibility(URL) == 30
        assert channel.asked.count({"QueueUrl": URL, "AttributeNames": ["VisibilityTimeout"]}) == requests


def test_a_worker_that_may_not_ask_takes_the_transports_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """And of which queue; whatever else fails is asked again, and nothing is assumed."""
    channel = SqsChannel()
    channel.error = refusal("AccessDenied")
    assert SqsExtender(channel).visibility(URL) == 1800
    assert f"idempotency.visibility_unknown queue={URL} assumed=1800" in caplog.text
    for error in (OSError("reset"), refusal("RequestThrottled")):
        channel.error = error
        with pytest.raises(type(error)):
            SqsExtender(channel).visibility(URL)


def test_a_predefined_queue_is_asked_with_its_own_credentials() -> None:
    """kombu has a client for each. A message tells its queue, or it is said what is missing."""
    channel = SqsChannel(other="https://elsewhere", orders=URL)
    extender = SqsExtender(channel)
    extender.extend(extender.queue_of(SimpleNamespace(delivery_info={"sqs_queue": URL})), {"a": 30})
    extender.extend("https://not/predefined", {"a": 30})
    with pytest.raises(Missing, match="sqs_queue"):
        extender.queue_of(SimpleNamespace(delivery_info={}))
    assert [each[1] for each in channel.asked if isinstance(each, tuple)] == ["orders", None]


def test_requests_do_not_hang_for_botocores_minute() -> None:
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


@pytest.mark.parametrize("method", ["basic_ack", "basic_reject"])
def test_worker_outlives_a_message_of_sqs_settled_too_late(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """kombu issue 1391: it is forgotten, with a free place for another. Other errors are Celery's to deal with."""
    channel: Any = SqsChannel()
    assert isinstance(extender_of("sqs", channel), SqsExtender)
    getattr(channel, method)("in time", True)
    channel.error = refusal("InvalidParameterValue")
    getattr(channel, method)("late")
    assert channel.asked == [(method.removeprefix("basic_"), "in time", True), ("forgotten", "late")]
    assert f"idempotency.receipt_expired method={method}" in caplog.text
    for error in (OSError("reset"), refusal("AccessDenied")):
        channel.error = error
        with pytest.raises(type(error)):
            getattr(channel, method)("a")


def test_a_refusal_is_read_by_its_code() -> None:
    """Of one message; what is unknown is asked again."""
    gone = ["AWS.SimpleQueueService.MessageNotInflight", "com.amazonaws.sqs#ReceiptHandleIsInvalid"]
    codes = [extenders.code_of(refusal(each)) for each in (*gone, "InternalError", "")]
    assert [extenders.is_gone(each) for each in codes] == [True, True, False, False]
