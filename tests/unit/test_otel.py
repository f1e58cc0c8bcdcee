"""OpenTelemetry: what is counted, timed and noted, and that nothing is where nobody asks."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from celery_idempotent import IdempotentTask, Policy, StoreUnavailable
from celery_idempotent.contrib import otel
from celery_idempotent.engine import events as engine_events
from celery_idempotent.engine import heartbeat as heartbeats
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.events import Event, EventName, Timed, timed
from celery_idempotent.integration import events
from celery_idempotent.integration.broker import holding
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages.outbox import MOST, Backlog, backlog
from celery_idempotent.protocol.record import marked
from celery_idempotent.protocol.store import WaitingMessage
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import an_app, deliver, published, redeliver
from tests.unit.test_events import spoilt

Points = dict[tuple[tuple[str, Any], ...], Any]


class Meters:
    """An SDK with a reader in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def read(self) -> dict[str, Any]:
        """Every metric that has a value, by name."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> Points:
        """The points of a metric, by their attributes."""
        metric = self.read().get(f"celery_idempotent.{name}")
        found = metric.data.data_points if metric else ()
        return {tuple(sorted(point.attributes.items())): point for point in found}

    def value(self, name: str) -> float | None:
        """That of a gauge, which has no attributes."""
        point = self.points(name).get(())
        return None if point is None else point.value

    def events(self) -> dict[tuple[str, str | None], int]:
        """How often what happened to whose operations."""
        told = ((dict(attributes), point.value) for attributes, point in self.points("events").items())
        return {(about["event"], about.get("task")): count for about, count in told}


def receiving() -> int:
    """How many signals this module receives."""
    receivers = (receiver for signal in SIGNALS.values() for _, receiver in signal.receivers)
    return sum(getattr(each, "__func__", None) is otel._Instruments.receive for each in receivers)


@pytest.fixture
def meters() -> Iterator[Meters]:
    meters = Meters()
    otel.instrument(meters.provider)
    yield meters
    otel.uninstrument()


@pytest.fixture
def app() -> Celery:
    app = an_app()
    app.conf.idempotency_store = FaultyStore(app.conf.idempotency_store)
    return app


def charging(app: Celery, **policy: Any) -> Task:
    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy("order_id", **policy))
    def charge(order_id: str) -> str:
        return order_id

    return charge


def test_events_are_counted_by_event_and_task_and_by_nothing_that_grows(app: Celery, meters: Meters) -> None:
    """Neither a key nor a task id: a metric with those is as large as the table of records."""
    charge = charging(app)
    for order_id in ("o-1", "o-1", "o-2"):
        deliver(charge, order_id)

    assert meters.events() == {("claimed", "charge"): 2, ("completed", "charge"): 2, ("replayed", "charge"): 1}
    (about,) = {point[1:-1] for point in meters.points("events")}
    assert about == (
        ("messaging.destination.name", app.conf.task_default_queue),
        ("messaging.operation.type", "process"),
        ("messaging.system", "memory"),
    )


def test_events_name_the_broker_the_queue_or_exchange_and_what_was_done(app: Celery, meters: Meters) -> None:
    """By the conventions' names; a call that no message asked for has none."""
    charge = charging(app)
    app.conf.broker_url = "sqs://"
    charge.apply(("o-1",))
    request: dict[str, Any] = {"delivery_info": {"exchange": "orders", "routing_key": "eu.o-1"}}
    charge.push_request(**request)
    events.report(charge, "id", Event(EventName.REPLAYED, "k", None, ""), observed=False)
    charge.pop_request()
    events.report(charge, "id", Event(EventName.PUBLISH_SKIPPED, "k", None, ""), observed=False)

    told = {tuple(sorted(dict(point).items())) for point in meters.points("events")}
    assert {tuple(value for name, value in each if name.startswith("messaging")) for each in told} == {
        (),
        ("orders", "process", "aws_sqs"),
        ("send", "aws_sqs"),
    }


