"""Publishes half of the soak's load under `publish="once"`, each operation as often as it is planned.

`python -m lab.proof.soak_publisher MINUTES SEED STORE STARTED`, configured by the environment of `lab.demo.settings`.
It may be killed at any moment, and between what it records and its message if `doom_file` says so. The next one
publishes again what this one has not told the ledger.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from celery.signals import before_task_publish

from lab.ledger import Row
from lab.proof.soak import plan
from lab.proof.soak_app import app, ledger, settings
from lab.proof.soak_settings import doom_file


def main(minutes: float, seed: int, store: str, started: float) -> None:
    """Publish what has not been published, each at its time."""
    published = {row.reference for row in ledger.rows() if row.what == "published"}
    for number, each in enumerate(plan(minutes, seed, store).published_once):
        if str(number) not in published:
            time.sleep(max(0.0, started + each.at - time.time()))
            app.tasks[each.task_name].apply_async(kwargs=each.arguments)
            ledger.append(Row(what="published", order=each.operation, reference=str(number)))
    signal.pause()  # until it is stopped: whoever ends is started again


@before_task_publish.connect
def dies(**_: Any) -> None:
    if doom_file(settings.folder).exists():
        doom_file(settings.folder).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
