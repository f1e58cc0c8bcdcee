"""What is kept of results: all, None by choice, or nothing of what is too large."""

import logging
from typing import Any

import pytest
from celery import Task
from kombu.serialization import registry

from celery_idempotent import IdempotentTask, Policy, PolicyError, ReplayedFailure, ResultLost, current_attempt
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, from_plain
from tests.support.deliveries import an_app, deliver, published

LARGE = "é" * 50
"""In JSON six bytes for each letter, and two for the quotes."""

JSON = frozenset({"application/json"})


def _task(policy: Policy, body: Any = lambda order_id: LARGE, **settings: Any) -> Task:
    def charge(order_id: str) -> Any:
        """Run the body of the test."""
        return body(order_id)

    return an_app(**settings)._task_from_fun(
        charge, name="charge", base=IdempotentTask, idempotent=policy, shared=False
    )


def _record(task: Any) -> Record:
    record = runtime_of(task.app).store.get(task.idempotency_key_for("o"))
    assert record is not None
    return record


class TestPrivate:
    """``Policy(private=True)``."""

    def test_the_first_caller_gets_the_value_and_a_replay_none(self) -> None:
        """It is a choice and no loss: nobody is told of an error."""
        task = _task(Policy("order_id", private=True))
        assert [deliver(task, "o").value for _ in range(2)] == [LARGE, None]
        record = _record(task)
        assert (record.status, record.result, record.error) == (Status.COMPLETED, "null", None)

    def test_what_cannot_be_encoded_is_no_loss_either(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing of it is looked at."""
        task = _task(Policy("order_id", private=True), lambda order_id: object(), result_serializer="json")
        deliver(task, "o")
        assert deliver(task, "o").value is None
        assert "result_dropped" not in caplog.text

    @pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
    def test_none_is_kept_in_every_serialiser(self, serializer: str) -> None:
        """A reader of the record finds a result like any other."""
        codec = Codec(serializer, JSON | {"application/x-python-serialize", "application/x-yaml"}, private=True)
        kept = codec.keep_outcome(LARGE)
        assert (kept.value, kept.lost) == (LARGE, None)
        assert kept.encoded is not None
        assert codec.decode(kept.encoded) is None

    def test_steps_keep_theirs(self) -> None:
        """The next attempt needs them."""

        def body(order_id: str) -> str:
            value = current_attempt().step("charge", lambda step: LARGE)
            if current_attempt().number == 1:
                raise RuntimeError
            return value

        task = _task(Policy("order_id", private=True), body)
        assert deliver(task, "o").state == "FAILURE"
        assert isinstance(from_plain(_record(task).steps["charge"]), Finished)
        assert deliver(task, "o").value == LARGE

    def test_a_failure_that_is_an_outcome_is_kept_without_its_text(self) -> None:
        """It is told by its type, which is no result."""

        def body(order_id: str) -> None:
            raise LookupError("declined")

        task = _task(Policy("order_id", private=True, remember=(LookupError,)), body)
        ends = [deliver(task, "o") for _ in range(2)]
        assert [type(ended.value) for ended in ends] == [LookupError, ReplayedFailure]
        assert "declined" not in repr(_record(task))

    def test_a_link_of_a_duplicate_gets_none(self) -> None:
        """What goes on from a replay goes on with what is kept."""
        task = _task(Policy("order_id", private=True))
        link = {"callbacks": [task.app.signature("next")]}
        for _ in range(2):
            deliver(task, "o", request=link)
        assert [message.payload[0] for message in published(task.app)] == [[LARGE], [None]]

    def test_a_publisher_gets_none_of_what_is_done(self) -> None:
        """Under ``publish="once"`` nothing is sent, and the result is there."""
        task = _task(Policy("order_id", private=True, publish="once"))
        deliver(task, "o")
        result: Any = task.delay("o")
        assert (result.state, result.get()) == ("SUCCESS", None)
        assert list(published(task.app)) == []


class TestMaxResult:
    """``Policy(max_result=...)``."""

    @pytest.mark.parametrize(("most", "replays"), [(302, True), (301, False)])
    def test_counts_the_bytes_of_what_is_encoded(self, most: int, replays: bool) -> None:
        """Up to the limit it is kept."""
        task = _task(Policy("order_id", max_result=most))
        assert deliver(task, "o").value == LARGE
        replayed = deliver(task, "o")
        assert _record(task).status is Status.COMPLETED
        if replays:
            assert replayed.value == LARGE
        else:
            assert isinstance(replayed.value, ResultLost)
            assert replayed.value.reason == "302 bytes, over 301"

    @pytest.mark.parametrize("serializer", ["yaml", "pickle"])
    def test_counts_bytes_and_not_characters(self, serializer: str) -> None:
        """Of texts as of bytes."""
        accept = JSON | {"application/x-python-serialize", "application/x-yaml"}
        encoded = Codec(serializer, accept).encode(LARGE).data
        exact = len(encoded.encode() if isinstance(encoded, str) else encoded)
        assert Codec(serializer, accept, max_result=exact).keep_outcome(LARGE).encoded is not None
        assert Codec(serializer, accept, max_result=exact - 1).keep_outcome(LARGE).lost is not None

    def test_a_text_is_counted_by_its_bytes(self) -> None:
        """Of a serialiser that writes letters as they are."""
        registry.register("letters", str, str, content_type="text/x-letters", content_encoding="utf-8")
        try:
            kept = [
                Codec("letters", frozenset({"text/x-letters"}), max_result=most).keep_outcome(LARGE)
                for most in (100, 99)
            ]
        finally:
            registry.unregister("letters")
        assert [each.lost for each in kept] == [None, "100 bytes, over 99"]

    def test_a_loss_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        """As one that the store causes: people hear of it before a duplicate does."""
        deliver(_task(Policy("order_id", max_result=10)), "o")
        (line,) = (each for each in caplog.records if "result_dropped" in each.getMessage())
        assert line.levelno == logging.WARNING

    def test_what_cannot_be_encoded_is_lost_for_that_reason(self) -> None:
        """It has no size."""
        kept = Codec("json", JSON, max_result=10).keep_outcome(object())
        assert "not encodable" in str(kept.lost)

    def test_steps_are_not_limited(self) -> None:
        """A step without its result would stop the next attempt."""
        task = _task(
            Policy("order_id", max_result=10), lambda order_id: len(current_attempt().step("s", lambda s: LARGE))
        )
        assert [deliver(task, "o").value for _ in range(2)] == [50, 50]

    def test_a_publisher_sends_what_only_a_delivery_can_tell(self) -> None:
        """Under ``publish="once"``, as of every result that was lost."""
        task = _task(Policy("order_id", max_result=10, publish="once"))
        deliver(task, "o")
        task.delay("o")
        assert len(list(published(task.app))) == 1


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "1000"])
def test_a_limit_is_a_whole_number_of_bytes(most: Any) -> None:
    """Refused where it is written."""
    with pytest.raises(PolicyError, match="max_result=.*: must be None or from 1"):
        Policy(max_result=most)


def test_a_limit_of_what_is_not_kept_is_refused() -> None:
    """One of the two is a mistake."""
    with pytest.raises(PolicyError, match="max_result=10: nothing is kept; leave it out"):
        Policy(max_result=10, private=True)


def test_to_keep_is_yes_or_no() -> None:
    """A number of seconds or a text is a misunderstanding."""
    with pytest.raises(PolicyError, match="private='no': must be True or False"):
        Policy(private="no")  # type: ignore[arg-type]
