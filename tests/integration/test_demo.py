"""The demonstration itself: what a reader is told to run has to work, fail when it should, and clean up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.folders import PREFIX, temporary_folder
from lab.servers import BROKERS, STORES, Servers
from lab.tether import ROOT
from tests.support.processes import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def at_night(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for everything that a demonstration makes; PostgreSQL, which runs as another user, can enter it."""
    with temporary_folder() as folder:
        folder.chmod(0o755)
        yield folder


@contextlib.contextmanager
def demo(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration, in an environment by which its descendants can be recognised."""
    command = [sys.executable, "-m", "lab.demo", "--folder", str(place / "demo"), *arguments]
    environ = {**os.environ, MARK: str(place), "TMPDIR": str(place)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environ
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("store", "broker"),
    [("dynamodb", "sqs"), at_night("redis", "redis"), at_night("postgres", "sqs"), at_night("redis", "rabbitmq")],
)
def test_every_order_is_charged_exactly_once_under_fire(place: Path, store: str, broker: str) -> None:
    """And it tells of the order whose charge ends with a kill: both columns, from the kill to the end."""
    with demo(place, "--orders", "20", "--store", store, "--broker", broker) as process:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
    for told in ("Every promise was kept.", "IdempotentTask charged 20 of 20 exactly once", f"store {store}, broker"):
        assert told in output
    plain, ours = (re.findall(r"charge 0007 +\d+ (.*)", part) for part in output.split("IdempotentTask", 1))
    assert plain[0] == ours[0] == "killed right after its effect"
    assert re.fullmatch(r"ran it again: charged \d times", plain[1])
    assert ours[1] == "took over; the bank knew its key: charged once"
    assert processes(place) == {}


@pytest.mark.parametrize(
    ("how", "store", "broker", "server"),
    [
        *((how, "dynamodb", "sqs", "ministack") for how in (INT, TERM, KILL)),
        *(at_night(how, "postgres", "redis", "postgres") for how in (INT, KILL)),
        at_night(KILL, "redis-cluster", "redis", "valkey-server"),
        at_night(KILL, "mariadb", "sqs", "mariadbd"),
        at_night(KILL, "sqlite", "rabbitmq", "beam.smp"),
    ],
)
def test_interrupting_it_leaves_no_process(
    place: Path, how: signal.Signals, store: str, broker: str, server: str
) -> None:
    """Neither workers nor servers, and no folder where there was time to delete it."""

    def workers_are_ready() -> bool:
        return any(ledger.read_text().count('"ready"') == 2 for ledger in place.glob("demo/*/ledger.jsonl"))

    with demo(place, "--store", store, "--broker", broker) as process:
        # Of four tests at once on two cores, each with servers of its own, this one may be the last to get a turn.
        wait_until(workers_are_ready, "the workers start", timeout=200)
        # The search finds the store's own process; so it would find it after the end, too.
        assert any(server in line and "tether_program" not in line for line in processes(place).values())
        process.send_signal(how)
        assert process.wait(60) != 0
        wait_until(lambda: not processes(place), "all processes end")
    assert how is KILL or list(place.glob(f"{PREFIX}*")) == []


@pytest.mark.parametrize(("option", "choices"), [("--store", STORES), ("--broker", BROKERS)])
def test_a_wrong_name_is_refused_with_the_choices(place: Path, option: str, choices: tuple[str, ...]) -> None:
    """As click refuses it."""
    with demo(place, option, "nosuch") as process:
        output, _ = process.communicate(timeout=60)
    told = f"'nosuch' is not one of {', '.join(map(repr, choices))}"
    assert (process.returncode, told in " ".join(output.split())) == (2, True)


@pytest.mark.parametrize("name", BROKERS)
def test_every_broker_is_served_by_its_name(place: Path, name: str) -> None:
    """The address is that of a broker, and its length counts what waits and what is being worked on."""
    with Servers("", name, place) as servers:
        settings = Settings(broker_url=servers.broker_url, store_url="", folder=place)
        publisher = Celery(set_as_current=False)
        publisher.conf.update(settings.celery())
        with publisher.connection_for_write() as connection:
            for _ in range(3):
                publisher.send_task("any", connection=connection)
            assert connection.default_channel.basic_get(settings.queue)
            wait_until(lambda: queue_length(servers.broker_url, settings.queue) == 3, "there are three")
