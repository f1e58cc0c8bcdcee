"""OpenTelemetry: what is counted, timed and noted, and that nothing is where nobody asks."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from celery_idempotent import Policy, StoreUnavailable
from celery_idempotent.contrib import otel
from celery_idempotent.engine import events as engine_events
from celery_idempotent.engine import heartbeat as heartbeats
from celery_idempotent.engine.events import Event, EventName, Timed, timed
from celery_idempotent.integration import events
from celery_idempotent.integration.broker import holding
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages.outbox import MOST, Backlog, backlog
from celery_idempotent.protocol.record import damaged
from celery_idempotent.protocol.store import WaitingMessage
from celery_idempotent.stores import readable
from tests.support.deliveries import Shop
from tests.support.scene import raising

CHARGE = (("task", "charge"),)
CHARGE_FAILED = (("error.type", "StoreUnavailable"), *CHARGE)


class Meters:
    """An SDK with a reader in memory."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])

    def read(self) -> dict[str, Any]:
        """Every metric that has a value, by name."""
        data = self.reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name.removeprefix("celery_idempotent."): metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        """The points of a metric, by their attributes."""
        metric = self.read().get(name)
        found = metric.data.data_points if metric else ()
        return {tuple(sorted(point.attributes.items())): point for point in found}

    def counts(self, name: str) -> dict[tuple[tuple[str, Any], ...], int]:
        return {attributes: point.count for attributes, point in self.points(name).items()}

    def value(self, name: str) -> float | None:
        """That of a gauge, which has no attributes."""
        point = self.points(name).get(())
        return None if point is None else point.value

    def events(self) -> dict[str, int]:
        return {dict(attributes)["event"]: point.value for attributes, point in self.points("events").items()}


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


def test_events_are_counted_by_event_task_and_queue_and_by_nothing_that_grows(shop: Shop, meters: Meters) -> None:
    """Neither a key nor a task id: a metric with those is as large as the table of records."""
    for order_id in ("o-1", "o-1", "o-2"):
        shop.deliver(order_id)
    names = ("messaging.destination.name", "messaging.operation.type", "messaging.system")
    of_message = zip(names, (shop.app.conf.task_default_queue, "process", "memory"), strict=True)
    counted = {(dict(point)["event"], point[1:]): each.value for point, each in meters.points("events").items()}
    about = (*of_message, *CHARGE)
    assert counted == {("claimed", about): 2, ("completed", about): 2, ("replayed", about): 1}


def test_events_name_the_exchange_and_what_was_done(meters: Meters) -> None:
    """By the conventions' names; a call that no message asked for has none, and an event of no task has no task."""
    shop = Shop(broker_url="sqs://")
    shop.charge.apply(("o-1",))
    shop.charge.push_request(delivery_info={"exchange": "orders", "routing_key": "eu.o-1"})
    events.report(shop.charge, "id", Event(EventName.REPLAYED, "k", None, ""), observed=False)
    shop.charge.pop_request()
    events.report(shop.charge, "id", Event(EventName.PUBLISH_SKIPPED, "k", None, ""), observed=False)
    assert list(readable(["k"], raising(damaged("k", ValueError("'DONE'"), store="memory")), str)) == []
    told = {tuple(value for name, value in each if name != "event") for each in meters.points("events")}
    assert told == {("charge",), ("orders", "process", "aws_sqs", "charge"), ("send", "aws_sqs", "charge"), ()}


def test_claims_waits_and_renewals_are_timed_also_where_the_store_fails(shop: Shop, meters: Meters) -> None:
    """By task, and by the type of the error. Replays are claims, and only a postponed delivery has waited."""
    shop.deliver("o")
    shop.deliver("o")
    shop.store.faults.extend(["request lost"] * 2)
    shop.deliver("o")
    assert meters.counts("claim.duration") == {CHARGE: 2, CHARGE_FAILED: 1}
    assert all(point.sum > 0 for point in meters.points("claim.duration").values())
    assert meters.counts("wait.duration") == {}
    shop.redeliver()
    assert meters.counts("wait.duration") == {CHARGE: 1}

    renew = Mock(side_effect=[None, StoreUnavailable("s", "swap", "away")])
    claim: Any = Mock(key="k", task="charge", renew=renew)  # as much of one as a renewal looks at
    assert [heartbeats._is_renewed(claim) for _ in range(2)] == [True, False]
    assert meters.counts("renewal.duration") == {CHARGE: 1, CHARGE_FAILED: 1}


