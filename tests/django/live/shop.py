"""Starts processes of the shop, tied to this one, on a database and a broker of their own."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lab import tether
from tests.django.databases import Settings

__all__ = ["Shop"]


class Shop(NamedTuple):
    """What stands in DATABASES, the URL of a Redis, the queue of this shop alone, and where its log is."""

    database: Settings
    broker: str
    queue: str
    folder: Path

    @contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """``python -m module arguments...`` with the shop's settings, until the end of the block."""
        environment = {
            "DJANGO_SETTINGS_MODULE": "tests.django.project.settings",
            "SHOP_DATABASE": json.dumps(dict(self.database)),
            "SHOP_BROKER": self.broker,
            "SHOP_QUEUE": self.queue,
        }
        with (self.folder / "log").open("ab") as log:
            process = tether.start(module, *arguments, log=log, env=environment)
        try:
            yield process
        finally:
            tether.stop(process)

    def said(self) -> str:
        """What all processes have said."""
        return (self.folder / "log").read_text()
