"""One operation, one identity: whatever Celery publishes on behalf of a delivery, and whatever the body did before."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, current_task
from celery.exceptions import Retry
from celery.signals import before_task_publish, task_prerun
from celery.utils.imports import symbol_by_name
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy, StoreUnavailable, current_attempt
from celery_idempotent.integration.headers import DELIVERIES_HEADER, IDENTITY_HEADER, KEY_HEADER, OUTAGES_HEADER
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import Ended, an_app, deliver, published, redeliver, settle

ORDER = {"id": "o-1", "cents": 500}


@pytest.fixture
def app() -> Celery:
    return an_app(accept_content=["json", "pickle"])


@pytest.fixture
def store(app: Celery) -> MemoryStore:
    store: MemoryStore = app.conf.idempotency_store
    return store


def _task(app: Celery, body: Callable[..., Any], **options: Any) -> Task:
    policy = options.pop("policy", Policy())
    body.__name__ = "body"  # Celery takes no lambda
    name = f"task-{uuid4()}"
    return app.task(bind=True, base=IdempotentTask, name=name, idempotent=policy, shared=False, **options)(body)


class Receiver:
    """A payment API that honours idempotency keys."""

    def __init__(self) -> None:
        self.charges: dict[str, str] = {}

    def charge(self, step: Any) -> str:
        return self.charges.setdefault(step.key, f"charge {len(self.charges) + 1}")


def test_request_without_a_task_id_is_a_delivery(app: Celery) -> None:
    """Tests of tasks push such a request, to act as a worker does."""
    task = _task(app, lambda self, order: self.request.retries)
    task.push_request(args=("o-1",), kwargs={}, called_directly=False, retries=2)
    assert task("o-1") == 2
    task.pop_request()
    assert deliver(task, "o-1").value == 2


def test_function_as_the_key_sees_the_request_that_it_is_for(app: Celery) -> None:
    """A key of the tenant, which a header names, and the order: one order of two tenants is two operations."""

    def key(order: str) -> tuple[str, str]:
        return current_task.request.headers["tenant"], order

    task = _task(app, lambda self, order: self.request.headers["tenant"], policy=Policy(key=key))

    ended = [deliver(task, "o-1", request={"headers": {"tenant": tenant}}) for tenant in ("a", "b", "a")]

    assert [each.value for each in ended] == ["a", "b", "a"]
    assert len({record.key for record in app.conf.idempotency_store.scan()}) == 2


@pytest.mark.parametrize("policy", [Policy(), Policy(key="order.id")])
def test_body_that_changes_its_own_argument_stays_one_operation(app: Celery, policy: Policy) -> None:
    """A charge, written into the order, then an error that is retried: one charge, and the other steps run."""
    receiver, shipped = Receiver(), []

    def fulfil(self: Any, order: dict[str, Any]) -> str:
        order["charge"] = current_attempt().step("charge", receiver.charge)
        if self.request.retries == 0:
            raise ConnectionError
        shipped.append(current_attempt().step("ship", lambda step: "shipped"))
        return str(order["charge"])

    task = _task(app, fulfil, policy=policy, autoretry_for=(ConnectionError,), retry_backoff=False)

    ended = settle(app, task, deliver(task, dict(ORDER)))

    assert (ended, shipped) == (Ended("SUCCESS", "charge 1"), ["shipped"])
    assert len(receiver.charges) == 1
    assert deliver(task, dict(ORDER)).value == "charge 1"


def test_retry_with_other_arguments_is_the_same_operation(app: Celery, store: MemoryStore) -> None:
    """A body that pages by ``self.retry(kwargs=...)`` comes to its end, and its record is the first call's."""
    pages = []

    def export(self: Any, order_id: str, page: int = 1) -> int:
        pages.append(page)
        if page < 3:
            raise self.retry(kwargs={"page": page + 1}, countdown=0)
        return page

    task = _task(app, export, policy=Policy(key="order_id"))

    assert settle(app, task, deliver(task, "o-1")) == Ended("SUCCESS", 3)
    assert pages == [1, 2, 3]
    assert [record.key for record in store.scan()] == [task.idempotency_key_for("o-1")]
    assert deliver(task, "o-1").value == 3


def test_lost_lease_is_postponed_with_the_arguments_as_they_came(app: Celery, store: MemoryStore) -> None:
    """The body has changed them, and what is postponed is the message."""

    def fulfil(self: Any, order: dict[str, Any]) -> None:
        order["charge"] = {1, 2}  # also something that the message could not carry
        (record,) = store.scan()
        assert store.swap(_taken_over(record), record.revision)

    task = _task(app, fulfil)

    ended = deliver(task, dict(ORDER))

    assert ended.state == "RETRY"
    (message,) = published(app)
    assert message.payload[0] == [ORDER]
    assert message.headers[IDENTITY_HEADER]


