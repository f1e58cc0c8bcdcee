"""What a delivery becomes that cannot run now: postponed, raised, skipped, or handed back to the broker."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, Task, states
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from celery_idempotent import (
    IdempotentMixin,
    IdempotentTask,
    InFlight,
    LeaseLost,
    Policy,
    StoreUnavailable,
    current_attempt,
)
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import Ended, an_app, deliver, published


@pytest.fixture
def app() -> Celery:
    return an_app()


def _meeting(
    app: Celery,
    policy: Policy,
    task_id: str = "other",
    holder: str = "holder",
    base: type[Task] = IdempotentTask,
    **request: Any,
) -> tuple[Ended, Ended, int]:
    """How a delivery and one that it meets end, and how often the body ran."""
    runs = []

    @app.task(base=base, shared=False, bind=True, name="t.meet", idempotent=policy)
    def meet(self: Any, n: int) -> Ended:
        runs.append(n)
        if len(runs) > 1:
            raise AssertionError("ran twice")
        # In a thread of its own: within this body's context it would be a recursion, not a delivery.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(deliver, self, n, task_id=task_id, request=request).result()

    app.conf.result_serializer = "pickle"
    app.conf.accept_content = ["json", "pickle"]
    outer = deliver(meet, 1, task_id=holder)
    return outer, outer.value, len(runs)


def test_conflict_is_published_again_without_using_up_retries(app: Celery) -> None:
    """The same message comes back later: same id, same retries, same headers, one conflict more."""
    _, met, runs = _meeting(
        app, Policy(), retries=2, headers={"mine": "x", "idempotency_conflicts": 3}, expires=None, chord=None
    )

    assert met.state == states.RETRY
    assert isinstance(met.value, Retry)
    assert isinstance(met.value.exc, InFlight)
    (message,) = published(app)
    assert message.headers["id"] == "other"
    assert message.headers["retries"] == 2
    assert message.headers["mine"] == "x"
    assert message.headers["idempotency_conflicts"] == 4
    assert message.headers["eta"]
    assert message.payload[0] == [1]
    assert runs == 1


def test_rabbitmqs_death_headers_stay_behind(app: Celery) -> None:
    """RabbitMQ takes a message that carries them for one that goes round in circles, and drops it."""
    _meeting(app, Policy(), headers={"x-death": [{"count": 1}], "mine": "x"})

    (message,) = published(app)
    assert message.headers["mine"] == "x"
    assert "x-death" not in message.headers


def test_delay_is_bounded_by_lease_backoff_and_broker(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder has just begun: the shortest delay, within the lease, the backoff and half the visibility."""
    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.random.random", lambda: 1.0)
    for policy, visibility, expected in (
        (Policy(lease=60, backoff=5), None, 5.0),
        (Policy(lease=20, backoff=25), None, 45.0),
        (Policy(lease=3600, backoff=2000), None, 900.0),
        (Policy(lease=20, backoff=50), 30, 15.0),
    ):
        app = an_app()
        app.conf.idempotency_grace = 0
        app.conf.broker_transport_options = {"visibility_timeout": visibility} if visibility else {}
        _, met, _ = _meeting(app, policy)
        assert met.value.when == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(
    ("broker", "held", "expected"),
    [
        ("redis://127.0.0.1:1", True, 50.0),
        ("redis://127.0.0.1:1", "all", 50.0),
        ("sentinel://127.0.0.1:1", True, 50.0),
        ("redis://127.0.0.1:1", False, 15.0),
        ("sqs://a:b@127.0.0.1:1//", True, 15.0),
    ],
)
def test_a_worker_that_holds_messages_of_redis_keeps_them_for_longer_than_the_visibility_timeout(
    monkeypatch: pytest.MonkeyPatch, broker: str, held: Any, expected: float
) -> None:
    """Nobody else gets them meanwhile; on SQS a message group would wait with them."""
    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.random.random", lambda: 1.0)
    monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda *args, **options: None)
    app = an_app(idempotency_hold_messages=held)
    app.conf.broker_url = broker
    app.conf.broker_transport_options = {"visibility_timeout": 30, "region": "us-east-1"}
    _, met, _ = _meeting(app, Policy(lease=20, backoff=50))
    assert met.value.when == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("on_conflict", ["raise", "skip", "retry"])
def test_policy_decides_about_another_call(app: Celery, on_conflict: Any) -> None:
    """Another call of a running operation is postponed, raised or skipped, as its author chose."""
    _, met, runs = _meeting(app, Policy(on_conflict=on_conflict))

    assert met.state == {"raise": states.FAILURE, "skip": states.IGNORED, "retry": states.RETRY}[on_conflict]
    assert len(published(app)) == (on_conflict == "retry")
    assert runs == 1


