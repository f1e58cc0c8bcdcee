"""Which messages are extended, when, and for how long; and what a broker's refusal means."""

import pytest

from celery_idempotent.integration.broker.extenders import code_of, is_gone
from celery_idempotent.integration.broker.holding import HeldMessage, due, pause, pause_after


def held(age: float, *, number: int = 0) -> HeldMessage:
    """A message at time 1000 that was extended so many seconds ago."""
    return HeldMessage(f"tag-{number}", "queue", 1000 - age, 1000 - age, lambda: None)


class AwsRefusal(Exception):
    """As botocore's."""

    def __init__(self, response: object) -> None:
        super().__init__(response)
        self.response = response


@pytest.mark.parametrize(("age", "is_due"), [(0, False), (19.9, False), (20, True), (59, True), (600, True)])
def test_a_message_is_due_after_a_third_of_its_timeout(age: float, is_due: bool) -> None:
    """So two tries remain if one fails, and short bodies cost nothing."""
    assert bool(due([held(age)], 60, 1000, 10)) is is_due


def test_room_in_a_request_is_filled_with_what_is_soon_due() -> None:
    """From half a third on; a request with ten messages costs as much as one with one."""
    one, soon, early = held(21, number=1), held(10, number=2), held(9.9, number=3)
    assert due([early, soon, one], 60, 1000, 10) == [one, soon]
    assert due([early, soon], 60, 1000, 10) == []


def test_messages_that_are_only_soon_due_cause_no_request_of_their_own() -> None:
    """Eleven are due: that is two requests of ten, and the rest of the second one is for the oldest others."""
    now_due = [held(30, number=number) for number in range(11)]
    soon = [held(10 + number / 100, number=20 + number) for number in range(15)]
    chosen = due([*soon, *now_due], 60, 1000, 10)
    assert len(chosen) == 20
    assert set(chosen[:11]) == set(now_due)
    assert list(chosen[11:]) == list(reversed(soon))[:9]


@pytest.mark.parametrize(
    ("visibilities", "seconds"), [((), 1.0), ((1800.0,), 1.0), ((6.0,), 0.5), ((1800.0, 6.0, 3.0), 0.25)]
)
def test_the_shortest_timeout_says_how_often_to_look(visibilities: tuple[float, ...], seconds: float) -> None:
    """A look asks nobody."""
    assert pause(visibilities) == seconds


def test_a_broker_that_fails_is_asked_again_before_the_timeout_is_over() -> None:
    """Ever more seldom, but never more seldom than a sixth of it."""
    assert [pause_after(failures, 60) for failures in (1, 2, 3, 4, 5, 6, 1000)] == [1, 2, 4, 8, 10, 10, 10]
    assert pause_after(1, 3) == 0.5


@pytest.mark.parametrize(
    ("code", "gone"),
    [
        ("ReceiptHandleIsInvalid", True),
        ("MessageNotInflight", True),
        ("AWS.SimpleQueueService.MessageNotInflight", True),
        ("com.amazonaws.sqs#ReceiptHandleIsInvalid", True),
        ("InvalidParameterValue", True),
        ("InternalError", False),
        ("RequestThrottled", False),
        ("ServiceUnavailable", False),
        ("", False),
    ],
)
def test_a_refusal_is_read_by_its_code(code: str, gone: bool) -> None:
    """Of one message; what is unknown is asked again."""
    assert is_gone(code_of(AwsRefusal({"Error": {"Code": code}}))) is gone


@pytest.mark.parametrize(
    "error",
    [OSError("reset"), AwsRefusal(None), AwsRefusal({}), AwsRefusal({"Error": "none"}), AwsRefusal({"Error": {}})],
)
def test_what_is_no_refusal_of_aws_has_no_code(error: Exception) -> None:
    """A connection that broke says nothing about a receipt."""
    assert code_of(error) == ""