def _taken_over(record: Record) -> Record:
    from dataclasses import replace

    return replace(record, owner="other", revision="other")


def test_before_start_and_receivers_of_signals_change_no_identity(app: Celery, store: MemoryStore) -> None:
    """The identity is resolved before anything of the author's has the arguments in its hands."""

    class Tracing(IdempotentTask):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            args[0]["trace"] = str(uuid4())

    def receive(args: Any, **_: Any) -> None:
        args[0]["received"] = str(uuid4())

    seen = []

    def fulfil(self: Any, order: dict[str, Any]) -> int:
        seen.append(set(order))
        return 1

    task = app.task(bind=True, base=Tracing, name=f"task-{uuid4()}", shared=False)(fulfil)
    task_prerun.connect(receive, sender=task)
    try:
        for _ in range(2):
            deliver(task, dict(ORDER))
    finally:
        task_prerun.disconnect(receive, sender=task)

    assert seen == [{"id", "cents", "received", "trace"}]
    assert [record.key for record in store.scan()] == [task.idempotency_key_for(ORDER)]


def test_arguments_that_before_start_replaces_reach_the_body(app: Celery) -> None:
    """As under Celery, which unpacks them after that."""

    class Filling(IdempotentTask):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            kwargs["note"] = "filled in"

    def fulfil(order_id: str, note: str = "") -> str:
        return note

    task = app.task(base=Filling, name=f"task-{uuid4()}", shared=False)(fulfil)

    assert deliver(task, "o-1").value == "filled in"


@pytest.mark.parametrize("when", ["conflict", "retry"])
def test_message_published_again_keeps_all_that_it_came_with(app: Celery, store: MemoryStore, when: str) -> None:
    """Serialiser, compression, priority, queue, headers: a set in its arguments arrives as a set."""
    seen = []

    def fulfil(self: Any, order: dict[int, set[str]]) -> str:
        seen.append(order)
        if self.request.retries == 0 and when == "retry":
            raise self.retry(countdown=0)
        return "done"

    task = _task(app, fulfil)
    order = {1: {"a", "b"}}
    sent = {"serializer": "pickle", "compression": "gzip", "priority": 3, "headers": {"tenant": "t-1"}}
    task.apply_async((order,), **sent)
    (first,) = published(app)
    if when == "conflict":
        claim = store.swap
        in_flight: list[Record] = []

        def hold(new: Record, expected: str | None) -> Record | None:
            if in_flight:
                return claim(new, expected)
            in_flight.append(_taken_over(new))
            return claim(in_flight[0], None)

        store.swap = hold  # type: ignore[method-assign]

    assert redeliver(app, first).state == "RETRY"
    (again,) = published(app)

    assert again.content_type == first.content_type == "application/x-python-serialize"
    assert again.headers["compression"] == first.headers["compression"]
    assert again.properties["priority"] == 3
    assert again.headers["tenant"] == "t-1"
    assert list(again.payload[0]) == [order]
    if when == "conflict":
        store.delete(in_flight[0].key, in_flight[0].revision)
    assert redeliver(app, again) == Ended("SUCCESS", "done")
    assert seen[-1] == order


def test_retry_with_headers_of_its_own_keeps_the_identity(app: Celery, store: MemoryStore) -> None:
    """Celery drops all other headers then."""

    def fulfil(self: Any, order: dict[str, Any]) -> str:
        order["charge"] = "c-1"
        if self.request.retries == 0:
            raise self.retry(headers={"tenant": "t-1"}, countdown=0)
        return str(self.request.headers["tenant"])

    task = _task(app, fulfil)

    assert settle(app, task, deliver(task, dict(ORDER))) == Ended("SUCCESS", "t-1")
    assert len(list(store.scan())) == 1


def test_retry_with_a_key_of_its_own_is_another_operation(app: Celery, store: MemoryStore) -> None:
    """Who gives a key means that key."""

    def fulfil(self: Any, order_id: str) -> str:
        if self.request.retries == 0:
            raise self.retry(idempotency_key="another", countdown=0)
        return "done"

    task = _task(app, fulfil)

    assert settle(app, task, deliver(task, "o-1")).value == "done"
    assert sorted(str(record.status) for record in store.scan()) == ["COMPLETED", "RELEASED"]


