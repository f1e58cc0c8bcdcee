"""Several real beats on one schedule: each tick once, whichever of them is killed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from redis import Redis

from lab import tether
from lab.embedded import EmbeddedRedis
from tests.support.ledger import Ledger
from tests.support.packages import needs
from tests.support.waiting import wait_until

APP = "tests.integration.beat_app"
WORKER = ("worker", "--concurrency", "2", "--without-gossip", "--without-mingle", "--without-heartbeat")
SECOND = timedelta(seconds=1)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def server(redis_server: EmbeddedRedis) -> str:
    """A Redis whose databases for this app are empty."""
    server = redis_server.url.rsplit("/", 1)[0]
    for number in (4, 5, 6):
        with Redis.from_url(f"{server}/{number}") as client:
            client.flushdb()
    return server


@pytest.fixture
def ledger(server: str) -> Iterator[Ledger]:
    """What the task did."""
    ledger = Ledger(f"{server}/4")
    yield ledger
    ledger.close()


@pytest.fixture
def beat(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a beat of the kind that the test is about, each with a schedule file of its own; a worker is running."""
    env = {"BEATS": request.param, "BEATS_FOLDER": str(tmp_path), "BEATS_REDIS": server}
    if request.param == "django":
        subprocess.run([sys.executable, "-m", APP], env={**os.environ, **env}, check=True)
    with ExitStack() as running:
        log = running.enter_context((tmp_path / "log").open("ab"))

        def started(*arguments: str) -> "subprocess.Popen[bytes]":
            process = tether.start("celery", "-A", APP, *arguments, log=log, env=env)
            running.callback(tether.stop, process)
            return process

        def beat(name: str) -> "subprocess.Popen[bytes]":
            file = ("--schedule", str(tmp_path / name), "--pidfile=")
            return started("beat", "--scheduler", f"{APP}:Scheduler", *file)

        started(*WORKER)
        yield beat


@pytest.mark.parametrize(
    "beat",
    [
        "celery",
        pytest.param("django", marks=[needs("django_celery_beat"), pytest.mark.nightly]),
        pytest.param("redbeat", marks=[needs("redbeat"), pytest.mark.nightly]),
    ],
    indirect=True,
)
def test_three_beats_run_every_tick_once(beat: Start, ledger: Ledger) -> None:
    """All send, so two messages of three are no effect. The first is killed, and no second is left out."""
    first = beat("first")
    ledger.wait_for("effect", 2)
    beat("second")
    beat("third")
    wait_until(lambda: len(_senders(ledger)) == 3, "all of them send")
    ledger.wait_for("replayed", len(ledger.rows("replayed")) + 6)
    tether.kill(first)
    ledger.wait_for("effect", len(ledger.rows("effect")) + 5)
    ticks = [datetime.fromisoformat(row.key) for row in ledger.rows("effect")]
    assert sorted(ticks) == [min(ticks) + SECOND * n for n in range(len(ticks))]


def _senders(ledger: Ledger) -> set[str]:
    """The beats of which the worker has met messages."""
    return {row.details["beat"] for kind in ("effect", "replayed") for row in ledger.rows(kind)}
