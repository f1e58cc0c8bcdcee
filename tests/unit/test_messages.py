"""What a message carries: SQS's delays, groups and deduplication ids, and headers that anybody may have written."""

import gc
import tracemalloc
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Retry

from celery_idempotent import KeyMissing, Policy
from celery_idempotent.integration.headers import (
    CONFLICTS_HEADER,
    IDENTITY_HEADER,
    OUTAGES_HEADER,
    TICK_HEADER,
    bound_header,
    count_in,
    headers_of,
    identity_header,
    identity_in,
    tick_in,
)
from celery_idempotent.integration.messages.postpone import _postpone
from celery_idempotent.protocol.keys import Identity
from tests.support.deliveries import Shop

SQS = {"broker_url": "sqs://a:b@127.0.0.1:1//", "broker_transport_options": {"region": "us-east-1"}}


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
    """SQS itself drops a double publish, however the call was written; a call without a key fails at its publisher."""
    charge.delay(7)
    charge.apply_async(kwargs={"order_id": 7, "cents": 5})
    charge.delay(8)
    charge.apply_async((8,), idempotency_key="order-7")
    charge.apply_async((7,), queue="other.fifo")
    charge.apply_async((7,), queue="standard")
    charge.apply_async((7,), MessageDeduplicationId="mine")
    with pytest.raises(KeyMissing):
        charge.delay(None)
    first, again, other, explicit, *rest = _ids(sent)
    assert (first, rest) == (again, [first, None, "mine"])
    assert len({first, other, explicit}) == 3
    assert len(first) <= 128


def test_message_that_something_waits_for_or_that_comes_again_is_not_dropped(charge: Any, sent: Any) -> None:
    """It would be lost, with its callback, its chord, its tick or its turn; most are published without a task id."""
    link, headers = charge.si(8), ({CONFLICTS_HEADER: 1}, {CONFLICTS_HEADER: 2}, {OUTAGES_HEADER: 1})
    options = [{}, *[{"link": link}, {"link_error": link}, {"group_id": "g"}, {"chain": [link]}] * 2]
    for each in (*options, *({"headers": header} for header in headers)):
        charge.apply_async((7,), **each)
    for task_id in "fg":  # as the last of a chain, whose result was handed out
        last = charge.s(7)
        last.freeze(task_id)
        last.apply_async()
    charge.idempotent = Policy()
    for _ in range(2):
        charge.apply_async((7,), headers={"celery_beat_task": True})
    assert len({*_ids(sent)}) == len(sent) == 16


def test_a_router_is_asked_with_the_arguments(sent: list[dict[str, Any]]) -> None:
    """As Celery asks it: one that chooses queue and message group by them is how a whole app gets its groups."""

    def by_customer(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **rest: Any) -> dict[str, Any]:
        assert task.name == name
        return {"queue": "orders.fifo", "MessageGroupId": f"{args[0]}-{kwargs['cents']}"}

    shop = Shop(Policy("order_id"), task_default_queue="standard", task_routes=[by_customer], **SQS)
    shop.charge.apply_async((7,), {"cents": 7})
    assert _ids(sent) != [None]


def _postponed(charge: Any, conflicts: int = 0, task_id: str = "a", **request: Any) -> None:
    charge.push_request(id=task_id, args=[7], kwargs={}, retries=2, called_directly=False, **request)
    charge.request.headers = {CONFLICTS_HEADER: conflicts} if conflicts else None
    with pytest.raises(Retry):
        _postpone(charge, CONFLICTS_HEADER, KeyMissing("t", "x"), 1_500)
    charge.pop_request()


def test_message_that_is_published_again_keeps_its_group_and_changes_its_id(charge: Any, sent: Any) -> None:
    """SQS would drop an unchanged id within five minutes, and the task with it; from a retry Celery drops both."""
    group = {"MessageGroupId": "customer-1", "delivery_info": {"sqs_queue": "http://sqs/1/orders.fifo"}}
    request: Any = {"delivery_info": {"exchange": "", "routing_key": "orders.fifo"}, "properties": group}
    _postponed(charge, **request)
    _postponed(charge, conflicts=1, **request)
    _postponed(charge, task_id="b", **request)  # another delivery of the key, which has ended as a retry
    charge.push_request(id="a", args=[7], kwargs={}, retries=2, called_directly=False, **request)
    with pytest.raises(Retry):
        charge.retry(countdown=0)
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
    assert tick_in({TICK_HEADER: header} if header is not None else {}, "report", "id") is None


@pytest.mark.parametrize(("found", "count"), [(999_999, 999_999), *((each, 0) for each in (True, -1, "3", 1_000_000))])
def test_count_of_a_stranger_is_none(found: object, count: int) -> None:
    """Anybody may write headers; a flag is no 1, though Python's is."""
    assert repr(count_in({CONFLICTS_HEADER: found}, CONFLICTS_HEADER)) == repr(count)


@pytest.mark.parametrize("names", [1, 800], ids=["one long name", "many short names"])
def test_names_of_headers_that_a_stranger_has_made_up_do_not_stay_in_memory(names: int) -> None:
    """A worker's process lives for weeks, and each of these 20 messages has 50 KB of names of its own."""
    headers_of(Context(headers={5: "a name that is no text"}, properties={}), "task")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(20):
            made_up = {f"{number} {each}".rjust(50_000 // names, "-"): 1 for each in range(names)}
            headers_of(Context(headers=made_up, properties={}), "task")
        del made_up
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000