def test_replaced_task_is_another_operation(app: Celery, store: MemoryStore) -> None:
    """It has the same task id, and an identity of its own."""

    def fulfil(self: Any, n: int) -> Any:
        return n if n else self.replace(self.s(1))

    task = _task(app, fulfil)
    deliver(task, 0)
    (message,) = published(app)

    assert redeliver(app, message).value == 1
    assert {record.key for record in store.scan()} == {task.idempotency_key_for(0), task.idempotency_key_for(1)}


def test_delivery_without_an_identity_can_be_published_again(app: Celery) -> None:
    """By its author, who may know what to add; it carries nothing."""

    class Again(IdempotentTask):
        def on_failure(self, *args: Any) -> None:
            self.signature_from_request(kwargs={"order_id": "o-1"}).apply_async()

    def charge(order_id: str | None = None) -> str | None:
        return order_id

    task = app.task(base=Again, name=f"task-{uuid4()}", shared=False, idempotent=Policy("order_id"))(charge)

    assert deliver(task).state == "FAILURE"
    (message,) = published(app)
    assert IDENTITY_HEADER not in message.headers
    assert redeliver(app, message).value == "o-1"


def test_forwarded_headers_give_no_identity_away(app: Celery, store: MemoryStore) -> None:
    """People forward all headers to what they publish, for tracing; each of those messages is its own operation."""

    def receipt(self: Any, n: int) -> int:
        return n

    follow_up = _task(app, receipt)

    def fulfil(self: Any, order_id: str) -> None:
        for n in (1, 2):
            follow_up.apply_async((n,), headers=self.request.headers)
            self.apply_async((f"other-{n}",), headers=self.request.headers)

    task = _task(app, fulfil)
    deliver(task, "o-1")

    for message in published(app):
        if message.headers["task"] == follow_up.name:
            assert redeliver(app, message).value == message.payload[0][0]
    keys = {record.key for record in store.scan()}
    assert keys == {task.idempotency_key_for("o-1"), *(follow_up.idempotency_key_for(n) for n in (1, 2))}


def test_nothing_of_ours_is_taken_for_a_header(app: Celery) -> None:
    """A message that came without headers is published again, and forwarded, without any but ours."""

    def fulfil(self: Any, order_id: str) -> str:
        assert set(self.request.headers) <= {IDENTITY_HEADER}
        self.apply_async(("forwarded",), headers=self.request.headers)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return order_id

    deliver(_task(app, fulfil), "o-1")

    forwarded, retried = published(app)
    redeliver(app, retried)
    assert {name for name in forwarded.headers if name.startswith("idempotency")} == set()
    assert {name for name in retried.headers if name.startswith("idempotency")} == {IDENTITY_HEADER}


TRACE = {"x-trace": "new"}
SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ddtrace 4.16": lambda headers: {**TRACE},
    "sentry 2.20": lambda headers: headers.update(TRACE) or {**TRACE},
    "sentry 2.75": lambda headers: {**headers, **TRACE},
    "a dict of an earlier message": lambda headers: {**dict.fromkeys(filter(_is_ours, headers), "old"), **TRACE},
    "a text": lambda headers: "text",
}
"""What each nests among the headers as ``headers``, made of what stands there."""


def _is_ours(name: str) -> bool:
    return name.startswith("idempotency_")


@pytest.fixture(params=SHAPES)
def traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """A tracer writes into the headers of every message, after everybody else."""

    def write(headers: dict[str, Any], **_: Any) -> None:
        headers["headers"] = SHAPES[request.param](headers)

    before_task_publish.connect(write)
    yield
    before_task_publish.disconnect(write)


@pytest.mark.usefixtures("traced")
def test_headers_are_seen_beside_those_of_a_tracer(app: Celery) -> None:
    """One call under two keys is two operations, as are two ticks; what its author wrote is there, too."""
    task = _task(app, lambda self, order_id: f"{self.request.id} {self.request.headers.get('tenant')}")
    for key in ("a", "b", "a"):
        task.apply_async(("o-1",), idempotency_key=key, headers={"tenant": "t-1"})
    for _ in range(2):
        task.apply_async(("o-1",), headers={"celery_beat_task": True})

    a, b, again, *ticks = [redeliver(app, message).value for message in published(app)]

    assert a == again
    assert len({a, b, *ticks}) == 4
    assert a.endswith(" t-1")


