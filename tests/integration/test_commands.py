"""The real `celery` program: what it says at a start that cannot succeed, and what it keeps to itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.embedded import EmbeddedRedis
from tests.support.waiting import wait_until

CELERY = str(Path(sys.executable).with_name("celery"))
SEEDS = ("0", "1", "2", "3")
"""Between them, the classes of a worker's steps come in different orders."""

LACKING = {"idempotency_store": "sqlite:///none.sqlite"}
UNUSABLE: tuple[tuple[dict[str, object], str], ...] = (
    ({}, "idempotency_store=None: set it to a store or its URL"),
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
    [*((*each, SEEDS[0]) for each in UNUSABLE), *((*UNUSABLE[each], seed) for each in (1, 2) for seed in SEEDS[1:])],
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


PASSWORD = "s3cr3t"


@pytest.mark.parametrize("task", [TASK, ""], ids=["imported", "not imported"])
@pytest.mark.parametrize("namespace", ["", "CELERY"])
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
