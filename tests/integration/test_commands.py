"""The real `celery` program: what it says at a start that cannot succeed, and what it keeps to itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CELERY = str(Path(sys.executable).with_name("celery"))

LACKING = {"idempotency_store": "sqlite:///none.sqlite"}
UNUSABLE: tuple[tuple[dict[str, object], str], ...] = (
    ({}, "idempotency_store=None: set it to a store or its URL"),
    ({**LACKING}, "the table does not exist; create it with: "),
    ({**LACKING, "idempotency_relay": "often"}, "idempotency_relay='often'"),
    ({**LACKING, "result_serializer": "pickle"}, "result_serializer='pickle'"),
)
"""Settings, and what is said of them."""
BY_DAY = ((0, "0"), (1, "1"), (2, "2"))
BY_NIGHT = ((3, "0"), *((number, seed) for number in (1, 2) for seed in "0123" if (number, seed) not in BY_DAY))
"""Numbers of the settings, and seeds: between them, the classes of a worker's steps come in different orders."""

SHOP = """
from celery import Celery
app = Celery("shop", broker="memory://")
app.config_from_object({settings!r}, namespace={namespace!r})
{task}
"""
TASK = """
from celery_idempotent import IdempotentTask
@app.task(base=IdempotentTask, acks_late=True, reject_on_worker_lost=True)
def charge(): ...
"""


def run(folder: Path, *arguments: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run a command of the app in a folder; seeds change the order of a worker's steps."""
    command, environ = [CELERY, "-A", "shop", *arguments], {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("number", "seed"), [*BY_DAY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in BY_NIGHT)]
)
def test_worker_that_cannot_start_says_why_as_the_check_does(tmp_path: Path, number: int, seed: str) -> None:
    """In one line, and the same one, whichever step comes first: what one of them needs, another one has checked."""
    settings, told = UNUSABLE[number]
    (tmp_path / "shop.py").write_text(SHOP.format(settings=settings, namespace=None, task=TASK))
    worker, checked = run(tmp_path, "worker", "--pool=solo", seed=seed), run(tmp_path, "idempotency", "check")
    (line,) = [each for each in worker.stderr.splitlines() if each.startswith("Error: celery-idempotent: ")]
    assert (worker.returncode, told in line, "Traceback" in worker.stderr) == (1, True, False)
    assert (checked.returncode, checked.stderr) == (1, line.replace("celery-idempotent: ", "") + "\n")


@pytest.mark.parametrize(("task", "namespace"), [(TASK, "CELERY"), ("", "")], ids=["imported", "not imported"])
def test_report_hides_the_store(tmp_path: Path, namespace: str, task: str) -> None:
    """Under whatever namespace, and though nothing of the app has imported the library yet."""
    name = f"{namespace}_{'IDEMPOTENCY_STORE' if namespace.isupper() else 'idempotency_store'}".removeprefix("_")
    store = "redis://shop:s3cr3t@localhost:6379/0"
    text = SHOP.format(settings={name: store}, namespace=namespace or None, task=task)
    (tmp_path / "shop.py").write_text(text)
    report = run(tmp_path, "report").stdout
    assert (f"{name}: '********'" in report, "s3cr3t" in report) == (True, False)
