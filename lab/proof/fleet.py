"""Campaigns run in processes of their own: fresh interpreters, so that they may fork and be patched freely.

A worker process is ``python -m <module> <job as JSON>``; it writes one JSON object per line. It ends by
itself when nobody reads it any more.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["CREDENTIALS", "Progress", "fan_out", "job", "report"]

Progress = Callable[[int], None]
"""Called with the number of tasks done since the last call."""

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
"""What every server that imitates AWS accepts."""

_ROOT = Path(__file__).parent.parent.parent


def fan_out(module: str, common: Mapping[str, Any], processes: int) -> Iterator[dict[str, Any]]:
    """What ``processes`` workers of ``module`` report, as it comes; each gets ``share`` and ``of`` in its job.

    Raises:
        RuntimeError: A worker failed.
    """
    reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    with ExitStack() as stack:
        workers = []
        for share in range(processes):
            worker = _start(module, {**common, "share": share, "of": processes})
            stack.callback(_stop, worker)
            workers.append(worker)
            threading.Thread(target=_read, args=(worker, reports), daemon=True).start()
        for _ in workers:
            yield from iter(reports.get, None)
        failed = [worker.args for worker in workers if worker.wait()]
        if failed:
            raise RuntimeError(f"workers failed: {failed}")


def job() -> dict[str, Any]:
    """In a worker process: what it is to do."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def report(found: Mapping[str, Any]) -> None:
    """In a worker process: tell something to whoever started it; end if that has gone."""
    try:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


def _start(module: str, given: Mapping[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(given)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, **CREDENTIALS},
    )


def _read(worker: subprocess.Popen[str], reports: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        reports.put(json.loads(line))
    reports.put(None)


def _stop(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    assert worker.stdout is not None
    worker.stdout.close()
