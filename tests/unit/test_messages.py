"""What a message carries: SQS's delays, groups and deduplication ids, and headers that anybody may have written."""

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from celery_idempotent import KeyMissing, Policy
from celery_idempotent.integration.headers import (
    CONFLICTS_HEADER,
    IDENTITY_HEADER,
    TICK_HEADER,
    bound_header,
    count_in,
    identity_header,
    identity_in,
    tick_in,
)
from celery_idempotent.integration.messages.postpone import _postpone
from celery_idempotent.protocol.keys import Identity
from tests.support.deliveries import Shop

SQS = {"broker_url": "sqs://a:b@127.0.0.1:1//", "broker_transport_options": {"region": "us-east-1"}}
OF_FIFO = {"exchange": "", "routing_key": "orders.fifo"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options with which messages reach Celery's ``send_task``."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(Celery, "send_task", lambda app, name, *_, **options: found.append({"name": name, **options}))
    return found


@pytest.fixture
def charge() -> Any:
    return Shop(Policy("order_id"), task_routes={"charge": {"queue": "orders.fifo"}}, **SQS).charge


def _ids(sent: list[dict[str, Any]]) -> list[Any]:
    return [each.get("MessageDeduplicationId") for each in sent]


def test_same_effect_has_the_same_deduplication_id_in_a_fifo_queue(charge: Any, sent: list[dict[str, Any]]) -> None:
    """A double publish is dropped by SQS itself, however the call was written; another order is not."""
    charge.delay(7)
    charge.apply_async(kwargs={"order_id": 7, "cents": 5})
    charge.delay(8)
    charge.apply_async((8,), idempotency_key="order-7")
    charge.apply_async((7,), queue="other.fifo")
    charge.apply_async((7,), queue="standard")
    charge.apply_async((7,), MessageDeduplicationId="mine")

    first, again, other, explicit, *rest = _ids(sent)
    assert (first, rest) == (again, [first, None, "mine"])
    assert len({first, other, explicit}) == 3
    assert len(first) <= 128


def test_something_waiting_for_the_message_keeps_it_from_being_dropped(charge: Any, sent: list[dict[str, Any]]) -> None:
    """A message with a callback or in a chord is told apart by its task id: dropping it would lose what waits."""
    for number, options in enumerate(({}, *[{"link": charge.si(1)}] * 2, {"group_id": "g"}, {"chain": [charge.si(1)]})):
        charge.apply_async((7,), task_id=str(number), **options)
    for task_id in "fg":  # as the last of a chain, whose result was handed out
        last = charge.s(7)
        last.freeze(task_id)
        last.apply_async()
    assert len({*_ids(sent)}) == 7


def test_missing_key_is_found_when_publishing_to_fifo(charge: Any, sent: list[dict[str, Any]]) -> None:
    """The key is needed for the id, so its absence is an error at the publisher."""
    with pytest.raises(KeyMissing):
        charge.delay(None)
    assert sent == []


def _postponed(charge: Any, conflicts: int = 0, task_id: str = "a", **request: Any) -> None:
    charge.push_request(id=task_id, args=[7], kwargs={}, retries=2, called_directly=False, **request)
    charge.request.headers = {CONFLICTS_HEADER: conflicts} if conflicts else None
    with pytest.raises(Retry):
        _postpone(charge, CONFLICTS_HEADER, KeyMissing("t", "x"), 1_500)
    charge.pop_request()


def test_message_that_is_published_again_keeps_its_group_and_changes_its_id(
    charge: Any, sent: list[dict[str, Any]]
) -> None:
    """SQS would drop an unchanged id within five minutes, and the task with it; from a retry Celery drops both."""
    group = {"MessageGroupId": "customer-1", "delivery_info": {"sqs_queue": "http://sqs/1/orders.fifo"}}
    request: Any = {"delivery_info": OF_FIFO, "properties": group}
    _postponed(charge, **request)
    _postponed(charge, conflicts=1, **request)
    _postponed(charge, task_id="b", **request)  # another delivery of the key, which has ended as a retry, too
    charge.push_request(id="a", args=[7], kwargs={}, retries=2, called_directly=False, **request)
    with pytest.raises(Retry):
        charge.retry(countdown=0)
    charge.pop_request()

    assert [(each["MessageGroupId"], each["retries"]) for each in sent] == [("customer-1", 2)] * 3 + [("customer-1", 3)]
    assert len({*_ids(sent)}) == 4
    assert all("DelaySeconds" not in each and each["countdown"] > 0 for each in sent[:3])


def test_conflict_on_a_standard_queue_is_delayed_by_sqs(charge: Any, sent: list[dict[str, Any]]) -> None:
    """SQS holds the message back in whole seconds, rounded up, so no worker keeps it in memory."""
    _postponed(charge, delivery_info={"exchange": "", "routing_key": "standard"})
    (message,) = sent
    assert (message["DelaySeconds"], message["queue"].name, "countdown" in message) == (2, "standard", False)


def test_carried_identity_is_of_one_task_and_one_task_id() -> None:
    """People forward all headers to other tasks, and a forged one reaches no other operation."""
    identity = Identity(f"shop.charge:1:{'a' * 64}", "b" * 64)
    headers = {IDENTITY_HEADER: identity_header(identity, "shop.charge:1", "id")}

    assert identity_in(headers, "shop.charge:1", "id") == identity
    assert identity_in(headers, "shop.charge:1", "another id") is None
    assert identity_in(headers, "shop.refund:1", "id") is None
    for forged in ("x", f"{'0' * 32}:{'1' * 64}:", 7, None):
        assert identity_in({IDENTITY_HEADER: forged}, "shop.charge:1", "id") is None


@pytest.mark.parametrize("header", [None, "", ":", "report@1", bound_header("", "report", "id")])
def test_header_that_names_no_tick_is_none(header: str | None) -> None:
    """Nothing, or something of somebody else's."""
    assert tick_in({TICK_HEADER: header}, "report", "id") is None
    assert tick_in({}, "report", "id") is None


@pytest.mark.parametrize(
    ("found", "count"),
    [(0, 0), (3, 3), (999_999, 999_999), *((each, 0) for each in (None, True, -1, 1.0, "3", 1_000_000))],
)
def test_count_of_a_stranger_is_none(found: object, count: int) -> None:
    """Anybody may write headers; a flag is no 1, though Python's is."""
    told = count_in({CONFLICTS_HEADER: found}, CONFLICTS_HEADER)
    assert (told, type(told), count_in({}, CONFLICTS_HEADER)) == (count, int, 0)
