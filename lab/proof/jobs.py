"""Campaigns run in processes of their own: fresh interpreters, so that they may fork and be patched freely."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing import connection, get_context
from typing import Any, cast

Progress = Callable[[Any], None]
"""Called with the number of tasks done since the last call, or with news in one line."""

Report = Callable[[Any], None]
"""Called in a worker process, with what is for whoever started it."""

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def fan_out(work: Callable[..., None], processes: int, **given: Any) -> Iterator[Any]:
    """What ``work(report, share, processes, **given)`` reports in each of so many processes, as it comes."""
    fresh = get_context("spawn")
    workers: list[Any] = []
    readers: list[Any] = []
    with ExitStack() as stack:
        for share in range(processes):
            reader, writer = fresh.Pipe(duplex=False)
            worker = fresh.Process(target=_work, args=(work, writer, share, processes), kwargs=given, daemon=True)
            worker.start()
            stack.callback(worker.kill)
            writer.close()
            readers.append(stack.enter_context(reader))
            workers.append(worker)
        while readers:
            for ready in cast("list[Any]", connection.wait(readers)):
                try:
                    yield ready.recv()
                except EOFError:
                    readers.remove(ready)
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError(f"workers failed: {workers}")


def _work(work: Callable[..., None], writer: "connection.Connection[Any, Any]", *share: int, **given: Any) -> None:
    logging.getLogger("celery_idempotent").setLevel(logging.CRITICAL)  # outages are what is wanted here
    os.environ.update(CREDENTIALS)
    with suppress(BrokenPipeError):  # whoever started it has gone
        work(writer.send, *share, **given)