def test_event_that_is_no_tasks_is_counted_without_one(meters: Meters) -> None:
    """As where a scan passes a record over."""
    assert list(readable(["k"], spoilt, str)) == []

    assert meters.events() == {("record_unreadable", None): 1}


def test_claims_are_timed_also_where_the_store_fails(app: Celery, meters: Meters) -> None:
    """By task, and by the type of the error; replays are claims, too."""
    charge = charging(app)
    deliver(charge, "o")
    deliver(charge, "o")
    app.conf.idempotency_store.faults.extend(["request lost"] * 2)
    deliver(charge, "o")

    points = meters.points("claim.duration")
    assert {attributes: point.count for attributes, point in points.items()} == {
        (("task", "charge"),): 2,
        (("error.type", "StoreUnavailable"), ("task", "charge")): 1,
    }
    assert all(point.sum > 0 for point in points.values())


class Renewing:
    """As much of a claim as a renewal looks at."""

    key, task = "k", "charge"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def renew(self) -> None:
        if self.error:
            raise self.error


def test_renewals_are_timed(meters: Meters) -> None:
    """Those that fail by themselves."""
    claims: list[Any] = [Renewing(), Renewing(StoreUnavailable("s", "swap", "away"))]
    assert [heartbeats._is_renewed(claim) for claim in claims] == [True, False]

    assert {attributes: point.count for attributes, point in meters.points("renewal.duration").items()} == {
        (("task", "charge"),): 1,
        (("error.type", "StoreUnavailable"), ("task", "charge")): 1,
    }


def test_wait_of_a_postponed_delivery_is_recorded_once(app: Celery, meters: Meters) -> None:
    """And that of no other one."""
    charge = charging(app)
    app.conf.idempotency_store.faults.extend(["request lost"] * 2)
    deliver(charge, "o")
    (message,) = published(app)
    assert meters.points("wait.duration") == {}
    redeliver(app, message)
    deliver(charge, "o")

    assert {attributes: point.count for attributes, point in meters.points("wait.duration").items()} == {
        (("task", "charge"),): 1
    }


def test_units_are_those_of_the_conventions(app: Celery, meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, and names of things in braces; the page has the same table."""
    monkeypatch.setattr(holding, "_holdings", [SimpleNamespace(messages=range(2))])
    backlog.look(lambda limit: [WaitingMessage("a", 0, 0, 0, None)], lambda: 5_000)
    charge = charging(app)
    app.conf.idempotency_store.faults.extend(["request lost"] * 2)
    deliver(charge, "o")
    redeliver(app, published(app)[0])
    heartbeats._is_renewed(Renewing())  # type: ignore[arg-type]
    found = {name.removeprefix("celery_idempotent."): metric.unit for name, metric in meters.read().items()}
    backlog.forget()

    assert found == {
        "events": "{event}",
        "claim.duration": "s",
        "renewal.duration": "s",
        "wait.duration": "s",
        "in_flight": "{attempt}",
        "outcomes.waiting": "{outcome}",
        "messages.held": "{message}",
        "outbox.messages": "{message}",
        "outbox.age": "s",
    }


def test_attempts_under_way_are_counted(app: Celery, meters: Meters) -> None:
    """While the body runs, and no longer."""
    seen: list[Any] = []

    @app.task(base=IdempotentTask, shared=False, name="look", idempotent=Policy())
    def look() -> None:
        seen.append(meters.value("in_flight"))

    before = meters.value("in_flight")
    deliver(look)

    assert seen == [(before or 0) + 1]
    assert meters.value("in_flight") == before


def test_outcome_that_waits_for_the_store_is_counted(
    app: Celery, meters: Meters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an event of the task, and for as long as it waits; no claim is made meanwhile that would tell."""
    store = app.conf.idempotency_store = FaultyStore(MemoryStore())
    seen: list[Any] = []
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(meters.value("outcomes.waiting")))

    @app.task(base=IdempotentTask, shared=False, name="look", idempotent=Policy())
    def look() -> None:
        store.faults.extend(["request lost"] * 4)

    assert deliver(look).state == "SUCCESS"
    assert seen == [1, 1]
    assert meters.value("outcomes.waiting") == 0
    assert meters.events()["store_unavailable", "look"] == 1


