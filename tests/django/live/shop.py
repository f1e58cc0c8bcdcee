"""Starts processes of the shop, tied to this one, on a database and a broker of their own."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import tether
from tests.django.databases import Settings

__all__ = ["Shop"]


@dataclass(frozen=True)
class Shop:
    """Where the shop's processes find their database and their broker, and where they write their log.

    Args:
        database: What stands in DATABASES.
        broker: The URL of a Redis.
        queue: The queue of this shop alone.
        folder: For its logs.
    """

    database: Settings
    broker: str
    queue: str
    folder: Path

    @contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """``python -m module arguments...`` with the shop's settings, until the end of the block."""
        with self.log.open("ab") as log:
            process = tether.start(module, *arguments, log=log, env=self._environment())
        try:
            yield process
        finally:
            tether.stop(process)

    @property
    def log(self) -> Path:
        """What all processes have said."""
        return self.folder / "log"

    def said(self) -> str:
        """The same, read."""
        return self.log.read_text()

    def _environment(self) -> Mapping[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "tests.django.project.settings",
            "SHOP_DATABASE": json.dumps(dict(self.database)),
            "SHOP_BROKER": self.broker,
            "SHOP_QUEUE": self.queue,
        }
