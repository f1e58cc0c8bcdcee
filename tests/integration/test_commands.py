"""The real `celery` program: what it says at a start that cannot succeed, and what it keeps to itself."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_idempotent import open_store
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedRedis
from tests.support.waiting import wait_until

CELERY = str(Path(sys.executable).with_name("celery"))
SEEDS = ("0", "1", "2", "3")
"""Between them, the classes of a worker's steps come in different orders."""

LACKING = {"idempotency_store": "sqlite:///none.sqlite"}
UNUSABLE: tuple[tuple[dict[str, object], str], ...] = (
    ({}, "idempotency_store=None: set it to a store or its URL"),
    ({"idempotency_store": "nosuch://host"}, "no store has this scheme"),
    ({**LACKING}, "the table does not exist; create it with: "),
    ({**LACKING, "idempotency_relay": "often"}, "idempotency_relay='often'"),
    ({**LACKING, "result_serializer": "pickle"}, "result_serializer='pickle'"),
)
"""Settings, and what is said of them."""

SHOP = """
from celery import Celery
app = Celery("shop", broker={broker!r})
app.config_from_object({settings!r}, namespace={namespace!r})
{task}
"""
TASK = """
from celery_idempotent import IdempotentTask
@app.task(base=IdempotentTask, acks_late=True, reject_on_worker_lost=True)
def charge(): ...
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _write(
    folder: Path, settings: dict[str, object], broker: str = "memory://", namespace: str = "", task: str = TASK
) -> None:
    text = SHOP.format(settings=settings, broker=broker, namespace=namespace or None, task=task)
    (folder / "shop.py").write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command of the app that was written; seeds change the order of a worker's steps."""

    def run(*arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        command = [CELERY, "-A", "shop", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize(
    ("settings", "told", "seed"),
    [*((*each, SEEDS[0]) for each in UNUSABLE), *((*UNUSABLE[each], seed) for each in (1, 3) for seed in SEEDS[1:])],
)
def test_worker_that_cannot_start_says_why_as_the_check_does(
    run: Run, tmp_path: Path, settings: dict[str, object], told: str, seed: str
) -> None:
    """In one line, and the same one, whichever step comes first: what one of them needs, another one has checked."""
    _write(tmp_path, settings)
    worker, checked = run("worker", "--pool=solo", seed=seed), run("idempotency", "check")
    (line,) = [each for each in worker.stderr.splitlines() if each.startswith("Error: celery-idempotent: ")]
    assert (worker.returncode, told in line, "Traceback" in worker.stderr) == (1, True, False)
    assert (checked.returncode, checked.stderr) == (1, line.replace("celery-idempotent: ", "") + "\n")


def test_list_fits_into_a_terminal(run: Run, tmp_path: Path) -> None:
    """Of 80 columns: no line wraps, and a key is as short as show takes it. A pipe gets uncut lines."""
    url = f"sqlite:///{tmp_path}/records.sqlite"
    _write(tmp_path, {"idempotency_store": url})
    store = open_store(url)
    store.provision()
    record = a_record().but(key=f"shop.charge:1:{64 * '0'}", task="shop.charge", worker=f"celery@{40 * 'w'}")
    store.swap(record, None)
    store.close()
    words = ("idempotency", "list", "--status", "in_progress")
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(theirs, "wb") as terminal:
        environ = {**os.environ, "COLUMNS": "80"}
        command = [CELERY, "-A", "shop", *words]
        subprocess.run(command, cwd=tmp_path, env=environ, stdout=terminal, check=True, timeout=60)
        shown = screen.read(10_000).decode().splitlines()

    bare = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown]
    assert (len(bare), max(map(len, bare)) <= 80) == (2, True)
    assert bare[1].split()[-1] == f"shop.charge:1:{12 * '0'}"
    piped = run(*words).stdout.splitlines()
    assert [record.key in line and record.worker in line for line in piped] == [False, True]


PASSWORD = "s3cr3t"


@pytest.mark.parametrize("task", [TASK, ""], ids=["imported", "not imported"])
@pytest.mark.parametrize("namespace", ["", "CELERY", "shop"])
def test_report_hides_the_store(run: Run, tmp_path: Path, namespace: str, task: str) -> None:
    """Under whatever namespace, and though nothing of the app has imported the library yet."""
    name = f"{namespace}_{'IDEMPOTENCY_STORE' if namespace.isupper() else 'idempotency_store'}".removeprefix("_")
    store = f"redis://shop:{PASSWORD}@localhost:6379/0"
    _write(tmp_path, {name: store}, namespace=namespace, task=task)
    report = run("report").stdout
    assert (f"{name}: '********'" in report, PASSWORD in report) == (True, False)


@pytest.mark.nightly
@pytest.mark.parametrize("namespace", ["", "CELERY"])
def test_inspected_worker_hides_the_store(
    run: Run, tmp_path: Path, redis_server: EmbeddedRedis, namespace: str
) -> None:
    """What `inspect conf` prints comes from the worker, over the broker."""
    name = "CELERY_IDEMPOTENCY_STORE" if namespace else "idempotency_store"
    url = redis_server.url.removesuffix("?")
    store = url.replace("redis://", f"redis://default:{PASSWORD}@")
    _write(tmp_path, {name: store}, broker=f"{url.removesuffix('/0')}/9", namespace=namespace)
    log = tmp_path / "log"
    quiet = ("--pool=solo", "--without-mingle", "--without-gossip", "--loglevel=INFO")
    with log.open("w") as output:
        command = [CELERY, "-A", "shop", "worker", *quiet]
        worker = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        try:
            wait_until(lambda: " ready." in log.read_text() or worker.poll() is not None, "the worker is ready")
            told = run("inspect", "conf", "--json", "--timeout=20").stdout
        finally:
            worker.terminate()
            worker.wait(30)
    (settings,) = json.loads(told).values()
    assert (settings[name], PASSWORD in told) == ("********", False)