def test_headers_that_their_author_nests_are_read_by_the_publisher_too(app: Celery) -> None:
    """And published beside the others: a tracer that writes keys into a nested dict would write into the author's."""
    task = _task(app, lambda self, order_id: self.request.id)
    own = {"headers": {"tenant": "t-1"}}
    task.apply_async(("o-1",), idempotency_key="a", headers=own)
    task.apply_async(("o-1",), headers={"headers": {KEY_HEADER: "a"}})

    first, second = published(app)

    assert own == {"headers": {"tenant": "t-1"}}
    assert "headers" not in first.headers
    assert (first.headers["tenant"], second.headers[KEY_HEADER]) == ("t-1", "a")
    assert redeliver(app, first) == redeliver(app, second)


@pytest.mark.usefixtures("traced")
def test_retry_beside_a_tracer_is_the_same_operation(app: Celery) -> None:
    """Whatever its arguments, and whether the body publishes it or the worker of a process that died."""
    charges = []

    def fulfil(self: Any, order_id: str, tries: int = 0) -> int:
        current_attempt().step("charge", lambda step: charges.append(order_id))
        if tries < 2:
            raise self.retry(kwargs={"tries": tries + 1}, countdown=0)
        return tries

    task = _task(app, fulfil)
    task.apply_async(("o-1",), idempotency_key="k")
    (message,) = published(app)
    in_worker = symbol_by_name(task.Request)(message, app=app, task=task, hostname="celery@here")
    task.signature_from_request(in_worker._context, retries=1).apply_async()

    assert settle(app, task, Ended("RETRY", None)) == Ended("SUCCESS", 2)
    assert redeliver(app, message) == Ended("SUCCESS", 2)
    assert charges == ["o-1"]


@pytest.mark.usefixtures("traced")
def test_postponed_delivery_beside_a_tracer_counts_on(app: Celery, store: MemoryStore) -> None:
    """Under its key, and what it counts grows from one postponement to the next."""
    task = _task(app, lambda self, order_id: order_id)
    app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost", "request lost", "request lost")
    task.apply_async(("o-1",), idempotency_key="k")
    for _ in range(2):
        (message,) = published(app)
        assert redeliver(app, message).state == "RETRY"

    (message,) = published(app)
    told = [message.headers[each] for each in (KEY_HEADER, OUTAGES_HEADER, DELIVERIES_HEADER)]
    assert told == ["k", 2, 2]
    assert redeliver(app, message).value == "o-1"


@pytest.mark.usefixtures("traced")
def test_key_for_a_whole_list_is_refused_beside_a_tracer(app: Celery) -> None:
    """Celery's own tasks have requests of Celery's own, in which the key is hidden."""
    task = _task(app, lambda self, order_id: order_id)
    task.map(["o-1"]).apply_async(headers={KEY_HEADER: "k"})
    (message,) = published(app)

    assert "each item is an operation of its own" in str(redeliver(app, message).value)


@pytest.mark.parametrize("forged", ["x", "0" * 32 + ":" + "1" * 64 + ":", 7, None])
def test_forged_identity_reaches_no_record(app: Celery, store: MemoryStore, forged: Any) -> None:
    """One that is not of this task and this task id counts for nothing, and the identity is derived as ever."""
    task = _task(app, lambda self, order_id: order_id)

    deliver(task, "o-1", request={"headers": {IDENTITY_HEADER: forged}})

    assert [record.key for record in store.scan()] == [task.idempotency_key_for("o-1")]


def test_unprotected_body_has_the_identity_of_its_call(app: Celery, store: MemoryStore) -> None:
    """In an outage as in the protected run after it, whatever the body has done to its arguments before it asks."""
    faulty = app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost")
    keys = []

    def fulfil(self: Any, order: dict[str, Any]) -> None:
        order["charge"] = "c-1"
        keys.append(current_attempt().effect_key("charge"))

    task = _task(app, fulfil, policy=Policy(on_outage="run"))

    for _ in range(2):
        deliver(task, dict(ORDER))
    task(dict(ORDER))

    assert faulty.swaps
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_call_without_an_identity_is_a_function_call_all_the_same(app: Celery) -> None:
    """Only who asks for its key is told."""
    task = _task(app, lambda self, order_id=None: "called", policy=Policy(key="order_id"))
    asking = _task(app, lambda self, order_id=None: current_attempt().key, policy=Policy(key="order_id"))

    assert task() == "called"
    with pytest.raises(Exception, match="so this call has no idempotency key"):
        asking()


def test_retry_that_is_not_thrown_releases_and_runs_again(app: Celery, store: MemoryStore) -> None:
    """``retry(throw=False)`` is the author's word as any retry; what the body returns is this delivery's result."""
    runs = []

    def fulfil(self: Any, order_id: str) -> str:
        runs.append(self.request.retries)
        if self.request.retries == 0:
            assert isinstance(self.retry(throw=False, countdown=0), Retry)
        return f"run {len(runs)}"

    task = _task(app, fulfil)

    assert deliver(task, "o-1") == Ended("SUCCESS", "run 1")
    assert [record.status for record in store.scan()] == [Status.RELEASED]
    (message,) = published(app)
    assert redeliver(app, message) == Ended("SUCCESS", "run 2")
    assert [record.status for record in store.scan()] == [Status.COMPLETED]


