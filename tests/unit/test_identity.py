"""One operation, one identity: whatever Celery publishes on behalf of a delivery, and whatever the body did before."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import current_task
from celery.signals import before_task_publish, task_prerun
from celery.utils.imports import symbol_by_name
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy, current_attempt
from celery_idempotent.integration.headers import DELIVERIES_HEADER, IDENTITY_HEADER, KEY_HEADER, OUTAGES_HEADER
from celery_idempotent.protocol.record import Status
from tests.support.deliveries import Ended, Shop, redeliver, settle
from tests.support.scene import raising

ORDER = {"id": "o-1", "cents": 500}


@pytest.fixture
def shop() -> Shop:
    return Shop(accept_content=["json", "pickle"])


TRACE = {"x-trace": "new"}
SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ddtrace 4.16": lambda headers: {**TRACE},
    "sentry 2.20": lambda headers: headers.update(TRACE) or {**TRACE},
    "sentry 2.75": lambda headers: {**headers, **TRACE},
    "a dict of an earlier message": lambda headers: {
        **{name: "old" for name in headers if name.startswith("idempotency_")},
        **TRACE,
    },
    "a text": lambda headers: "text",
}
"""What each nests among the headers as ``headers``, made of what stands there."""


@pytest.fixture(params=[None, *SHAPES])
def tracer(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """No tracer, or one that writes into the headers of every message, after everybody else."""

    def write(headers: dict[str, Any], **_: Any) -> None:
        if request.param:
            headers["headers"] = SHAPES[request.param](headers)

    before_task_publish.connect(write)
    yield request.param
    before_task_publish.disconnect(write)


WAYS: dict[str, Any] = {
    "autoretry": None,
    "retry": {},
    "retry with other arguments": {"args": ({"id": "another"},)},
    "retry with headers": {"headers": {"a": "b"}},
}
"""How the first run ends: with the options of a retry, or with an error that is retried."""


@pytest.mark.parametrize(("policy", "explicit"), [(Policy(), {}), (Policy("order.id"), {"idempotency_key": "k"})])
@pytest.mark.parametrize("way", WAYS)
def test_delivery_that_comes_again_is_the_same_operation(
    tracer: str | None, way: str, policy: Policy, explicit: dict[str, Any]
) -> None:
    """A charge, written into the order, then a retry by whatever way: one charge, one record, the other steps run."""
    shop, charges = Shop(), []

    def fulfil(order: dict[str, Any]) -> str:
        shop.runs.append(order)
        order["charge"] = current_attempt().step("charge", lambda step: charges.append(step.key))
        if len(shop.runs) == 1:
            raise ConnectionError if WAYS[way] is None else shop.charge.retry(countdown=0, **WAYS[way])
        return str(current_attempt().step("ship", lambda step: "shipped"))

    shop.charge = shop.task(policy, fulfil, "t", autoretry_for=(ConnectionError,), retry_backoff=False)
    key = shop.charge.idempotency_key_for(ORDER)
    shop.charge.apply_async((dict(ORDER),), **explicit)
    (message,) = shop.published()

    assert settle(shop.app, shop.charge, redeliver(shop.app, message)) == Ended("SUCCESS", "shipped")
    assert redeliver(shop.app, message) == Ended("SUCCESS", "shipped")
    assert (len(charges), shop.record.key == key) == (1, not explicit)


def test_delivery_that_is_postponed_counts_on(shop: Shop, tracer: str | None) -> None:
    """Under its key; each message starts with its broker's own count, which a dead-letter queue goes by."""
    shop.store.faults.extend(["request lost"] * 6)
    received = {"delivery_info": {"sqs_message": {"Attributes": {"ApproximateReceiveCount": "3"}}}}
    shop.deliver("o-1", request={"headers": {KEY_HEADER: "k"}, "properties": received})
    for _ in range(2):
        (ended,) = shop.redeliver()
        assert ended.state == "RETRY"

    (message,) = shop.published()
    assert [message.headers[each] for each in (KEY_HEADER, OUTAGES_HEADER, DELIVERIES_HEADER)] == ["k", 3, 5]
    assert redeliver(shop.app, message).value == "charged 1"


def test_retry_of_a_worker_whose_process_died_is_the_same_operation(shop: Shop, tracer: str | None) -> None:
    """It publishes by the request that it had made of the message."""
    shop.charge.apply_async(("o-1",), idempotency_key="k")
    (message,) = shop.published()
    request = symbol_by_name(shop.charge.Request)(message, app=shop.app, task=shop.charge, hostname="celery@here")
    shop.charge.signature_from_request(request._context, retries=1).apply_async()
    assert [redeliver(shop.app, message), *shop.redeliver()] == [Ended("SUCCESS", "charged 1")] * 2
    assert shop.runs == ["o-1"]


