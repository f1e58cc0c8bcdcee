"""SQS and DynamoDB on this machine, without Docker: `with EmbeddedAws() as aws: aws.endpoint`.

MiniStack serves both over HTTP from one process on one port. It was chosen over moto because its conditional
writes are atomic and because, like SQS, it does not delete a message on an expired receipt handle: a server
that is kinder than AWS would hide the duplicates this project is about.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from types import TracebackType
from typing import Self

from example_project import tether

REGION = "us-east-1"
HOST = "127.0.0.1"
START_TIMEOUT = 60.0
PORT_ATTEMPTS = 5


class EmbeddedAws:
    """A private SQS and DynamoDB that lives as long as the `with` block, and never longer than this process.

    `port` is chosen by the system unless given. The state is in memory: every instance starts empty.
    """

    def __init__(self, port: int | None = None) -> None:
        self._wanted_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._name = uuid.uuid4().hex
        self.port = port or 0

    @property
    def endpoint(self) -> str:
        """The address for boto3's `endpoint_url`."""
        return f"http://{HOST}:{self.port}"

    @property
    def broker_url(self) -> str:
        """The address for Celery's `broker_url`; the transport also needs `region` and `is_secure=False`."""
        return f"sqs://test:test@{HOST}:{self.port}//"

    def store_url(self, table: str) -> str:
        """The address of `table` for Celery's `idempotency_store`."""
        return f"dynamodb://test:test@{HOST}:{self.port}/{table}?region={REGION}"

    def __enter__(self) -> Self:
        for _ in range(PORT_ATTEMPTS if self._wanted_port is None else 1):
            self.port = self._wanted_port or _free_port()
            self._process = self._launch()
            try:
                if self._becomes_healthy(self._process):
                    return self
            except BaseException:
                self.stop()
                raise
            self.stop()
        raise RuntimeError(f"MiniStack did not start on {self.endpoint}; is the port taken?")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server; harmless when it is not running."""
        if self._process is not None:
            tether.stop(self._process)
            self._process = None

    def _launch(self) -> subprocess.Popen[bytes]:
        return tether.start(
            "ministack",
            env={
                "GATEWAY_PORT": str(self.port),
                "BIND_HOST": HOST,  # its default is every interface
                "SERVICES": "dynamodb,sqs",
                "LOG_LEVEL": "WARNING",
                "MINISTACK_EDITION": self._name,  # its health page shows this: proof that the answer is ours
                "PERSIST_STATE": "0",
                "USE_SSL": "0",
                "TMPDIR": tempfile.gettempdir(),
                "DOCKER_HOST": "unix:///nonexistent",  # it removes its own old containers otherwise
            },
        )

    def _becomes_healthy(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and process.poll() is None:
            if self._name == _edition(f"{self.endpoint}/_ministack/health"):
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        return False


def _edition(health_page: str) -> str | None:
    try:
        with urllib.request.urlopen(health_page, timeout=5) as reply:  # noqa: S310 - the address is our own
            return str(json.load(reply)["edition"])
    except (OSError, ValueError, KeyError):
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