def test_outcome_that_waits_no_longer_is_not_counted_whatever_became_of_it(
    app: Celery, meters: Meters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is kept, as by a tracker of errors, and its traceback keeps the claim."""
    store = app.conf.idempotency_store = FaultyStore(MemoryStore())
    monkeypatch.setattr("celery_idempotent.engine.claim._CONFIRM_FOR", 0.3)

    @app.task(base=IdempotentTask, shared=False, name="look", idempotent=Policy(lease=0.5))
    def look() -> None:
        store.faults.extend(["request lost"] * 1000)

    ended = deliver(look)

    assert ended.value.exc.__traceback__
    assert meters.value("outcomes.waiting") == 0


def test_process_that_holds_and_relays_nothing_has_no_such_gauge(meters: Meters) -> None:
    """A zero of each pool process would be told beside the truth of the main process."""
    assert meters.value("messages.held") is None
    assert meters.value("outbox.messages") is None
    assert meters.value("outbox.age") is None


def test_messages_that_are_held_are_counted(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all workers of the process."""
    monkeypatch.setattr(holding, "_holdings", [SimpleNamespace(messages=range(2)), SimpleNamespace(messages=range(3))])

    assert meters.value("messages.held") == 5


def _waiting(*created_at: int) -> Callable[[int], list[WaitingMessage]]:
    return lambda limit: [WaitingMessage("id", each, 0, 0, None) for each in created_at[:limit]]


def test_backlog_is_not_counted_while_nobody_measures() -> None:
    """A relay that nobody watches sends one query, not two."""

    def refuse(limit: int) -> list[WaitingMessage]:
        raise AssertionError("counted")

    unwatched = Backlog()
    unwatched.look(refuse, lambda: 0)

    assert (unwatched.messages, unwatched.age) == (None, None)


def test_backlog_grows_older_between_two_counts() -> None:
    """An outage of the database does not hide that messages wait."""
    now = [100.0]
    watched = Backlog(lambda: now[0])
    watched.is_watched = True
    watched.look(_waiting(1_000, 9_000), lambda: 11_000)
    now[0] += 9
    watched.look(_waiting(), lambda: 20_000)
    assert (watched.messages, watched.age) == (2, 19.0)

    now[0] += 1
    watched.look(_waiting(), lambda: 21_000)
    assert (watched.messages, watched.age) == (0, 0.0)

    watched.forget()
    assert (watched.messages, watched.age) == (None, None)


def test_backlog_is_counted_to_a_bound_and_is_never_younger_than_now() -> None:
    """A million messages are not fetched to be counted; a clock that was corrected makes no negative age."""
    watched = Backlog(lambda: 0.0)
    watched.is_watched = True
    watched.look(_waiting(*range(5_000, 5_000 + 2 * MOST)), lambda: 0)

    assert (watched.messages, watched.age) == (MOST, 0.0)


def test_without_a_listener_no_clock_is_read(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for costs nothing."""

    def refuse() -> float:
        raise AssertionError("a clock was read")

    monkeypatch.setattr("celery_idempotent.engine.events.perf_counter", refuse)
    assert deliver(charging(app), "o").value == "o"
    assert receiving() == 0


def test_listener_that_fails_ends_no_claim() -> None:
    """Nor does it take the place of the store's error."""

    def fail(*told: Any) -> None:
        raise LookupError("of the exporter")

    engine_events.listen(fail)
    try:
        assert timed(Timed.CLAIM, "t", lambda: "claimed") == "claimed"
        with pytest.raises(ZeroDivisionError):
            timed(Timed.CLAIM, "t", lambda: 1 / 0)
    finally:
        engine_events.listen(None)


def test_instrumenting_twice_counts_once(app: Celery, meters: Meters, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever calls it first, or last, or without a provider."""
    otel.instrument(meters.provider)
    otel.instrument()
    assert receiving() == len(SIGNALS)
    deliver(charging(app), "o")

    assert meters.events() == {("claimed", "charge"): 1, ("completed", "charge"): 1}
    assert [each.message for each in caplog.records if each.name.startswith("opentelemetry")] == []


def test_another_provider_takes_the_place_of_the_first(app: Celery, meters: Meters) -> None:
    """As in a pool process, which has a provider of its own beside what it inherited."""
    mine = Meters()
    otel.instrument(mine.provider)
    deliver(charging(app), "o")

    assert mine.events() == {("claimed", "charge"): 1, ("completed", "charge"): 1}
    assert meters.events() == {}
    assert (meters.value("in_flight"), mine.value("in_flight")) == (None, 0)


def test_uninstrumenting_leaves_nothing_and_can_be_undone(
    app: Celery, meters: Meters, caplog: pytest.LogCaptureFixture
) -> None:
    """No receiver, no listener; and the same provider may be used again."""
    for _ in range(2):
        otel.uninstrument()
    charge = charging(app)
    deliver(charge, "o")
    assert receiving() == 0
    assert engine_events._listener is None
    assert not backlog.is_watched
    assert (meters.events(), meters.value("in_flight")) == ({}, None)

    otel.instrument(meters.provider)
    deliver(charge, "o")
    assert meters.events() == {("replayed", "charge"): 1}
    assert [each.message for each in caplog.records if each.name.startswith("opentelemetry")] == []


def test_replay_links_to_the_trace_that_did_the_work(app: Celery, meters: Meters) -> None:
    """The record carries the context of the first delivery's span, and the duplicate's span a link to it."""
    charge = charging(app)
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("the first") as first:
        deliver(charge, "o", task_id="first")
    with tracer.start_as_current_span("the duplicate") as duplicate:
        deliver(charge, "o", task_id="second")

    assert isinstance(first, ReadableSpan)
    assert isinstance(duplicate, ReadableSpan)
    assert list(first.links) == []
    (link,) = duplicate.links
    context = first.get_span_context()
    assert (link.context.trace_id, link.context.span_id) == (context.trace_id, context.span_id)
    assert dict(link.attributes or {}) == {"celery_idempotent.event": "replayed"}


@pytest.mark.parametrize("trace", ["", "of another kind", "00-0-0-0"])
def test_a_trace_that_is_none_is_no_link(app: Celery, meters: Meters, trace: str) -> None:
    """Whatever stands in a record, the delivery is answered."""
    charge = charging(app)
    deliver(charge, "o")
    store = app.conf.idempotency_store
    recorded = store.get(charge.idempotency_key_for("o"))
    store.swap(recorded.but(trace=marked(trace, recorded.owner), revision="r"), recorded.revision)
    with TracerProvider().get_tracer("test").start_as_current_span("the duplicate") as duplicate:
        assert deliver(charge, "o").state == "SUCCESS"

    assert isinstance(duplicate, ReadableSpan)
    assert list(duplicate.links) == []


def test_without_a_span_there_is_nothing_to_note(app: Celery, meters: Meters) -> None:
    """Nor is one made: that is for the instrumentation of Celery."""
    assert not trace.get_current_span().is_recording()
    deliver(charging(app), "o")

    assert meters.events()[("claimed", "charge")] == 1


def test_claim_knows_its_task(app: Celery) -> None:
    """By which its renewals are told apart."""
    seen: list[str] = []
    start = heartbeats.heartbeat.start

    def note(claim: Claim) -> None:
        seen.append(claim.task)
        start(claim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeats.heartbeat, "start", note)
        deliver(charging(app), "o")

    assert seen == ["charge"]