def test_retry_that_is_not_thrown_is_observed_as_one(app: Celery, store: MemoryStore) -> None:
    """Observing changes nothing of what the delivery returns, and what it would have recorded is no outcome."""

    def fulfil(self: Any, order_id: str) -> str:
        self.retry(throw=False, countdown=0)
        return "done"

    task = _task(app, fulfil, policy=Policy(mode="observe"))

    assert deliver(task, "o-1") == Ended("SUCCESS", "done")
    assert [record.status for record in store.scan()] == [Status.RELEASED]


def test_failure_after_a_retry_that_is_not_thrown_is_no_outcome(app: Celery, store: MemoryStore) -> None:
    """The retry is on its way, and runs the body, as under Celery."""

    def fulfil(self: Any, order_id: str) -> str:
        if self.request.retries == 0:
            self.retry(throw=False, countdown=0)
            raise LookupError
        return "done"

    task = _task(app, fulfil, policy=Policy(remember=(LookupError,), on_takeover="refuse"))

    assert deliver(task, "o-1").state == "FAILURE"
    assert [record.status for record in store.scan()] == [Status.RELEASED]
    (message,) = published(app)
    assert redeliver(app, message) == Ended("SUCCESS", "done")


def test_key_given_to_send_task_counts_where_the_broker_keeps_it(app: Celery, store: MemoryStore) -> None:
    """Celery takes it for a property of the message."""
    task = _task(app, lambda self, order_id: order_id)
    app.send_task(task.name, ("o-1",), idempotency_key="payment-1")
    (message,) = published(app)

    redeliver(app, message)

    assert [record.key for record in store.scan()] != [task.idempotency_key_for("o-1")]
    deliver(task, "o-1", request={"headers": {KEY_HEADER: "payment-1"}})
    assert len(list(store.scan())) == 1


def test_deliveries_are_counted_across_messages(app: Celery, store: MemoryStore) -> None:
    """Every message that is published anew starts with its broker's own count, which a dead-letter queue goes by."""
    task = _task(app, lambda self, order_id: order_id)
    app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost", "request lost", "request lost")
    received = {"delivery_info": {"sqs_message": {"Attributes": {"ApproximateReceiveCount": "3"}}}}

    deliver(task, "o-1", request={"properties": received})
    (first,) = published(app)
    assert first.headers[DELIVERIES_HEADER] == 3

    redeliver(app, first)
    (second,) = published(app)
    assert second.headers[DELIVERIES_HEADER] == 4
    assert redeliver(app, second).value == "o-1"


@pytest.mark.parametrize(("failure", "pauses"), [(ValueError("too large"), 1), (OperationalError("away"), 0)])
def test_message_that_cannot_be_published_again_goes_back_without_a_hot_loop(
    app: Celery, store: MemoryStore, failure: Exception, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker delivers it at once, so what lies in the message waits a moment first."""
    slept: list[float] = []
    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.time.sleep", slept.append)
    task = _task(app, lambda self, order_id: order_id)
    app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost")

    def refuse(*args: Any, **options: Any) -> None:
        raise failure

    monkeypatch.setattr(app, "send_task", refuse)

    ended = deliver(task, "o-1")

    assert (ended.state, ended.value.requeue) == ("REJECTED", True)
    assert [0 < each <= 1 for each in slept] == [True] * pauses


def test_outage_of_an_argument_that_cannot_be_copied(app: Celery, store: MemoryStore) -> None:
    """What pickle does not take is published as it is; a serialiser of the user's can make such things."""

    class Local:
        def __reduce__(self) -> Any:
            raise TypeError("no copy of me")

        def __json__(self) -> str:
            return "o-1"

    task = _task(app, lambda self, order: str(order), policy=Policy(key=lambda order: "k", fingerprint=None))
    app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost")

    deliver(task, Local())

    (message,) = published(app)
    assert message.payload[0] == ["o-1"]


def test_store_that_is_away_is_told(app: Celery) -> None:
    """The exception of a postponed delivery says why."""
    task = _task(app, lambda self, order_id: order_id)
    app.conf.idempotency_store = FaultyStore(MemoryStore(), "request lost", "request lost")

    assert isinstance(deliver(task, "o-1").value.exc, StoreUnavailable)
