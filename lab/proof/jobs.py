"""Campaigns run in processes of their own: fresh interpreters, so that they may fork and be patched freely.

A worker process is ``python -m <module> <job as JSON>``; it writes one JSON object per line. It ends by
itself when nobody reads it any more.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

Progress = Callable[[int], None]
"""Called with the number of tasks done since the last call."""

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
"""What every server that imitates AWS accepts."""

_ROOT = Path(__file__).parent.parent.parent


def fan_out(module: str, common: Mapping[str, Any], processes: int) -> Iterator[dict[str, Any]]:
    """What ``processes`` workers of ``module`` report, as it comes; each gets ``share`` and ``of`` in its job."""
    reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read(worker: "subprocess.Popen[str]") -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            reports.put(json.loads(line))
        reports.put(None)

    with ExitStack() as stack:
        workers = []
        for share in range(processes):
            given = json.dumps({**common, "share": share, "of": processes})
            worker = subprocess.Popen(
                [sys.executable, "-m", module, given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env={**os.environ, **CREDENTIALS},
            )
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
            threading.Thread(target=read, args=(worker,), daemon=True).start()
        for _ in workers:
            yield from iter(reports.get, None)
        failed = [worker.args for worker in workers if worker.wait()]
        if failed:
            raise RuntimeError(f"workers failed: {failed}")


def job() -> dict[str, Any]:
    """In a worker process: what it is to do. Outages are what is wanted there, and nobody reads their log."""
    logging.getLogger("celery_idempotent").setLevel(logging.CRITICAL)
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def report(found: Mapping[str, Any]) -> None:
    """In a worker process: tell something to whoever started it; end if that has gone."""
    try:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)
