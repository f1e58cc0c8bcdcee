"""An app under the tracer that `TRACED_BY` names, its schedule, and as a program the publisher of its messages.

`TRACED_REDIS` says where broker, backend and store are. No tracer needs its server here.
"""
# mypy: allow-untyped-decorators

import inspect
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

TRACER, REDIS = os.environ["TRACED_BY"], os.environ["TRACED_REDIS"]


def _ddtrace() -> AbstractContextManager[Any]:
    os.environ["DD_CELERY_DISTRIBUTED_TRACING"] = "true"
    os.environ["DD_INSTRUMENTATION_TELEMETRY_ENABLED"] = "false"
    os.environ["DD_REMOTE_CONFIGURATION_ENABLED"] = "false"
    os.environ["DD_TRACE_AGENT_URL"] = "http://127.0.0.1:9"
    from ddtrace import patch
    from ddtrace.trace import tracer

    patch(celery=True)
    span: AbstractContextManager[Any] = tracer.trace("publisher")
    return span


def _sentry() -> AbstractContextManager[Any]:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    offered = inspect.signature(CeleryIntegration).parameters  # monitors are none of 1.14
    monitors: dict[str, Any] = {"monitor_beat_tasks": True} if "monitor_beat_tasks" in offered else {}
    integration = CeleryIntegration(propagate_traces=True, **monitors)
    sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", traces_sample_rate=1.0, integrations=[integration])
    transaction: AbstractContextManager[Any] = sentry_sdk.start_transaction(name="publisher")
    return transaction


def _newrelic() -> AbstractContextManager[Any]:
    os.environ["NEW_RELIC_DEVELOPER_MODE"] = "true"
    os.environ["NEW_RELIC_LICENSE_KEY"] = "0" * 40
    from newrelic import agent

    agent.initialize()
    task: AbstractContextManager[Any] = agent.BackgroundTask(agent.register_application(timeout=10), "publisher")
    return task


def _elasticapm() -> AbstractContextManager[Any]:
    from elasticapm import Client, instrument
    from elasticapm.contrib.celery import register_exception_tracking, register_instrumentation

    client = Client(service_name="traced", server_url="http://127.0.0.1:9", disable_send=True, cloud_provider=False)
    register_instrumentation(client)
    register_exception_tracking(client)
    instrument()
    client.begin_transaction("publisher")
    return nullcontext()


def _opentelemetry() -> AbstractContextManager[Any]:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    instrumentor: Any = CeleryInstrumentor
    instrumentor().instrument()
    return trace.get_tracer("publisher").start_as_current_span("publisher")


_TRACERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nobody": nullcontext,
    "ddtrace": _ddtrace,
    "sentry-sdk": _sentry,
    "newrelic": _newrelic,
    "elastic-apm": _elasticapm,
    "opentelemetry": _opentelemetry,
}
traced = _TRACERS[TRACER]()  # before Celery is imported, as each tracer asks for

from celery import Celery, chord, current_task, signals  # noqa: E402

from celery_idempotent import IdempotentTask, Policy, current_attempt  # noqa: E402
from celery_idempotent.integration.headers import TICK_HEADER  # noqa: E402
from celery_idempotent.signals import conflicted, replayed  # noqa: E402
from tests.support.ledger import Ledger, Row  # noqa: E402