def test_headers_are_seen_beside_those_of_a_tracer(shop: Shop, tracer: str | None) -> None:
    """One call under two keys is two operations, as are two ticks; what its author wrote is there, too."""
    shop.does = lambda *_: f"{shop.charge.request.id} {shop.charge.request.headers.get('tenant')}"
    for key in ("a", "b", "a"):
        shop.charge.apply_async(("o-1",), idempotency_key=key, headers={"tenant": "t-1"})
    for _ in range(2):
        shop.charge.apply_async(("o-1",), headers={"celery_beat_task": True})
    shop.charge.map(["o-1"]).apply_async(headers={KEY_HEADER: "k"})

    *ends, of_a_list = shop.redeliver()
    a, b, again, *ticks = [each.value for each in ends]
    assert (a, len({a, b, *ticks}), a.endswith(" t-1")) == (again, 4, True)
    assert of_a_list.value.option == "idempotency_key", "a request of Celery's own, in which the key is hidden"


def test_headers_that_their_author_nests_are_read_by_the_publisher_too(shop: Shop) -> None:
    """And published beside the others: a tracer that writes keys into a nested dict would write into the author's."""
    own = {"headers": {"tenant": "t-1"}}
    shop.charge.apply_async(("o-1",), idempotency_key="a", headers=own)
    shop.charge.apply_async(("o-1",), headers={"headers": {KEY_HEADER: "a"}})
    first, second = shop.published()

    assert own == {"headers": {"tenant": "t-1"}}
    assert "headers" not in first.headers
    assert (first.headers["tenant"], second.headers[KEY_HEADER]) == ("t-1", "a")
    assert redeliver(shop.app, first) == redeliver(shop.app, second)
    assert shop.runs == ["o-1"]


@pytest.mark.parametrize("when", ["conflict", "retry"])
def test_message_published_again_keeps_all_that_it_came_with(shop: Shop, when: str) -> None:
    """Serialiser, compression, priority, queue, headers: a set in its arguments arrives as a set."""
    order = {1: {"a", "b"}}

    def fulfil(*_: Any) -> str:
        if when == "retry" and shop.charge.request.retries == 0:
            raise shop.charge.retry(countdown=0)
        return "done"

    shop.does = fulfil
    sent = {"serializer": "pickle", "compression": "gzip", "priority": 3, "headers": {"tenant": "t-1"}}
    shop.charge.apply_async((order,), **sent)
    (first,) = shop.published()
    if when == "conflict":
        shop.store.before_swap = lambda new: shop.memory.swap(replace(new, owner="other", revision="other"), None)  # type: ignore[assignment]

    assert redeliver(shop.app, first).state == "RETRY"
    (again,) = shop.published()
    for each in (first, again):
        assert (each.content_type, each.properties["priority"]) == ("application/x-python-serialize", 3)
        assert (each.headers["compression"], each.headers["tenant"]) == (first.headers["compression"], "t-1")
    if when == "conflict":
        shop.memory.delete(shop.record.key, shop.record.revision)
        shop.store.before_swap = lambda new: None
    assert redeliver(shop.app, again) == Ended("SUCCESS", "done")
    assert shop.runs[-1] == order


def test_function_as_the_key_sees_the_request_that_it_is_for(shop: Shop) -> None:
    """A key of the tenant, which a header names, and the order: one order of two tenants is two operations."""
    policy = Policy(lambda order_id, cents: (current_task.request.headers["tenant"], order_id))
    shop.charge = shop.task(policy, name="t")
    shop.does = lambda *_: shop.charge.request.headers["tenant"]
    ended = [shop.deliver("o-1", request={"headers": {"tenant": tenant}}) for tenant in ("a", "b", "a")]
    assert ([each.value for each in ended], len([*shop.memory.scan()])) == (["a", "b", "a"], 2)


def test_lost_lease_is_postponed_with_the_arguments_as_they_came(shop: Shop) -> None:
    """The body has changed them, and what is postponed is the message."""
    shop.does = lambda order, cents: (order.update(charge={1, 2}), shop.change(owner="other"))
    assert shop.deliver(dict(ORDER)).state == "RETRY"
    (message,) = shop.published()
    assert (message.payload[0], bool(message.headers[IDENTITY_HEADER])) == ([ORDER], True)


def test_before_start_and_receivers_of_signals_change_no_identity(shop: Shop) -> None:
    """The identity is resolved before anything of the author's has the arguments; what replaces them is the body's."""

    class Tracing(IdempotentTask):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            args[0]["trace"] = task_id
            kwargs["cents"] = "replaced"

    def receive(args: Any, task_id: str, **_: Any) -> None:
        args[0]["received"] = task_id

    shop.charge, seen = shop.task(name="t", base=Tracing), []
    shop.does = lambda order_id, cents: seen.append((set(order_id), cents))
    task_prerun.connect(receive, sender=shop.charge)
    for _ in range(2):
        shop.deliver(dict(ORDER))
    task_prerun.disconnect(receive, sender=shop.charge)

    assert seen == [({"id", "cents", "received", "trace"}, "replaced")]
    assert shop.record.key == shop.charge.idempotency_key_for(ORDER)


