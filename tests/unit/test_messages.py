"""What a message carries, what anybody may have written into it, and what a delivery becomes that cannot run now."""
# mypy: allow-untyped-decorators

import gc
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, states
from celery.app.task import Context
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentMixin, InFlight, KeyMissing, Policy, StoreUnavailable
from celery_idempotent.integration import headers as module
from celery_idempotent.integration.headers import CONFLICTS_HEADER, IDENTITY_HEADER, identity_header, identity_in
from celery_idempotent.integration.messages.postpone import _postpone
from celery_idempotent.integration.task import requests
from celery_idempotent.protocol.keys import Identity
from tests.support.deliveries import Ended, Shop, deliver
from tests.support.scene import raising

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
    link, headers = charge.si(8), ({CONFLICTS_HEADER: 1}, {CONFLICTS_HEADER: 2}, {module.OUTAGES_HEADER: 1})
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


@pytest.mark.parametrize("header", [None, "", ":", "report@1", module.bound_header("", "report", "id")])
def test_header_that_names_no_tick_is_none(header: str | None) -> None:
    """Nothing, or something of somebody else's."""
    assert module.tick_in({module.TICK_HEADER: header} if header is not None else {}, "report", "id") is None


@pytest.mark.parametrize(("found", "count"), [(999_999, 999_999), *((each, 0) for each in (True, -1, "3", 1_000_000))])
def test_count_of_a_stranger_is_none(found: object, count: int) -> None:
    """Anybody may write headers; a flag is no 1, though Python's is."""
    assert repr(module.count_in({CONFLICTS_HEADER: found}, CONFLICTS_HEADER)) == repr(count)