@pytest.mark.parametrize("on_conflict", ["raise", "skip"])
def test_redelivery_of_the_running_message_is_never_dropped(app: Celery, on_conflict: Any) -> None:
    """The redelivery is what recovers the task if its worker dies, so it always comes back."""
    _, met, _ = _meeting(app, Policy(on_conflict=on_conflict), task_id="holder")

    assert met.state == states.RETRY
    assert len(published(app)) == 1


def test_redelivery_is_known_by_an_id_of_any_length(app: Celery) -> None:
    """The record has a bounded one; a redelivery that was taken for a duplicate would be dropped."""
    long = "i" * 300
    _, met, _ = _meeting(app, Policy(on_conflict="skip"), task_id=long, holder=long)

    assert met.state == states.RETRY


_NEXT = {"task": "t", "args": [], "kwargs": {}, "options": {}}


@pytest.mark.parametrize(
    "waiting", [{"group": "g"}, {"chord": _NEXT}, {"chain": [_NEXT]}, {"callbacks": [_NEXT]}, {"errbacks": [_NEXT]}]
)
@pytest.mark.parametrize("on_conflict", ["raise", "skip"])
def test_what_something_waits_for_is_never_dropped(app: Celery, on_conflict: Any, waiting: dict[str, Any]) -> None:
    """What follows a delivery that is dropped never runs; one that fails tells its error callbacks."""
    _, met, _ = _meeting(app, Policy(on_conflict=on_conflict), **waiting)
    assert met.state == (states.FAILURE if on_conflict == "raise" and "errbacks" in waiting else states.RETRY)


class _Unique(Task):  # as celery-singleton's and celery-once's: it publishes no duplicate
    def apply_async(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("it is taken for a duplicate, and dropped")


class _Guarded(IdempotentMixin, _Unique): ...


def test_a_base_class_that_drops_duplicates_drops_no_message_that_is_published_again(app: Celery) -> None:
    """To such a base the message looks like a second call; its first one is this very message."""
    _, met, _ = _meeting(app, Policy(), base=_Guarded)
    assert met.state == states.RETRY
    assert len(published(app)) == 1


@pytest.fixture
def broken_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("broker is down")

    monkeypatch.setattr("kombu.messaging.Producer.publish", refuse)
    return


@pytest.mark.usefixtures("broken_broker")
def test_message_goes_back_to_the_broker_if_it_cannot_be_published(app: Celery) -> None:
    """With late acknowledgement the message itself is still there and is requeued, not lost."""
    _, met, _ = _meeting(app, Policy())

    assert met.state == states.REJECTED
    assert isinstance(met.value, Reject)
    assert met.value.requeue


@pytest.mark.usefixtures("broken_broker")
@pytest.mark.filterwarnings("ignore::celery_idempotent.IdempotencyWarning")
def test_failed_publish_is_visible_if_the_message_is_already_acknowledged() -> None:
    """With early acknowledgement nothing is left to requeue: the task fails with the broker's error."""
    app = an_app()
    app.conf.task_acks_late = False

    _, met, _ = _meeting(app, Policy())

    assert met.state == states.FAILURE
    assert isinstance(met.value, OperationalError)


def test_outage_is_published_again_and_counted_apart(app: Celery) -> None:
    """A delivery that met no store comes back; conflicts and retries are not used up."""
    app.conf.idempotency_store = FaultyStore(MemoryStore(), "request lost", "request lost")
    runs = []

    @app.task(base=IdempotentTask, shared=False, name="t.outage", idempotent=Policy())
    def charge(n: int) -> None:
        runs.append(n)

    ended = deliver(charge, 1, request={"retries": 1, "headers": {"idempotency_outages": 40}})

    assert ended.state == states.RETRY
    assert isinstance(ended.value.exc, StoreUnavailable)
    (message,) = published(app)
    assert message.headers["idempotency_outages"] == 41
    assert message.headers["retries"] == 1
    assert "idempotency_conflicts" not in message.headers
    assert runs == []


def test_lost_lease_is_put_off_and_then_meets_the_outcome(app: Celery) -> None:
    """A zombie's delivery reports nothing; when it comes back it gets its successor's result."""
    from dataclasses import replace

    from celery_idempotent.protocol import operation
    from celery_idempotent.protocol.codec import Encoded
    from celery_idempotent.protocol.record import Status

    store: MemoryStore = app.conf.idempotency_store

    @app.task(base=IdempotentTask, shared=False, bind=True, name="t.zombie")
    def zombie(self: Any, n: int) -> str:
        seen = store.get(current_attempt().key)
        assert isinstance(seen, Record)
        store.swap(replace(seen, owner="successor", revision="theirs"), seen.revision)
        return "mine"

    ended = deliver(zombie, 1)
    assert ended.state == states.RETRY
    assert isinstance(ended.value.exc, LeaseLost)

    theirs = store.get(zombie.idempotency_key_for(1))
    assert theirs is not None
    store.swap(
        operation.ended(theirs, Status.COMPLETED, store.now(), 60_000, "r", Encoded('"theirs"', "application/json")),
        theirs.revision,
    )
    assert deliver(zombie, 1).value == "theirs"
