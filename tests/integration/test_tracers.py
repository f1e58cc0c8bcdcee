"""One operation stays one, and two stay two, whatever a tracer writes into the headers of their messages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from subprocess import Popen

import pytest
from redis import Redis

from lab import tether
from lab.embedded import EmbeddedRedis
from tests.support.ledger import Ledger
from tests.support.packages import needs
from tests.support.waiting import wait_until

APP = "tests.integration.traced_app"
WORKER = ("worker", "--concurrency", "2", "--without-gossip", "--without-mingle", "--without-heartbeat")
NESTING = ("ddtrace", "sentry-sdk")
"""These write a dict `headers` among the headers, which hides all others from Celery."""

Start = Callable[..., "Popen[bytes]"]


@pytest.fixture(
    scope="module",
    params=[
        "nobody",
        pytest.param("ddtrace", marks=needs("ddtrace")),
        pytest.param("sentry-sdk", marks=needs("sentry_sdk")),
        pytest.param("newrelic", marks=[needs("newrelic"), pytest.mark.nightly]),
        pytest.param("elastic-apm", marks=[needs("elasticapm"), pytest.mark.nightly]),
        pytest.param("opentelemetry", marks=needs("opentelemetry.instrumentation")),
    ],
)
def tracer(request: pytest.FixtureRequest) -> str:
    """Who traces workers, beats and publishers."""
    return str(request.param)


@pytest.fixture(scope="module")
def ledger(redis_server: EmbeddedRedis, tracer: str) -> Iterator[Ledger]:
    """What happened, in a Redis whose databases for this app are empty."""
    server = redis_server.url.rsplit("/", 1)[0]
    for number in (7, 8):
        with Redis.from_url(f"{server}/{number}") as client:
            client.flushdb()
    ledger = Ledger(f"{server}/7")
    yield ledger
    ledger.close()


@pytest.fixture(scope="module")
def start(
    tracer: str, redis_server: EmbeddedRedis, ledger: Ledger, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts processes under the tracer; a worker is running, for both tests."""
    # Some tracers import eventlet, whose DNS cannot be imported beside trio.
    server = redis_server.url.rsplit("/", 1)[0]
    env = {"EVENTLET_NO_GREENDNS": "yes", "TRACED_BY": tracer, "TRACED_REDIS": server}
    with ExitStack() as running:
        log = running.enter_context((tmp_path_factory.mktemp(tracer) / "log").open("ab"))

        def start(*arguments: str, **more: str) -> "Popen[bytes]":
            process = tether.start(*arguments, log=log, env={**env, **more})
            running.callback(tether.stop, process)
            return process

        start("celery", "-A", APP, *WORKER)
        yield start


def test_explicit_keys_retries_and_postponed_deliveries_keep_their_operation(
    start: Start, tracer: str, ledger: Ledger
) -> None:
    """Five keys of one call are five effects; a step is made once; who waits for its own key is answered by it."""
    publisher = start(APP)
    wait_until(lambda: publisher.poll() is not None, "the publisher is done", timeout=100)

    sent = ledger.rows("sent")
    assert any(row.details["nested"] for row in sent) is (tracer in NESTING)
    assert len(ledger.rows("pay")) == 5
    (paid,) = ledger.rows("paid")
    a, b, *by_hand, different = paid.details["answers"]
    assert (by_hand[:2], len({a, b, *by_hand}), different) == ([a, b], 3, 3)
    assert [row.details["answers"] for row in ledger.rows("fulfilled")] == [["o-2"]]
    assert len(ledger.rows("charge")) == 1
    (late,) = ledger.rows("late")
    assert len(set(late.details["answers"])) == len(ledger.rows("begin")) == 1
    assert [row.details["waited"] for row in ledger.rows("replayed") if row.key == "deliver_late"] == [True]
    assert [row.details["answers"] for row in ledger.rows("survived")] == [[2]]
    assert len(ledger.rows("died")) == 1


def test_ticks_keep_their_names(start: Start, tmp_path: Path, ledger: Ledger) -> None:
    """Two beats run each tick once and leave none out; one of Celery's own runs every tick."""
    for number in (1, 2):
        scheduler = ("--scheduler", "celery_idempotent.beat:PersistentScheduler")
        start("celery", "-A", APP, "beat", *scheduler, "--schedule", str(tmp_path / f"beat-{number}"), "--pidfile=")
    file = ("--schedule", str(tmp_path / "beat"), "--pidfile=")
    start("celery", "-A", APP, "beat", *file, TRACED_TICKS="report_of_celery")
    ledger.wait_for("plain tick", 3)
    rows = ledger.wait_for("tick", 5)

    ticks = sorted(datetime.fromisoformat(row.key) for row in rows)
    assert ticks == [ticks[0] + timedelta(seconds=number) for number in range(len(ticks))]
    assert {row.key for row in ledger.rows("replayed")} & {"report", "report_of_celery"} == {"report"}
