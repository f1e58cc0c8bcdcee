"""Several real beats on one schedule: each tick once, whichever of them is killed."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from redis import Redis

from lab import tether
from lab.embedded import EmbeddedRedis
from tests.support.celeries import since_celery
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


def _beats_of(ledger: Ledger, *kinds: str) -> Counter[str]:
    """How many messages the worker has met of each beat."""
    return Counter(row.details["beat"] for kind in kinds for row in ledger.rows(kind))


def _all_send(ledger: Ledger, count: int, *kinds: str) -> None:
    wait_until(lambda: len(_beats_of(ledger, *kinds)) >= count, f"{count} beats send")


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
    """They start one after the other, and the first is killed: no second is left out, and none has two effects."""
    first = beat("first")
    ledger.wait_for("effect", 2)
    beat("second")
    beat("third")
    ledger.wait_for("effect", len(ledger.rows("effect")) + 4)
    tether.kill(first)
    ledger.wait_for("effect", len(ledger.rows("effect")) + 5)

    ticks = [datetime.fromisoformat(row.key) for row in ledger.rows("effect")]
    assert sorted(ticks) == [min(ticks) + SECOND * n for n in range(len(ticks))]


@pytest.mark.parametrize("beat", ["celery"], indirect=True)
def test_three_beats_are_at_work(beat: Start, ledger: Ledger) -> None:
    """The claim above is about all of them: the worker meets the messages of each, and two of three are no effect."""
    for name in ("first", "second", "third"):
        beat(name)
    _all_send(ledger, 3, "effect", "replayed")
    ledger.wait_for("replayed", 12)

    assert len(_beats_of(ledger, "effect", "replayed")) == 3
    assert max(Counter(row.key for row in ledger.rows("effect")).values()) == 1


@since_celery("5.7", "the mark on what beat sends, without which all ticks of Celery's own are one operation")
@pytest.mark.parametrize("beat", ["plain"], indirect=True)
def test_three_beats_of_celery_run_every_tick_three_times(beat: Start, ledger: Ledger) -> None:
    """Celery's own scheduler, the same task: each beat has its own effects, three in a second."""
    for name in ("first", "second", "third"):
        beat(name)
    _all_send(ledger, 3, "effect")
    before = _beats_of(ledger, "effect")
    ledger.wait_for("effect", before.total() + 12)
    after = _beats_of(ledger, "effect") - before

    assert len(after) == 3
    assert min(after.values()) >= 3
    assert ledger.rows("replayed") == []