app = Celery("traced", broker=f"{REDIS}/7", backend=f"{REDIS}/7", set_as_current=True)
app.conf.update(
    beat_schedule={
        "report": {
            "task": os.environ.get("TRACED_TICKS", "report"),
            "schedule": float(os.environ.get("TRACED_EVERY", 1)),
        }
    },
    broker_connection_retry_on_startup=True,
    idempotency_store=f"{REDIS}/8",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
ledger = Ledger(f"{REDIS}/7")
GUARDED: dict[str, Any] = {
    "base": IdempotentTask,
    "bind": True,
    "idempotent": Policy(lease=5, backoff=0.1),
}


def note(kind: str, key: str, task_id: str = "", **details: Any) -> str:
    """Write down what happened; the key."""
    row = Row(kind=kind, key=key, task_id=task_id, worker="", pid=os.getpid(), at=time.time(), details=details)
    ledger.append(row)
    return key


@app.task(**GUARDED, name="pay")
def pay(self: Any, order: str) -> str:
    """Have an effect of its own for each key."""
    note("pay", order)
    return self.request.id  # type: ignore[no-any-return]


@app.task(name="total")
def total(parts: list[str]) -> int:
    """Count what is different, for a chord."""
    return len(set(parts))


@app.task(**GUARDED, name="deliver_late")
def deliver_late(self: Any, order: str) -> str:
    """Have the effect when the test says so."""
    note("begin", order)
    ledger.pass_through("late")
    return self.request.id  # type: ignore[no-any-return]


@app.task(**GUARDED, name="fulfil")
def fulfil(self: Any, order: str, tries: int = 0) -> str:
    """Charge once, in three executions of which each has other arguments."""
    charge = current_attempt().step("charge", lambda step: note("charge", order))
    if tries < 2:
        raise self.retry(kwargs={"tries": tries + 1}, countdown=0)
    return charge


@app.task(**GUARDED, name="die", retry_on_worker_lost=True, default_retry_delay=0.1)
def die(self: Any, order: str) -> int:
    """Take the first process along."""
    if current_attempt().number == 1:
        note("died", order)
        os._exit(1)
    return current_attempt().number


@app.task(**GUARDED, name="report")
def report(self: Any) -> None:
    """Write down which tick it is."""
    note("tick", self.request.headers[TICK_HEADER].partition("@")[2])


@app.task(**GUARDED, name="report_of_celery")
def report_of_celery(self: Any) -> None:
    """Write down that it ran, for a schedule of which no tick has a name."""
    note("plain tick", "")


@signals.after_task_publish.connect(weak=False)
def sent(sender: str, headers: Any, **_: Any) -> None:
    """Write down what the tracer has made of the headers."""
    note("sent", sender, headers["id"], names=sorted(headers), nested=sorted(headers.get("headers") or {}))


@conflicted.connect(weak=False)
def met(sender: Any, **_: Any) -> None:
    """Write down that a delivery is postponed."""
    note("conflicted", sender.name)


@replayed.connect(weak=False)
def answered(sender: Any, waited: float | None, **_: Any) -> None:
    """Write down that a delivery was answered, and whether it knows that it had to wait."""
    note("replayed", sender.name, current_task.request.id, waited=waited is not None)


def publish() -> None:
    """Each call beside its twin, which has the same arguments; the answers go to the ledger."""
    by_name = [app.send_task("pay", ("o-1",), headers={"idempotency_key": key}) for key in "ab"]
    by_hand = [pay.apply_async(("o-1",), idempotency_key=key) for key in "abc"]
    together = chord([pay.s("o-1").set(idempotency_key=key) for key in "cde"], total.s())()
    note("paid", "o-1", answers=[each.get(timeout=60) for each in (*by_name, *by_hand, together)])

    note("fulfilled", "o-2", answers=[fulfil.delay("o-2").get(timeout=60)])

    first = deliver_late.apply_async(("o-3",), idempotency_key="f")
    ledger.wait_for("begin", key="o-3")
    second = deliver_late.apply_async(("o-3",), idempotency_key="f")
    ledger.wait_for("conflicted", 2, "deliver_late")
    ledger.open("late")
    note("late", "o-3", answers=[each.get(timeout=60) for each in (first, second)])

    note("survived", "o-4", answers=[die.apply_async(("o-4",), idempotency_key="g").get(timeout=60)])


if __name__ == "__main__":
    with traced:
        publish()
    sys.stdout.flush()
    os._exit(0)  # no tracer waits for its server