def test_unprotected_body_has_the_identity_of_its_call(shop: Shop) -> None:
    """In an outage as in the protected run after it, whatever the body has done to its arguments before it asks."""
    keys: list[str] = []
    shop.does = lambda order, cents: (order.update(charge="c-1"), keys.append(current_attempt().effect_key("charge")))  # type: ignore[func-returns-value]
    shop.charge = shop.task(Policy(on_outage="run"), name="t")
    shop.store.faults.extend(["request lost"] * 2)
    for _ in range(2):
        shop.deliver(dict(ORDER))
    shop.charge(dict(ORDER))

    assert (len(keys), len(set(keys)), shop.record.key) == (3, 1, shop.charge.idempotency_key_for(ORDER))


@pytest.mark.parametrize("how", ["a key of its own", "replaced"])
def test_retry_with_a_key_of_its_own_and_replaced_task_are_other_operations(shop: Shop, how: str) -> None:
    """Who gives a key means that key; a task that replaces another has its task id, and an identity of its own."""

    def fulfil(order_id: str, cents: int) -> str:
        if shop.charge.request.headers.get(KEY_HEADER) or order_id == "another":
            return "done"
        if how == "replaced":
            raise shop.charge.replace(shop.charge.s("another"))
        raise shop.charge.retry(idempotency_key="another", countdown=0)

    shop.does = fulfil
    shop.deliver("o-1")
    assert [each.value for each in shop.redeliver()] == ["done"]
    statuses = {record.key: record.status for record in shop.memory.scan()}
    assert statuses.pop(shop.charge.idempotency_key_for("o-1")) is Status.RELEASED
    assert [*statuses.values()] == [Status.COMPLETED]
    assert (shop.charge.idempotency_key_for("another") in statuses) is (how == "replaced")


def test_forwarded_headers_give_no_identity_away(shop: Shop) -> None:
    """People forward all headers to what they publish, for tracing; each of those messages is its own operation."""
    follow_up = shop.task(body=lambda n: n, name="receipt")

    def fulfil(order_id: str, cents: int) -> None:
        headers = shop.charge.request.headers
        assert set(headers) <= {IDENTITY_HEADER}, "nothing of ours is taken for a header"
        if order_id == "o-1":
            for n in (1, 2):
                follow_up.apply_async((n,), headers=headers)
                shop.charge.apply_async((f"other-{n}",), headers=headers)
        if order_id == "o-1" and shop.charge.request.retries == 0:
            raise shop.charge.retry(countdown=0)

    shop.does = fulfil
    shop.deliver("o-1")
    *forwarded, retried = shop.published()
    ours = [[name for name in each.headers if name.startswith("idempotency_")] for each in (*forwarded, retried)]
    assert ours == [[]] * 4 + [[IDENTITY_HEADER]]
    for message in (retried, *forwarded, *shop.published()):
        redeliver(shop.app, message)
    calls = [*((shop.charge, each) for each in ("o-1", "other-1", "other-2")), (follow_up, 1), (follow_up, 2)]
    assert {each.key for each in shop.memory.scan()} == {task.idempotency_key_for(given) for task, given in calls}


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (Policy(), "SUCCESS"),
        (Policy(mode="observe"), "SUCCESS"),
        (Policy(remember=(LookupError,), on_takeover="refuse"), "FAILURE"),
    ],
)
def test_retry_that_is_not_thrown_releases_and_runs_again(policy: Policy, first: str) -> None:
    """``retry(throw=False)`` is the author's word as any retry; what the body returns or raises is no outcome."""
    shop = Shop(policy)

    def fulfil(*_: Any) -> str:
        if shop.charge.request.retries == 0:
            shop.charge.retry(throw=False, countdown=0)
            if first == "FAILURE":
                raise LookupError
        return f"run {len(shop.runs)}"

    shop.does = fulfil
    assert (shop.deliver("o-1").state, shop.record.status) == (first, Status.RELEASED)
    assert (shop.redeliver(), shop.record.status) == ([Ended("SUCCESS", "run 2")], Status.COMPLETED)


@pytest.mark.parametrize(("failure", "pauses"), [(ValueError("too large"), 1), (OperationalError("away"), 0)])
def test_message_that_cannot_be_published_again_goes_back_without_a_hot_loop(
    shop: Shop, failure: Exception, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker delivers it at once, so what lies in the message waits a moment first."""
    slept: list[float] = []
    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.time.sleep", slept.append)
    monkeypatch.setattr(shop.app, "send_task", raising(failure))
    shop.store.faults.extend(["request lost"] * 2)

    ended = shop.deliver("o-1")
    assert (ended.state, ended.value.requeue) == ("REJECTED", True)
    assert [0 < each <= 1 for each in slept] == [True] * pauses
