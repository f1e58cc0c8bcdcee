"""The real `celery` program: what it says at a start that cannot succeed, and what it keeps to itself."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from celery_idempotent import open_store
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedRedis
from tests.support.waiting import wait_until

CELERY = Path(sys.executable).with_name("celery")
SEEDS = ("0", "1", "2", "3")
"""Between them, the classes of a worker's steps come in different orders."""
UNUSABLE: tuple[tuple[dict[str, object], str], ...] = (
    ({}, "idempotency_store=None: set it to a store or its URL"),
    ({"idempotency_store": "nosuch://host"}, "no store has this scheme"),
    ({"idempotency_store": "sqlite:///none.sqlite"}, "the table does not exist; create it with: "),
    ({"idempotency_store": "sqlite:///none.sqlite", "idempotency_relay": "often"}, "idempotency_relay='often'"),
    ({"idempotency_store": "sqlite:///none.sqlite", "result_serializer": "pickle"}, "result_serializer='pickle'"),
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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command of an app with these settings."""

    def run(*arguments: str, seed: str = "0", **settings: object) -> subprocess.CompletedProcess[str]:
        _write(tmp_path, settings)
        return subprocess.run(
            [CELERY, "-A", "shop", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )

    return run


def _write(
    folder: Path, settings: dict[str, object], broker: str = "memory://", namespace: str = "", task: str = TASK
) -> None:
    (folder / "shop.py").write_text(
        SHOP.format(settings=settings, broker=broker, namespace=namespace or None, task=task)
    )


def _says_why(run: Run, settings: dict[str, object], seed: str) -> str:
    worker = run("worker", "--pool=solo", seed=seed, **settings)

    assert worker.returncode == 1
    assert "Traceback" not in worker.stderr
    (line,) = [each for each in worker.stderr.splitlines() if each.startswith("Error: celery-idempotent: ")]
    return line


@pytest.mark.parametrize(("settings", "told"), UNUSABLE)
def test_check_says_why_a_worker_cannot_start(run: Run, settings: dict[str, object], told: str) -> None:
    """In one line, and the same one."""
    line = _says_why(run, settings, SEEDS[0])
    checked = run("idempotency", "check", **settings)

    assert told in line
    assert (checked.returncode, checked.stderr) == (1, line.replace("celery-idempotent: ", "") + "\n")


@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize(("settings", "told"), [UNUSABLE[1], UNUSABLE[3]])
def test_worker_says_why_it_cannot_start_whichever_step_comes_first(
    run: Run, settings: dict[str, object], told: str, seed: str
) -> None:
    """The order of a worker's steps is that of a set: what one of them needs, another one has checked."""
    assert told in _says_why(run, settings, seed)


def test_list_fits_into_a_terminal(tmp_path: Path) -> None:
    """Of 80 columns: no line wraps, and a key is as short as show takes it. A pipe gets uncut lines."""
    url = f"sqlite:///{tmp_path}/records.sqlite"
    _write(tmp_path, {"idempotency_store": url})
    store = open_store(url)
    store.provision()
    record = replace(a_record(), key=f"shop.charge:1:{64 * '0'}", task="shop.charge", worker=f"celery@{40 * 'w'}")
    store.swap(record, None)
    store.close()
    command = [str(CELERY), "-A", "shop", "idempotency", "list", "--status", "in_progress"]

    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(theirs, "wb") as terminal:
        environ = {**os.environ, "COLUMNS": "80"}
        subprocess.run(command, cwd=tmp_path, env=environ, stdout=terminal, check=True, timeout=60)
        shown = screen.read(10_000).decode().splitlines()
    piped = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True, timeout=60).stdout

    bare = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown]
    assert len(bare) == 2
    assert max(map(len, bare)) <= 80
    assert bare[1].split()[-1] == f"shop.charge:1:{12 * '0'}"
    assert [record.key in line and record.worker in line for line in piped.splitlines()] == [False, True]


PASSWORD = "s3cr3t"
STORE = f"redis://shop:{PASSWORD}@localhost:6379/0"


@pytest.mark.parametrize("task", [TASK, ""], ids=["imported", "not imported"])
@pytest.mark.parametrize("namespace", ["", "CELERY", "shop"])
def test_report_hides_the_store(tmp_path: Path, namespace: str, task: str) -> None:
    """Under whatever namespace, and though nothing of the app has imported the library yet."""
    name = f"{namespace}_{'IDEMPOTENCY_STORE' if namespace.isupper() else 'idempotency_store'}".removeprefix("_")
    _write(tmp_path, {name: STORE}, namespace=namespace, task=task)

    report = subprocess.run(
        [CELERY, "-A", "shop", "report"], cwd=tmp_path, text=True, capture_output=True, timeout=60, check=True
    ).stdout

    assert "idempotency_store: '********'" in report.replace(name, "idempotency_store")
    assert PASSWORD not in report


@pytest.mark.nightly
@pytest.mark.parametrize("namespace", ["", "CELERY"])
def test_inspected_worker_hides_the_store(tmp_path: Path, redis_server: EmbeddedRedis, namespace: str) -> None:
    """What `inspect conf` prints comes from the worker, over the broker."""
    name = "CELERY_IDEMPOTENCY_STORE" if namespace else "idempotency_store"
    store = redis_server.url.replace("redis://", f"redis://default:{PASSWORD}@").removesuffix("?")
    _write(
        tmp_path,
        {name: store},
        broker=f"{redis_server.url.removesuffix('?').removesuffix('/0')}/9",
        namespace=namespace,
    )

    with _worker(tmp_path):
        told = subprocess.run(
            [CELERY, "-A", "shop", "inspect", "conf", "--json", "--timeout=20"],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout

    (settings,) = json.loads(told).values()
    assert settings[name] == "********"
    assert PASSWORD not in told


@contextmanager
def _worker(folder: Path) -> Iterator[None]:
    log = folder / "log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            [CELERY, "-A", "shop", "worker", "--pool=solo", "--without-mingle", "--without-gossip", "--loglevel=INFO"],
            cwd=folder,
            stdout=output,
            stderr=output,
        )
        try:
            wait_until(lambda: " ready." in log.read_text() or worker.poll() is not None, "the worker is ready")
            assert worker.poll() is None, log.read_text()
            yield
        finally:
            worker.terminate()
            worker.wait(30)
