"""The whole example in one command: `python -m example_project.run`.

Starts a real worker, publishes some orders, each of them twice, and shows what every message got back. Unless
EXAMPLE_BROKER_URL and EXAMPLE_STORE_URL name others, it emulates SQS and DynamoDB on this machine meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from celery.result import AsyncResult

from celery_idempotent import open_store
from example_project.app import STORE_URL, app
from example_project.tasks import charge, reserve_stock, send_receipt

ORDERS = 3
PATIENCE = 60.0  # seconds for the first result


def main() -> int:
    """Run it; the exit status is 0 if every pair of messages got one result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the worker is stopped then, too
    with ExitStack() as stack:
        try:
            stack.enter_context(servers())
        except RuntimeError as error:  # a package is missing, or the port is taken: perhaps by this very example
            sys.exit(f"{error}\n(Or name a broker and a store: EXAMPLE_BROKER_URL and EXAMPLE_STORE_URL.)")
        open_store(STORE_URL).provision()  # as `celery -A example_project.app idempotency provision` does
        # Nothing but this command needs results. Files will do, as the worker runs on the same machine.
        results = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}"
        app.conf.result_backend = results
        stack.enter_context(worker(results))
        print(f"{ORDERS} orders, 3 tasks each, every message published twice. The worker's effects:\n", flush=True)
        shown = show(publish_twice())
    return 0 if shown else 1


def servers() -> AbstractContextManager[object]:
    """SQS and DynamoDB on this machine, unless both are elsewhere."""
    if {"EXAMPLE_BROKER_URL", "EXAMPLE_STORE_URL"} <= os.environ.keys():
        return nullcontext()
    from lab.embedded import EmbeddedAws

    return EmbeddedAws(4577)


@contextmanager
def worker(results: str) -> Iterator[None]:
    """A worker in processes of its own, as `celery -A example_project.app worker` starts it."""
    celery = [sys.executable, "-m", "celery", "-A", "example_project.app", "--result-backend", results, "--quiet"]
    process = subprocess.Popen([*celery, "worker", "--concurrency", "2", "--loglevel", "WARNING"])
    try:
        yield
    finally:
        process.terminate()  # it finishes what it is at
        process.wait()


def publish_twice() -> dict[str, list[AsyncResult]]:
    """Publish everything twice; by operation, what the two messages will get."""
    published = {}
    series = uuid.uuid4().hex[:4]  # a store that outlives this command knows the orders of the last time
    for number in range(1, ORDERS + 1):
        order = f"{series}-{number}"
        published[f"charge {order}"] = [charge.delay({"id": order, "cents": 990 * number}) for _ in range(2)]
        published[f"stock {order}"] = [reserve_stock.delay(order, "teapot", number) for _ in range(2)]
        # Not even written the same way: their key says that they mean the same.
        published[f"receipt {order}"] = [
            send_receipt.delay(order, each) for each in ("ann@example.com", " Ann@example.com")
        ]
    return published


def show(published: dict[str, list[AsyncResult]]) -> bool:
    """Print what every message got; whether each pair had one effect."""
    results = {
        name: [message.get(timeout=PATIENCE, propagate=False) for message in pair] for name, pair in published.items()
    }
    print(f"\n{'operation':<16} {'first message':<14} {'second message':<14}")
    effects: set[str] = set()
    for name, got in results.items():
        first, second = (type(each).__name__ if isinstance(each, Exception) else each for each in got)
        made = {each for each in got if not isinstance(each, Exception)}
        print(f"{name:<16} {first:<14} {second:<14} {'one effect' if len(made) == 1 else f'{len(made)} EFFECTS'}")
        effects |= made
    print(f"\n{2 * len(results)} messages, {len(effects)} effects.")
    return len(effects) == len(results)


if __name__ == "__main__":
    sys.exit(main())
