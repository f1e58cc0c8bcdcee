"""``Policy(private=True)``: no result is kept, and of an exception only its type."""

from typing import Any

import pytest
from celery import Task

from celery_idempotent import IdempotentTask, Policy, PolicyError, ReplayedFailure, current_attempt
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, from_plain
from tests.support.deliveries import an_app, deliver, published

RESULT = "a secret"

JSON = frozenset({"application/json"})


def _task(policy: Policy, body: Any = lambda order_id: RESULT, **settings: Any) -> Task:
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


def test_the_first_caller_gets_the_value_and_a_replay_none() -> None:
    """It is a choice and no loss: nobody is told of an error."""
    task = _task(Policy("order_id", private=True))
    assert [deliver(task, "o").value for _ in range(2)] == [RESULT, None]
    record = _record(task)
    assert (record.status, record.result, record.error) == (Status.COMPLETED, "null", None)


def test_what_cannot_be_encoded_is_no_loss_either(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is looked at."""
    task = _task(Policy("order_id", private=True), lambda order_id: object(), result_serializer="json")
    deliver(task, "o")
    assert deliver(task, "o").value is None
    assert "result_dropped" not in caplog.text


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_none_is_kept_in_every_serialiser(serializer: str) -> None:
    """A reader of the record finds a result like any other."""
    codec = Codec(serializer, JSON | {"application/x-python-serialize", "application/x-yaml"}, private=True)
    kept = codec.keep_outcome(RESULT)
    assert (kept.value, kept.lost) == (RESULT, None)
    assert kept.encoded is not None
    assert codec.decode(kept.encoded) is None


def test_steps_keep_theirs() -> None:
    """The next attempt needs them."""

    def body(order_id: str) -> str:
        value = current_attempt().step("charge", lambda step: RESULT)
        if current_attempt().number == 1:
            raise RuntimeError
        return value

    task = _task(Policy("order_id", private=True), body)
    assert deliver(task, "o").state == "FAILURE"
    assert isinstance(from_plain(_record(task).steps["charge"]), Finished)
    assert deliver(task, "o").value == RESULT


def test_a_failure_that_is_an_outcome_is_kept_without_its_text() -> None:
    """It is told by its type, which is no result."""

    def body(order_id: str) -> None:
        raise LookupError("declined")

    task = _task(Policy("order_id", private=True, remember=(LookupError,)), body)
    ends = [deliver(task, "o") for _ in range(2)]
    assert [type(ended.value) for ended in ends] == [LookupError, ReplayedFailure]
    assert "declined" not in repr(_record(task))


def test_a_link_of_a_duplicate_gets_none() -> None:
    """What goes on from a replay goes on with what is kept."""
    task = _task(Policy("order_id", private=True))
    link = {"callbacks": [task.app.signature("next")]}
    for _ in range(2):
        deliver(task, "o", request=link)
    assert [message.payload[0] for message in published(task.app)] == [[RESULT], [None]]


def test_a_publisher_gets_none_of_what_is_done() -> None:
    """Under ``publish="once"`` nothing is sent, and the result is there."""
    task = _task(Policy("order_id", private=True, publish="once"))
    deliver(task, "o")
    result: Any = task.delay("o")
    assert (result.state, result.get()) == ("SUCCESS", None)
    assert list(published(task.app)) == []


def test_to_keep_is_yes_or_no() -> None:
    """A number of seconds or a text is a misunderstanding."""
    with pytest.raises(PolicyError, match="private='no': must be True or False"):
        Policy(private="no")  # type: ignore[arg-type]
