"""The demonstration itself: what a reader is told to run has to work, fail when it should, and clean up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_idempotent import open_store
from celery_idempotent.testing.contract import a_record
from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.folders import PREFIX, temporary_folder
from lab.servers import BROKERS, STORES, Servers
from lab.tether import ROOT

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

MARK = "DEMO_TEST"
SERVER = {
    "dynamodb": "ministack",
    "redis-cluster": "valkey-server",
    "postgres": "postgres",
    "mariadb": "mariadbd",
    "sqlite": "beam.smp",
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for everything that a demonstration makes; PostgreSQL, which runs as another user, can enter it."""
    with temporary_folder() as folder:
        folder.chmod(0o755)
        yield folder


@contextlib.contextmanager
def demo(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration, in an environment by which its descendants can be recognised."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.demo", "--folder", str(place / "demo"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, MARK: str(place), "TMPDIR": str(place)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def processes(place: Path) -> list[str]:
    """Command lines of living processes that descend from `demo(place)`.

    PostgreSQL writes its titles over its environment, but works in its data folder.
    """
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (
                f"{MARK}={place}".encode() in (process / "environ").read_bytes()
                or (process / "cwd").readlink().is_relative_to(place)
            ):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def workers_at_work(place: Path) -> bool:
    """Both workers of a column are ready."""
    return any(ledger.read_text().count('"ready"') == 2 for ledger in place.glob("demo/*/ledger.jsonl"))


@pytest.mark.parametrize(
    ("store", "broker"),
    [
        ("dynamodb", "sqs"),
        pytest.param("redis", "redis", marks=pytest.mark.nightly),
        pytest.param("postgres", "sqs", marks=pytest.mark.nightly),
        pytest.param("redis", "rabbitmq", marks=pytest.mark.nightly),
    ],
)
def test_every_order_is_charged_exactly_once_under_fire(place: Path, store: str, broker: str) -> None:
    """On the default, on Redis, a database and RabbitMQ: the other stores differ in their own code only."""
    with demo(place, "--orders", "20", "--store", store, "--broker", broker) as process:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
    assert "Every promise was kept." in output
    assert "IdempotentTask charged 20 of 20 exactly once" in output
    assert f"store {store}, broker {broker}" in output
    assert_its_story_is_told(output)
    assert processes(place) == []


def assert_its_story_is_told(output: str) -> None:
    """Of the order whose charge ends with a kill: both columns, from the kill to the end."""
    plain, ours = (re.findall(r"charge 0007 +(.*)", part) for part in output.split("IdempotentTask", 1))
    assert re.fullmatch(r"\d+ killed right after its effect", plain[0])
    assert re.fullmatch(r"\d+ ran it again: charged \d times", plain[1])
    assert re.fullmatch(r"\d+ killed right after its effect", ours[0])
    assert re.fullmatch(r"\d+ took over; the bank knew its key: charged once", ours[1])


@pytest.mark.parametrize(
    ("how", "store", "broker"),
    [
        (signal.SIGINT, "dynamodb", "sqs"),
        (signal.SIGTERM, "dynamodb", "sqs"),
        (signal.SIGKILL, "dynamodb", "sqs"),
        pytest.param(signal.SIGINT, "postgres", "redis", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "postgres", "redis", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "redis-cluster", "redis", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "mariadb", "sqs", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "sqlite", "rabbitmq", marks=pytest.mark.nightly),
    ],
)
def test_interrupting_it_leaves_no_process(place: Path, how: signal.Signals, store: str, broker: str) -> None:
    with demo(place, "--store", store, "--broker", broker) as process:
        # Of four tests at once on two cores, each with servers of its own, this one may be the last to get a turn.
        eventually(lambda: workers_at_work(place), "the workers never started", 200)
        assert len(processes(place)) > 3
        # The search finds the store's own process; so it would find it after the end, too.
        assert any(SERVER[store] in line and "tether_program" not in line for line in processes(place))
        process.send_signal(how)
        assert process.wait(60) != 0
        eventually(lambda: not processes(place), f"still there: {processes(place)}")
    if how is not signal.SIGKILL:
        assert list(place.glob(f"{PREFIX}*")) == []


@pytest.mark.parametrize(("option", "choices"), [("--store", STORES), ("--broker", BROKERS)])
def test_a_wrong_name_is_refused_with_the_choices(place: Path, option: str, choices: tuple[str, ...]) -> None:
    with demo(place, option, "nosuch") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"'nosuch' is not one of {', '.join(map(repr, choices))}" in " ".join(output.split())


@pytest.mark.parametrize("name", STORES)
def test_every_store_is_served_by_its_name(place: Path, name: str) -> None:
    """The address is that of a store that keeps records; a durable one has them after a kill, too."""
    with Servers(name, "", place / "new") as servers:
        store, record = open_store(servers.store_url), a_record()
        store.provision()
        store.swap(record, None)
        if servers.durable_store:
            servers.durable_store.restart()
        assert store.get(record.key) == record
        store.close()


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
            eventually(lambda: queue_length(servers.broker_url, settings.queue) == 3, "there were never three", 10)


def test_one_aws_serves_both_store_and_broker(place: Path) -> None:
    with Servers("dynamodb", "sqs", place) as servers:
        assert servers.store_url.split("/")[2] == servers.broker_url.split("/")[2]


def eventually(condition: Callable[[], bool], otherwise: str, timeout: float = 60) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)
