"""Whatever beats send and tracers write into headers: one operation stays one, two stay two, a tick runs once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import Popen

import pytest
from redis import Redis

from lab import tether
from lab.embedded import EmbeddedRedis
from tests.support.ledger import Ledger, Row
from tests.support.packages import needs
from tests.support.waiting import wait_until

APP = "tests.integration.traced_app"
WORKER = ("worker", "--concurrency", "2", "--without-gossip", "--without-mingle", "--without-heartbeat")
NESTING = ("ddtrace", "sentry-sdk")
"""These write a dict `headers` among the headers, which hides all others from Celery."""
CELERYS = "celery_idempotent.beat:PersistentScheduler"
SENTRY = pytest.param("sentry-sdk", marks=needs("sentry_sdk"))
OTHERS = {
    "nobody": "celery",
    "ddtrace": "ddtrace",
    "newrelic": "newrelic",
    "elastic-apm": "elasticapm",
    "opentelemetry": "opentelemetry.instrumentation",
}
"""Further tracers with the modules that they need, for the night."""

Start = Callable[..., "Popen[bytes]"]


def at_night(module: str) -> list[pytest.MarkDecorator]:
    return [needs(module), pytest.mark.nightly]


@pytest.fixture
def tracer(request: pytest.FixtureRequest) -> str:
    """Who traces workers, beats and publishers."""
    return str(request.param)


@pytest.fixture
def ledger(redis_server: EmbeddedRedis, tracer: str) -> Iterator[Ledger]:
    """What happened, in a Redis whose databases for this app are empty."""
    server = redis_server.url.rsplit("/", 1)[0]
    for number in (6, 7, 8):
        with Redis.from_url(f"{server}/{number}") as client:
            client.flushdb()
    with closing(Ledger(f"{server}/7")) as ledger:
        yield ledger


@pytest.fixture
def start(tracer: str, redis_server: EmbeddedRedis, ledger: Ledger, tmp_path: Path) -> Iterator[Start]:
    """Starts processes under the tracer; a worker is running."""
    server = redis_server.url.rsplit("/", 1)[0]
    # Some tracers import eventlet, whose DNS cannot be imported beside trio.
    env = {"EVENTLET_NO_GREENDNS": "yes", "TRACED_BY": tracer, "TRACED_REDIS": server, "TRACED_FOLDER": str(tmp_path)}
    with ExitStack() as running:
        log = running.enter_context((tmp_path / "log").open("ab"))

        def start(*arguments: str, **more: str) -> "Popen[bytes]":
            process = tether.start(*arguments, log=log, env={**env, **more})
            running.callback(tether.stop, process)
            return process

        start("celery", "-A", APP, *WORKER)
        yield start


@pytest.mark.parametrize(
    "tracer", [SENTRY, *(pytest.param(name, marks=at_night(module)) for name, module in OTHERS.items())], indirect=True
)
def test_explicit_keys_retries_and_postponements_keep_the_operation(start: Start, tracer: str, ledger: Ledger) -> None:
    """Five keys of one call are five effects; a step is made once; who waits for its own key is answered by it."""
    publisher = start(APP)
    wait_until(lambda: publisher.poll() is not None, "the publisher is done", timeout=100)

    assert any(row.details["nested"] for row in ledger.rows("sent")) is (tracer in NESTING)
    assert len(ledger.rows("pay")) == 5
    (row,) = ledger.rows("answers")
    answers = row.details
    a, b, *by_hand, different = answers["paid"]
    assert (by_hand[:2], len({a, b, *by_hand}), different) == ([a, b], 3, 3)
    assert (answers["fulfilled"], len(ledger.rows("charge"))) == (["o-2"], 1)
    assert len(set(answers["late"])) == len(ledger.rows("begin")) == 1
    assert [row.details["waited"] for row in ledger.rows("replayed") if row.key == "deliver_late"] == [True]
    assert answers["survived"] == [2]
    assert len(ledger.rows("died")) == 1


@pytest.mark.parametrize(
    ("tracer", "scheduler"),
    [
        pytest.param("sentry-sdk", CELERYS, marks=needs("sentry_sdk"), id="sentry-sdk"),
        *(pytest.param(name, CELERYS, marks=at_night(module), id=name) for name, module in OTHERS.items()),
        pytest.param("nobody", f"{APP}:DjangoScheduler", marks=at_night("django_celery_beat"), id="django"),
        pytest.param("nobody", f"{APP}:RedBeatScheduler", marks=at_night("redbeat"), id="redbeat"),
    ],
    indirect=["tracer"],
)
def test_three_beats_run_every_tick_once(start: Start, tmp_path: Path, ledger: Ledger, scheduler: str) -> None:
    """All send, so two messages of three are no effect; the first is killed. A beat of Celery's own runs each tick."""

    def beat(name: str, *options: str, **more: str) -> "Popen[bytes]":
        return start("celery", "-A", APP, "beat", *options, "--schedule", str(tmp_path / name), "--pidfile=", **more)

    def of_ticks(*kinds: str) -> list[Row]:
        return [row for kind in kinds for row in ledger.rows(kind) if "beat" in row.details]

    ours = ("--scheduler", scheduler)
    first = beat("first", *ours)
    ledger.wait_for("tick", 2)
    beat("second", *ours)
    beat("third", *ours)
    wait_until(lambda: len({row.details["beat"] for row in of_ticks("tick", "replayed")}) == 3, "all of them send")
    ledger.wait_for("replayed", len(ledger.rows("replayed")) + 6)
    beat("celerys", TRACED_TICKS="report_of_celery")
    tether.kill(first)
    ledger.wait_for("tick", len(ledger.rows("tick")) + 5)
    ledger.wait_for("plain tick", 3)
    ticks = sorted(datetime.fromisoformat(row.key) for row in ledger.rows("tick"))
    assert ticks == [ticks[0] + timedelta(seconds=number) for number in range(len(ticks))]
    assert {row.key for row in ledger.rows("replayed")} == {"report"}
