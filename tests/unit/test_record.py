"""What a record is, before any store has touched it."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import BLANK, Record, bounded, keepable, marked, message_of, trace_of
from celery_idempotent.testing.contract import a_record

BARE = BLANK.but(key="k", revision="r")
NEEDED = {each.name for each in fields(Record) if each.default is MISSING and each.default_factory is MISSING}


@pytest.mark.parametrize("record", [BARE, replace(a_record(), steps={"a": {"at": 1}}, result=b"\xff", takeovers=2)])
def test_record_is_read_as_it_was_written(record: Record) -> None:
    """A record is paid for by its size: fields that say nothing are not written, and mean the same when absent."""
    assert Record.from_fields(record.to_fields(), store="here") == record
    assert BARE.to_fields().keys() == NEEDED - {"fingerprint"} | {"schema"}


@pytest.mark.parametrize("field", sorted(NEEDED - {"fingerprint"}))
def test_field_that_is_missing_is_named(field: str) -> None:
    """What follows from a record counts on it; somebody has taken it away."""
    written = a_record().to_fields()
    del written[field]
    with pytest.raises(StoreMisconfigured, match=f"KeyError: '{field}'"):
        Record.from_fields(written, store="here")


@pytest.mark.parametrize("field", ["fencing_token", "lease_until", "attempts", "takeovers", "updated_at"])
def test_number_that_no_store_could_hold_with_one_more_is_refused(field: str) -> None:
    """The next claim adds one, and every store has 64 bits."""
    most = 2**63 - 2
    assert getattr(Record.from_fields({**a_record().to_fields(), field: most}, store="here"), field) == most
    for number in (-1, most + 1):
        with pytest.raises(StoreMisconfigured, match=f"{field} is {number}"):
            Record.from_fields({**a_record().to_fields(), field: number}, store="here")


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"key": ""}, "empty"), ({"revision": ""}, "empty"), ({"expires_at": 5}, "expires"), ({"schema": 2}, "schema 2")],
)
def test_what_cannot_have_been_written_is_refused(changes: dict[str, Any], named: str) -> None:
    """Only outcomes expire; what has no schema is no record, and a newer version knows more."""
    written = a_record().to_fields()
    with pytest.raises(StoreMisconfigured, match=named):
        Record.from_fields({**written, **changes}, store="here")
    with pytest.raises(StoreMisconfigured, match="its schema cannot be read"):
        Record.from_fields({each: written[each] for each in written if each != "schema"}, store="here")


def test_change_is_that_of_a_dataclass() -> None:
    """``but`` is a faster ``replace``, and no way to give a record what it has no place for."""
    record = a_record()
    assert record.but(owner="me", attempts=7) == replace(record, owner="me", attempts=7)
    with pytest.raises(TypeError, match="no field 'onwer'"):
        record.but(onwer="me")


@given(st.text(st.characters(), max_size=300))
@example("x" * 255)
@example("x" * 256)
@example("\ud800" * 255)
@example(f"{'x' * 238}…short")
def test_name_is_kept_as_every_store_can_hold_it(name: str) -> None:
    """Unchanged where that is possible; else it stays different from others, and is taken for no message's id."""
    kept = bounded(name)
    is_whole = kept == name
    assert is_whole == (len(name) <= 255 and keepable(name) == name)
    assert kept.encode().decode() == kept == bounded(kept)
    assert "\0" not in kept
    assert len(kept) <= 255
    assert message_of(BARE.but(task_id=kept)) == (name if is_whole else "")
    assert keepable(name) == name or kept != bounded(keepable(name))


def test_a_trace_is_that_of_the_owner_or_none() -> None:
    """A worker that does not know the field claims without it, and in an SQL row an earlier owner's stays."""
    told = replace(a_record(), owner="1" * 32, trace=marked("00-1-2-01", "1" * 32))
    assert [trace_of(each) for each in (told, replace(told, owner="2" * 32), replace(told, trace=""))] == [
        *("00-1-2-01", "", "")
    ]
