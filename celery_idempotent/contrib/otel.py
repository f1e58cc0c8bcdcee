"""Metrics, and links between spans, by the API of OpenTelemetry; where they go, SDK and exporter decide.

Importing this module changes nothing: :func:`instrument` does. Counters and links come from the signals of
:mod:`celery_idempotent.signals`, so without it no receiver is called and no clock is read.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from celery_idempotent._version import __version__
from celery_idempotent.engine.claim import waiting
from celery_idempotent.engine.events import EventName, Timed, listen
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.integration import events
from celery_idempotent.integration.broker.holding import held
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages.outbox import backlog
from celery_idempotent.integration.settings import runtime_of

__all__ = ["instrument", "uninstrument"]

_PREFIX = "celery_idempotent"

_OF_A_REQUEST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_OF_A_WAIT = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Seconds, the bounds of buckets. An SDK may have others."""


class _Instruments:
    """Those of one provider."""

    def __init__(self, provider: MeterProvider | None) -> None:
        self.provider = provider
        meter = metrics.get_meter(_PREFIX, __version__, provider)
        self._events = meter.create_counter(
            f"{_PREFIX}.events", unit="{event}", description="What happened to operations"
        )
        self._wait = meter.create_histogram(
            f"{_PREFIX}.wait.duration",
            unit="s",
            description="From the first postponement of a delivery until it may run or is answered",
            explicit_bucket_boundaries_advisory=_OF_A_WAIT,
        )
        self._latencies = {
            what: meter.create_histogram(
                f"{_PREFIX}.{what}.duration",
                unit="s",
                description=description,
                explicit_bucket_boundaries_advisory=_OF_A_REQUEST,
            )
            for what, description in (
                (Timed.CLAIM, "How long the store takes to answer a claim"),
                (Timed.RENEWAL, "How long the store takes to extend a lease"),
            )
        }
        for name, unit, description, read in (
            ("in_flight", "{attempt}", "Attempts under way", lambda: heartbeat.in_flight),
            ("outcomes.waiting", "{outcome}", "Outcomes that wait for the store", lambda: len(waiting)),
            ("messages.held", "{message}", "Messages that a worker holds of its broker", held),
            ("outbox.messages", "{message}", "Messages in the outbox", lambda: backlog.messages),
            ("outbox.age", "s", "Age of the oldest message in the outbox", lambda: backlog.age),
        ):
            observe = partial(self._observe, read)
            meter.create_observable_gauge(f"{_PREFIX}.{name}", [observe], unit=unit, description=description)

    def _observe(self, read: Callable[[], float | None], options: CallbackOptions) -> Iterable[Observation]:
        value = read() if _current is self else None
        return () if value is None else (Observation(value),)

    def receive(self, signal: Any, sender: Any, waited: float | None = None, **about: Any) -> None:
        """Count an event and the wait that it ends, and link the delivery's span to the trace that did the work."""
        task = about.get("task") if sender is None else sender.name
        whose = {} if task is None else {"task": task}
        self._events.add(1, {"event": signal.name, **whose, **_messaging(sender, signal.name)})
        if waited is not None:
            self._wait.record(waited, whose)
        did_it = trace.get_current_span(_W3C.extract({_TRACEPARENT: about.get("trace") or ""})).get_span_context()
        if did_it.is_valid:
            trace.get_current_span().add_link(did_it, {f"{_PREFIX}.event": signal.name})

    def time(self, what: Timed, task: str, seconds: float, error: str | None) -> None:
        """Record how long the store took."""
        self._latencies[what].record(seconds, {"task": task, **({} if error is None else {"error.type": error})})


_W3C = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"

_current: _Instruments | None = None

_made: dict[MeterProvider | None, _Instruments] = {}
"""A provider warns of an instrument that is made twice."""


def instrument(meter_provider: MeterProvider | None = None) -> None:
    """Measure and trace in this process from now on; safe to repeat.

    Instruments belong to a process: under prefork call it in each, as ``docs/how-to/telemetry.md`` shows. The global
    provider may also be set later.

    Args:
        meter_provider: Where metrics go; by default the global provider. Another one takes the place of the first.
    """
    global _current
    if _current is not None and meter_provider in (None, _current.provider):
        return
    uninstrument()
    if meter_provider not in _made:
        _made[meter_provider] = _Instruments(meter_provider)
    _current = _made[meter_provider]
    for signal in SIGNALS.values():
        signal.connect(_current.receive, weak=False)
    listen(_current.time)
    events.read_trace = _traceparent
    backlog.is_watched = True


def uninstrument() -> None:
    """Undo :func:`instrument`; safe to repeat."""
    global _current
    if _current is None:
        return
    for signal in SIGNALS.values():
        signal.disconnect(_current.receive)
    listen(None)
    events.read_trace = str
    backlog.is_watched = False
    _current = None


_SYSTEMS = {"amqp": "rabbitmq", "sqs": "aws_sqs"}
"""By kombu's name of a broker's kind, that of the conventions, where they differ."""


def _messaging(sender: Any, event: str) -> dict[str, str]:
    """What the conventions say of a message, where the event is about one that this process sends or processes.

    An exchange that is not the default one stands for its queues: routing keys can be without number.
    """
    info = getattr(getattr(sender, "request", None), "delivery_info", None) or {}
    is_sent = event == EventName.PUBLISH_SKIPPED
    if not is_sent and (not info or info.get("is_eager")):
        return {}
    driver = runtime_of(sender.app).broker.driver
    destination = "" if is_sent else info.get("exchange") or info.get("routing_key")
    return {
        "messaging.system": _SYSTEMS.get(driver, driver),
        "messaging.operation.type": "send" if is_sent else "process",
        **({"messaging.destination.name": destination} if destination else {}),
    }


def _traceparent() -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get(_TRACEPARENT, "")