def test_what_is_held_and_waits_is_measured(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero of a process that holds nothing would stand beside the truth of another."""
    held = [SimpleNamespace(messages=range(2)), SimpleNamespace(messages=range(3))]
    gauges = ("messages.held", "outbox.messages", "outbox.age")
    assert [meters.value(each) for each in gauges] == [None] * 3
    monkeypatch.setattr(holding, "_holdings", held)
    backlog.look(_waiting(0), lambda: 5_000)
    values = [meters.value(each) for each in gauges[:2]]
    backlog.forget()
    assert values == [5, 1]


def test_outcome_waiting_for_the_store_is_counted(shop: Shop, meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an event of the task, and for as long as it waits; no claim is made meanwhile that would tell."""
    seen: list[Any] = []
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(meters.value("outcomes.waiting")))
    shop.does = lambda order_id, cents: shop.store.faults.extend(["request lost"] * 4)
    assert shop.deliver("o").state == "SUCCESS"
    assert (seen, meters.value("outcomes.waiting"), meters.events()["store_unavailable"]) == ([1, 1], 0, 1)


def test_outcome_that_waits_no_longer_is_not_counted_whatever_became_of_it(
    meters: Meters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is kept, as by a tracker of errors, and its traceback keeps the claim."""
    monkeypatch.setattr("celery_idempotent.engine.claim._CONFIRM_FOR", 0.3)
    shop = Shop(Policy(lease=0.5))
    shop.does = lambda order_id, cents: shop.store.faults.extend(["request lost"] * 1000)
    ended = shop.deliver("o")
    assert ended.value.exc.__traceback__
    assert meters.value("outcomes.waiting") == 0


def _waiting(*created_at: int) -> Callable[[int], list[WaitingMessage]]:
    return lambda limit: [WaitingMessage("id", each, 0, 0, None) for each in created_at[:limit]]


def test_backlog_is_counted_every_ten_seconds_and_grows_older_meanwhile() -> None:
    """An outage of the database does not hide that messages wait. While nobody measures, nothing is counted."""
    now = [100.0]
    watched = Backlog(lambda: now[0])
    watched.look(_waiting(0), lambda: 0)
    assert (watched.messages, watched.age) == (None, None)
    watched.is_watched = True
    watched.look(_waiting(1_000, 9_000), lambda: 11_000)
    now[0] += 9
    watched.look(_waiting(), lambda: 20_000)
    assert (watched.messages, watched.age) == (2, 19.0)
    now[0] += 1
    watched.look(_waiting(), lambda: 21_000)
    assert (watched.messages, watched.age) == (0, 0.0)
    now[0] += 10
    # A million messages are not fetched to be counted; a clock that was corrected makes no negative age.
    watched.look(_waiting(*range(5_000, 5_000 + 2 * MOST)), lambda: 0)
    assert (watched.messages, watched.age) == (MOST, 0.0)
    watched.forget()
    assert (watched.messages, watched.age) == (None, None)


def test_without_a_listener_no_clock_is_read(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for costs nothing."""
    monkeypatch.setattr("celery_idempotent.engine.events.perf_counter", raising(AssertionError("a clock was read")))
    assert (shop.deliver("o").state, receiving()) == ("SUCCESS", 0)


def test_listener_that_fails_ends_no_claim() -> None:
    """Nor does it take the place of the store's error."""
    engine_events.listen(raising(LookupError("of the exporter")))
    try:
        assert timed(Timed.CLAIM, "t", lambda: "claimed") == "claimed"
        with pytest.raises(ZeroDivisionError):
            timed(Timed.CLAIM, "t", lambda: 1 / 0)
    finally:
        engine_events.listen(None)


def test_instrumenting_is_safe_to_repeat_and_undo(shop: Shop, meters: Meters, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever calls it, with a provider or without; another takes the place of the first, as in a pool process."""
    otel.instrument(meters.provider)
    otel.instrument()
    assert receiving() == len(SIGNALS)
    mine, claimed = Meters(), {"claimed": 1, "completed": 1}
    otel.instrument(mine.provider)
    shop.deliver("o")
    assert (mine.events(), meters.events()) == (claimed, {})
    assert (mine.value("in_flight"), meters.value("in_flight")) == (0, None)
    for _ in range(2):
        otel.uninstrument()
    shop.deliver("o")
    assert (receiving(), engine_events._listener, backlog.is_watched, mine.events()) == (0, None, False, claimed)
    otel.instrument(meters.provider)
    shop.deliver("o")
    assert meters.events() == {"replayed": 1}
    assert [each.message for each in caplog.records if each.name.startswith("opentelemetry")] == []


def test_replay_links_to_the_trace_that_did_the_work(shop: Shop, meters: Meters) -> None:
    """The duplicate's span has a link to the first. No span is made: that is for Celery's instrumentation."""
    tracer = TracerProvider().get_tracer("test")
    spans: list[Any] = []
    for name in ("the first", "the duplicate"):
        with tracer.start_as_current_span(name) as span:
            shop.deliver("o")
        spans.append(span)
    first, duplicate = spans
    (link,) = duplicate.links
    assert (list(first.links), dict(link.attributes)) == ([], {"celery_idempotent.event": "replayed"})
    context = first.get_span_context()
    assert (link.context.trace_id, link.context.span_id) == (context.trace_id, context.span_id)
    assert not trace.get_current_span().is_recording()
    assert shop.deliver("o").state == "SUCCESS"