@pytest.mark.parametrize("names", [1, 800], ids=["one long name", "many short names"])
def test_names_of_headers_that_a_stranger_has_made_up_do_not_stay_in_memory(names: int) -> None:
    """A worker's process lives for weeks, and each of these 20 messages has 50 KB of names of its own."""
    module.headers_of(Context(headers={5: "a name that is no text"}, properties={}), "task")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(20):
            made_up = {f"{number} {each}".rjust(50_000 // names, "-"): 1 for each in range(names)}
            module.headers_of(Context(headers=made_up, properties={}), "task")
        del made_up
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


DRAW = "celery_idempotent.integration.messages.postpone.random.random"


def _meeting(shop: Shop, task_id: str = "other", holder: str = "holder", **request: Any) -> Ended:
    """How a delivery ends that meets another of the shop's task, whose body runs once."""
    met: list[Ended] = []

    def meet(order_id: Any, cents: Any) -> None:
        # In a thread of its own: within this body's context it would be a recursion, not a delivery.
        with ThreadPoolExecutor(1) as pool:
            met.append(pool.submit(deliver, shop.charge, 1, task_id=task_id, request=request).result())

    shop.does = meet
    assert deliver(shop.charge, 1, task_id=holder).state == states.SUCCESS
    assert shop.runs == [1]
    return met[0]


def test_conflict_is_published_again_without_using_up_retries() -> None:
    """The same message, one conflict more. RabbitMQ would drop one with its death headers, as if in circles."""
    shop = Shop()
    headers = {"mine": "x", "idempotency_conflicts": 3, "x-death": [{"count": 1}]}
    met = _meeting(shop, retries=2, headers=headers, expires=None, chord=None)
    assert (met.state, type(met.value), type(met.value.exc)) == (states.RETRY, Retry, InFlight)
    (message,) = shop.published()
    found = {name: message.headers.get(name) for name in ("id", "retries", "mine", "idempotency_conflicts", "x-death")}
    assert found == {"id": "other", "retries": 2, "mine": "x", "idempotency_conflicts": 4, "x-death": None}
    assert message.headers["eta"]
    assert message.payload[0] == [1]


@pytest.mark.parametrize(
    ("policy", "broker", "visibility", "held", "expected"),
    [
        (Policy(lease=60, backoff=5), "memory://", None, True, 5),
        (Policy(lease=20, backoff=25), "memory://", None, True, 45),
        (Policy(lease=3600, backoff=2000), "memory://", None, True, 900),
        (Policy(lease=20, backoff=50), "memory://", 30, True, 15),
        (Policy(lease=20, backoff=50), "redis://127.0.0.1:1", 30, True, 50),
        (Policy(lease=20, backoff=50), "redis://127.0.0.1:1", 30, False, 15),
        (Policy(lease=20, backoff=50), "sqs://a:b@127.0.0.1:1//", 30, True, 15),
    ],
)
def test_delay_is_bounded_by_lease_backoff_and_broker(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, broker: str, visibility: Any, held: Any, expected: int
) -> None:
    """By half the visibility, but where messages of Redis are held; on SQS a message group would wait with them."""
    monkeypatch.setattr(DRAW, lambda: 1.0)
    monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda *args, **options: None)
    options = {"visibility_timeout": visibility, "region": "us-east-1"} if visibility else {}
    shop = Shop(policy, idempotency_hold_messages=held, broker_transport_options=options, broker_url=broker)
    shop.app.conf.idempotency_grace = 0
    assert _meeting(shop).value.when == pytest.approx(expected, abs=0.5)


class Crowd:
    """A worker that receives messages of a shop, by a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.shop, self.now = Shop(), 1_000.0
        patch.setattr("celery_idempotent.clock.monotonic", lambda: self.now)
        patch.setattr(requests, "time", SimpleNamespace(time=lambda: self.now))
        patch.setattr(requests, "_turns", {})

    def receive(self, *args: Any, hostname: str = "w", key: Any = "", **options: Any) -> Any:
        self.shop.charge.apply_async(args or (1,), **options)
        (message,) = self.shop.published()
        message.headers |= {"idempotency_key": key} if key else {}  # whoever publishes may write there what is no text
        return requests.IdempotentRequest(message, app=self.shop.app, task=self.shop.charge, hostname=hostname)

    def meet(self, times: int, error: Exception) -> None:
        """So many deliveries that are postponed by that error."""
        for _ in range(times):
            self.receive().on_retry(SimpleNamespace(exception=Retry(exc=error), traceback=""))


def test_a_crowd_waits_in_its_worker_and_comes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is one; nobody else waits for it, and what is to come later all the same does."""
    crowd = Crowd(monkeypatch)
    crowd.meet(33, InFlight("k", 1, "w"))
    assert crowd.receive().eta is None
    crowd.meet(10, InFlight("k", 1, "w"))  # of which one makes it a crowd, and nine come to it
    turns = [crowd.receive().eta.timestamp() for _ in range(200)]
    assert turns == pytest.approx([1_001.29 + 0.03 * number for number in range(200)], abs=0.001)
    others: list[Any] = [
        crowd.receive(2),
        crowd.receive(hostname="v"),
        crowd.receive(key="k"),
        crowd.receive(key=["k"]),
    ]
    assert [each.eta for each in others] == [None] * 4
    assert crowd.receive(countdown=60).eta.timestamp() > time.time()
    crowd.now += 10
    assert crowd.receive().eta is None


def test_retries_of_a_body_are_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; and no message waits until its broker would deliver it again, or in the way of others."""
    crowd = Crowd(monkeypatch)
    crowd.meet(100, ValueError())
    assert crowd.receive().eta is None
    monkeypatch.setattr(requests, "bounds", lambda task: {"bounds": (500,)})
    crowd.meet(40, InFlight("k", 1, "w"))
    assert crowd.receive().eta.timestamp() == crowd.now + 0.5
    crowd.shop.app.conf.worker_eta_task_limit = 100  # those that wait would keep others out
    assert crowd.receive().eta is None
    crowd.shop.app.conf.worker_eta_task_limit = None
    assert crowd.receive().eta
    monkeypatch.setattr(requests, "has_quorum_queues", lambda app: True)
    assert crowd.receive().eta is None


@pytest.mark.parametrize("is_conflict", [True, False])
def test_the_traceback_of_a_conflict_has_no_frames_that_celery_would_copy(is_conflict: bool) -> None:
    """It tells nobody anything, and goes from process to process; that of a body's retry is whole."""
    told, shop = [], Shop()
    shop.does = lambda order_id, cents: shop.charge.retry()
    shop.charge.on_retry = lambda *about: told.append(about[-1].traceback)
    _ = _meeting(shop) if is_conflict else shop.deliver(1)
    assert [("in __call__" in each, "in _guarded" in each) for each in told] == [(True, not is_conflict)]


_NEXT = {"task": "t", "args": [], "kwargs": {}, "options": {}}
AWAITED = {"group": "g"}, {"chord": _NEXT}, {"chain": [_NEXT]}, {"callbacks": [_NEXT]}
TOLD = {"errbacks": [_NEXT]}


@pytest.mark.parametrize(
    ("on_conflict", "about", "state"),
    [
        ("raise", {}, states.FAILURE),
        ("skip", {}, states.IGNORED),
        ("retry", {}, states.RETRY),
        ("raise", TOLD, states.FAILURE),
        ("skip", TOLD, states.RETRY),
        *((each, waiting, states.RETRY) for each in ("raise", "skip") for waiting in AWAITED),
        *((each, {"task_id": "holder"}, states.RETRY) for each in ("raise", "skip")),
        ("skip", {"task_id": "i" * 300, "holder": "i" * 300}, states.RETRY),
        ("raise", {"task_id": "list", "holder": "list[]"}, states.RETRY),
    ],
)
def test_policy_decides_about_another_call(on_conflict: Any, about: Any, state: str) -> None:
    """Never dropped: what something waits for, and a redelivery of what runs, as an item of a list or by a long id."""
    shop = Shop(Policy(on_conflict=on_conflict))
    assert _meeting(shop, **about).state == state
    again = [each.headers["id"] for each in shop.published() if each.headers["task"] == "charge"]
    assert again == ([about.get("task_id", "other")] if state == states.RETRY else [])


def test_a_base_class_that_drops_duplicates_drops_no_message_that_is_published_again() -> None:
    """To such a base the message looks like a second call; its first one is this very message."""

    class Unique(Task):  # as celery-singleton's and celery-once's: it publishes no duplicate
        def apply_async(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("it is taken for a duplicate, and dropped")

    shop = Shop()
    shop.charge = shop.task(base=type("Guarded", (IdempotentMixin, Unique), {}), name="guarded")
    assert _meeting(shop).state == states.RETRY
    assert len(shop.published()) == 1


@pytest.mark.filterwarnings("ignore::celery_idempotent.IdempotencyWarning")
@pytest.mark.parametrize(
    ("acks_late", "state", "error"), [(True, states.REJECTED, Reject), (False, states.FAILURE, OperationalError)]
)
def test_message_that_cannot_be_published_goes_back_to_the_broker(
    monkeypatch: pytest.MonkeyPatch, acks_late: bool, state: str, error: type[Exception]
) -> None:
    """If it was acknowledged early nothing is left to requeue: the task fails with the broker's error."""
    monkeypatch.setattr("kombu.messaging.Producer.publish", raising(OperationalError("broker is down")))
    met = _meeting(Shop(task_acks_late=acks_late))
    assert (met.state, type(met.value), getattr(met.value, "requeue", None)) == (state, error, acks_late or None)


def test_outage_is_published_again_and_counted_apart() -> None:
    """A delivery that met no store comes back; conflicts and retries are not used up."""
    shop = Shop()
    shop.store.faults.extend(["request lost"] * 2)
    ended = shop.deliver(1, request={"retries": 1, "headers": {"idempotency_outages": 40}})
    assert (ended.state, type(ended.value.exc), shop.runs) == (states.RETRY, StoreUnavailable, [])
    (message,) = shop.published()
    found = {name: message.headers.get(name) for name in ("idempotency_outages", "retries", "idempotency_conflicts")}
    assert found == {"idempotency_outages": 41, "retries": 1, "idempotency_conflicts": None}
