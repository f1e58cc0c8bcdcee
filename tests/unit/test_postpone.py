"""What a delivery becomes that cannot run now: postponed, raised, skipped, or handed back to the broker."""
# mypy: allow-untyped-decorators

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Task, states
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentMixin, InFlight, Policy, StoreUnavailable
from tests.support.deliveries import Ended, Shop, deliver
from tests.support.scene import raising

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
