"""``Policy(private=True)``: no result is kept, and of an exception only its type."""

from typing import Any

import pytest

from celery_idempotent import Policy, PolicyError, ReplayedFailure, current_attempt
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.steps import Finished, from_plain
from tests.support.deliveries import Shop

RESULT = "a secret"


def _shop(body: Any = lambda order_id, cents: RESULT, **policy: Any) -> Shop:
    shop = Shop(Policy("order_id", private=True, **policy), result_serializer="json")
    shop.does = body
    return shop


@pytest.mark.parametrize("value", [RESULT, object()])
def test_first_caller_gets_the_value_and_a_replay_none(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is a choice and no loss, also of what cannot be encoded: nobody is told of an error."""
    shop = _shop(lambda order_id, cents: value)
    first, second = (shop.deliver("o") for _ in range(2))
    if value == RESULT:
        assert first.value == RESULT
    record = shop.record
    assert (second.value, record.status, record.result, record.error) == (None, Status.COMPLETED, "null", None)
    assert "result_dropped" not in caplog.text


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_none_is_kept_in_every_serialiser(serializer: str) -> None:
    """A reader of the record finds a result like any other."""
    accepted = frozenset({"application/json", "application/x-python-serialize", "application/x-yaml"})
    codec = Codec(serializer, accepted, private=True)
    kept = codec.keep_outcome(RESULT)
    assert (kept.value, kept.lost) == (RESULT, None)
    assert kept.encoded is not None
    assert codec.decode(kept.encoded) is None


def test_steps_keep_theirs() -> None:
    """The next attempt needs them."""

    def body(order_id: str, cents: int) -> str:
        value = current_attempt().step("charge", lambda step: RESULT)
        if current_attempt().number == 1:
            raise RuntimeError
        return value

    shop = _shop(body)
    assert shop.deliver("o").state == "FAILURE"
    assert isinstance(from_plain(shop.record.steps["charge"]), Finished)
    assert shop.deliver("o").value == RESULT


def test_failure_that_is_an_outcome_is_kept_without_its_text() -> None:
    """It is told by its type, which is no result."""

    def body(order_id: str, cents: int) -> None:
        raise LookupError("declined")

    shop = _shop(body, remember=(LookupError,))
    assert [type(shop.deliver("o").value) for _ in range(2)] == [LookupError, ReplayedFailure]
    assert "declined" not in repr(shop.record)


def test_what_goes_on_from_a_replay_goes_on_with_none() -> None:
    """A link of a duplicate, and a publisher of what is done."""
    shop = _shop(publish="once")
    for _ in range(2):
        shop.deliver("o", request={"callbacks": [shop.app.signature("next")]})
    assert [message.payload[0] for message in shop.published()] == [[RESULT], [None]]
    result: Any = shop.charge.delay("o")
    assert (result.state, result.get(), shop.published()) == ("SUCCESS", None, [])


def test_to_keep_is_yes_or_no() -> None:
    """A number of seconds or a text is a misunderstanding."""
    with pytest.raises(PolicyError, match="private='no'"):
        Policy(private="no")  # type: ignore[arg-type]
