"""An app under the tracer that `TRACED_BY` names, its schedule and beats, and as a program its messages' publisher.

`TRACED_REDIS` says where broker, backend and store are, `TRACED_FOLDER` where files go. No tracer needs its server.
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
from celery_idempotent.beat import SchedulerMixin  # noqa: E402
from celery_idempotent.integration.headers import TICK_HEADER  # noqa: E402
from celery_idempotent.signals import conflicted, replayed  # noqa: E402
from tests.support.ledger import Ledger, Row  # noqa: E402

app = Celery("traced", broker=f"{REDIS}/7", backend=f"{REDIS}/7", set_as_current=True)
app.conf.update(
    beat_schedule={"report": {"task": os.environ.get("TRACED_TICKS", "report"), "schedule": 1.0}},
    broker_connection_retry_on_startup=True,
    idempotency_store=f"{REDIS}/8",
    redbeat_lock_key=None,
    redbeat_redis_url=f"{REDIS}/6",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
ledger = Ledger(f"{REDIS}/7")
GUARDED: dict[str, Any] = {"base": IdempotentTask, "bind": True, "idempotent": Policy(lease=5, backoff=0.1)}


def note(kind: str, key: str, **details: Any) -> str:
    """Write down what happened; the key."""
    ledger.append(Row(kind=kind, key=key, task_id="", worker="", pid=os.getpid(), at=time.time(), details=details))
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
    note("tick", self.request.headers[TICK_HEADER].partition("@")[2], beat=self.request.origin)


@app.task(**GUARDED, name="report_of_celery")
def report_of_celery(self: Any) -> None:
    """Write down that it ran, for a schedule of which no tick has a name."""
    note("plain tick", "")


@signals.after_task_publish.connect(weak=False)
def sent(sender: str, headers: Any, **_: Any) -> None:
    """Write down what the tracer has made of the headers."""
    note("sent", sender, nested=bool(headers.get("headers")))


@conflicted.connect(weak=False)
def met(sender: Any, **_: Any) -> None:
    """Write down that a delivery is postponed."""
    note("conflicted", sender.name)


@replayed.connect(weak=False)
def answered(sender: Any, waited: float | None, **_: Any) -> None:
    """Write down that a delivery was answered, who published it, and whether it knows that it had to wait."""
    note("replayed", sender.name, waited=waited is not None, beat=current_task.request.origin)


def __getattr__(name: str) -> Any:
    """The schedulers of others: what they import is there only where they are installed."""
    if name == "RedBeatScheduler":
        from redbeat.schedulers import RedBeatScheduler

        return type(name, (SchedulerMixin, RedBeatScheduler), {})
    if name != "DjangoScheduler":
        raise AttributeError(name)
    import django
    from django.conf import settings
    from django.core.management import call_command

    file = f"{os.environ['TRACED_FOLDER']}/beats.sqlite3"
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "OPTIONS": {"timeout": 30}}
    apps = ["django.contrib.contenttypes", "django_celery_beat"]
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=apps, USE_TZ=True)
    django.setup()
    call_command("migrate", verbosity=0)
    from django_celery_beat.schedulers import DatabaseScheduler

    globals()[name] = type(name, (SchedulerMixin, DatabaseScheduler), {})  # as Celery asks for it more than once
    return globals()[name]


def publish() -> None:
    """Each call beside its twin, which has the same arguments; the answers go to the ledger."""

    def got(*results: Any) -> list[Any]:
        return [each.get(timeout=60) for each in results]

    by_name = [app.send_task("pay", ("o-1",), headers={"idempotency_key": key}) for key in "ab"]
    by_hand = [pay.apply_async(("o-1",), idempotency_key=key) for key in "abc"]
    together = chord([pay.s("o-1").set(idempotency_key=key) for key in "cde"], total.s())()
    paid, fulfilled = got(*by_name, *by_hand, together), got(fulfil.delay("o-2"))

    first = deliver_late.apply_async(("o-3",), idempotency_key="f")
    ledger.wait_for("begin", key="o-3")
    second = deliver_late.apply_async(("o-3",), idempotency_key="f")
    ledger.wait_for("conflicted", 2, "deliver_late")
    ledger.open("late")
    late, survived = got(first, second), got(die.apply_async(("o-4",), idempotency_key="g"))
    note("answers", "", paid=paid, fulfilled=fulfilled, late=late, survived=survived)


if __name__ == "__main__":
    with traced:
        publish()
    sys.stdout.flush()
    os._exit(0)  # no tracer waits for its server
