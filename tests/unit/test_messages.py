"""Messages for SQS: native delays, FIFO groups and deduplication ids, without asking SQS for anything."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, KeyMissing, Policy
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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options with which messages reach Celery's ``send_task``."""
    found: list[dict[str, Any]] = []

    def send_task(self: Celery, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        found.append({"name": name, "args": args, "kwargs": kwargs, **options})

    monkeypatch.setattr(Celery, "send_task", send_task)
    return found


@pytest.fixture
def app() -> Celery:
    app = Celery("fifo", set_as_current=False, broker="sqs://a:b@127.0.0.1:1//", backend="cache+memory://")
    app.conf.update(
        broker_transport_options={"region": "us-east-1"},
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_routes={"fifo.*": {"queue": "orders.fifo"}},
    )
    return app


@pytest.fixture
def charge(app: Celery) -> Any:
    @app.task(base=IdempotentTask, shared=False, name="fifo.charge", idempotent=Policy(key="order_id"))
    def charge(order_id: int | None, cents: int = 1) -> None: ...

    return charge


@pytest.fixture
def delivered(charge: Any) -> Iterator[Any]:
    """The task while it executes a delivery from the FIFO queue."""
    charge.push_request(
        id="a",
        args=[7],
        kwargs={},
        retries=2,
        called_directly=False,
        delivery_info={"exchange": "", "routing_key": "orders.fifo"},
        properties={"MessageGroupId": "customer-1", "delivery_info": {"sqs_queue": "http://sqs/1/orders.fifo"}},
    )
    yield charge
    charge.pop_request()


def _id(options: dict[str, Any]) -> str:
    return str(options["MessageDeduplicationId"])


def test_same_effect_has_the_same_deduplication_id(charge: Any, sent: list[dict[str, Any]]) -> None:
    """A double publish is dropped by SQS itself, however the call was written; another order is not."""
    charge.delay(7)
    charge.apply_async(kwargs={"order_id": 7, "cents": 5})
    charge.delay(8)
    charge.apply_async((8,), idempotency_key="order-7")

    ids = [_id(each) for each in sent]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert all(len(each) <= 128 for each in ids)


def test_something_waiting_for_the_message_keeps_it_from_being_dropped(charge: Any, sent: list[dict[str, Any]]) -> None:
    """A message with a callback or in a chord is told apart by its task id: dropping it would lose what waits."""
    charge.apply_async((7,), task_id="a")
    charge.apply_async((7,), task_id="b", link=charge.si(1))
    charge.apply_async((7,), task_id="c", link=charge.si(1))
    charge.apply_async((7,), task_id="d", group_id="g")
    charge.apply_async((7,), task_id="e", chain=[charge.si(1)])
    for task_id in "fg":  # as the last of a chain, whose result was handed out
        last = charge.s(7)
        last.freeze(task_id)
        last.apply_async()

    assert len({_id(each) for each in sent}) == 7


def test_own_deduplication_id_is_left_alone(charge: Any, sent: list[dict[str, Any]]) -> None:
    """Who gives an id of his own knows why."""
    charge.apply_async((7,), MessageDeduplicationId="mine", MessageGroupId="g")

    assert _id(sent[0]) == "mine"
    assert sent[0]["MessageGroupId"] == "g"


def test_standard_queue_gets_no_deduplication_id(charge: Any, sent: list[dict[str, Any]]) -> None:
    """Only FIFO queues take one."""
    charge.apply_async((7,), queue="standard")
    charge.apply_async((7,), queue="other.fifo")

    assert "MessageDeduplicationId" not in sent[0]
    assert "MessageDeduplicationId" in sent[1]


def test_missing_key_is_found_when_publishing_to_fifo(charge: Any, sent: list[dict[str, Any]]) -> None:
    """The key is needed for the id, so its absence is an error at the publisher."""
    with pytest.raises(KeyMissing):
        charge.delay(None)
    assert sent == []


def test_conflict_on_fifo_keeps_its_group_and_changes_its_id(delivered: Any, sent: list[dict[str, Any]]) -> None:
    """SQS would drop an unchanged id within five minutes, and the task with it."""
    from celery.exceptions import Retry

    for _ in range(2):
        with pytest.raises(Retry):
            _postpone(delivered, CONFLICTS_HEADER, KeyMissing("t", "x"), 1_500)
        delivered.request.headers = {CONFLICTS_HEADER: 1}

    first, second = sent
    assert first["MessageGroupId"] == second["MessageGroupId"] == "customer-1"
    assert len({_id(first), _id(second)}) == 2
    assert first["retries"] == second["retries"] == 2
    assert "DelaySeconds" not in first
    assert first["countdown"] > 0


def test_duplicates_that_are_postponed_at_once_have_ids_of_their_own(charge: Any, sent: list[dict[str, Any]]) -> None:
    """Each delivery has ended as a retry, so SQS must drop neither."""
    from celery.exceptions import Retry

    for task_id in "ab":
        charge.push_request(id=task_id, args=(7,), kwargs={}, delivery_info={"sqs_queue": "http://sqs/1/orders.fifo"})
        with pytest.raises(Retry):
            _postpone(charge, CONFLICTS_HEADER, KeyMissing("t", "x"), 1_500)
        charge.pop_request()

    assert len({_id(each) for each in sent}) == 2


def test_retry_on_fifo_keeps_its_group_and_changes_its_id(delivered: Any, sent: list[dict[str, Any]]) -> None:
    """So does a retry of the author's own, from which Celery drops both."""
    from celery.exceptions import Retry

    delivered.delay(7)
    with pytest.raises(Retry):
        delivered.retry(countdown=0)

    assert sent[1]["MessageGroupId"] == "customer-1"
    assert sent[1]["retries"] == 3
    assert _id(sent[0]) != _id(sent[1])


def test_conflict_on_a_standard_queue_is_delayed_by_sqs(
    charge: Any, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQS holds the message back in whole seconds, rounded up, so no worker keeps it in memory."""
    from celery.exceptions import Retry

    charge.push_request(
        id="a", args=[7], kwargs={}, called_directly=False, delivery_info={"exchange": "", "routing_key": "standard"}
    )
    with pytest.raises(Retry):
        _postpone(charge, CONFLICTS_HEADER, KeyMissing("t", "x"), 1_500)
    charge.pop_request()

    assert sent[0]["DelaySeconds"] == 2
    assert "countdown" not in sent[0]
    assert sent[0]["queue"].name == "standard"


def test_carried_identity_is_of_one_task_and_one_task_id() -> None:
    """People forward all headers to other tasks, and a forged one reaches no other operation."""
    identity = Identity(f"shop.charge:1:{'a' * 64}", "b" * 64)
    headers = {IDENTITY_HEADER: identity_header(identity, "shop.charge:1", "id")}

    assert identity_in(headers, "shop.charge:1", "id") == identity
    assert identity_in(headers, "shop.charge:1", "another id") is None
    assert identity_in(headers, "shop.refund:1", "id") is None


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
    assert count_in({CONFLICTS_HEADER: found}, CONFLICTS_HEADER) == count
    assert type(count_in({CONFLICTS_HEADER: found}, CONFLICTS_HEADER)) is int


def test_count_that_is_missing_is_none() -> None:
    """As in the first message."""
    assert count_in({}, CONFLICTS_HEADER) == 0
