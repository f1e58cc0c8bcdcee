"""The rule of compatibility.md: the previous version reads what this one writes, and this one what it has written.

`previous_version.json` is what `python -m tests.support.wire_names` says of the previous version; an integration test
holds it against that version itself.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import Record
from celery_idempotent.protocol.record import SCHEMA
from celery_idempotent.stores.sql.schema import records
from tests.support.wire_names import NEEDED, described

BEFORE: dict[str, Any] = json.loads(Path(__file__).with_name("previous_version.json").read_text())
NOW = described()
LEAST: dict[str, Any] = {
    "key": "shop:1:0",
    "status": "COMPLETED",
    "revision": "1",
    "owner": "2",
    "fencing_token": 3,
    "lease_until": 4,
    "attempts": 1,
    "created_at": 5,
    "updated_at": 6,
    "task": "charge",
    "task_id": "t-1",
    "worker": "worker@host",
    "schema": BEFORE["schema"],
}
"""The least that the previous version has written."""


def test_schema_is_the_previous_one() -> None:
    """A higher one is refused by every worker of the previous version; it takes two releases: compatibility.md."""
    assert BEFORE["schema"] == SCHEMA


@pytest.mark.parametrize("part", ["fields", "attributes", "columns", "headers"])
def test_nothing_is_removed_renamed_or_retyped(part: str) -> None:
    """Whatever the previous version reads is written as before."""
    assert {name: NOW[part].get(name) for name in BEFORE[part]} == BEFORE[part]


def test_there_is_no_new_status() -> None:
    """The previous version calls a record damaged whose status it does not know."""
    assert NOW["statuses"] == BEFORE["statuses"]


def test_new_fields_have_defaults_that_are_not_written() -> None:
    """Where a record says nothing by them, it is the record of the previous version."""
    added = {name: default for name, (_, default) in NOW["fields"].items() if name not in BEFORE["fields"]}
    assert NEEDED not in added.values()
    read = Record.from_fields(LEAST, store="a store")
    assert {name: getattr(read, name) for name in added} == added
    assert read.to_fields().keys() <= BEFORE["fields"].keys()


def test_new_columns_may_be_absent_from_an_insert() -> None:
    """The previous version gives them no value, and does not touch them when it writes the row again."""
    added = [each for each in records.columns if each.name not in BEFORE["columns"]]
    assert [each.name for each in added if not (each.nullable or each.server_default is not None)] == []


def test_no_two_fields_share_an_attribute() -> None:
    """Nor a new one the name of an old one."""
    assert len(set(NOW["attributes"].values())) == len(NOW["attributes"])
