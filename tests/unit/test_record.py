"""What a record is, before any store has touched it."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import Record, Status, bounded, keepable, marked, message_of, trace_of
from celery_idempotent.testing.contract import a_record

BARE = Record(
    key="k",
    status=Status.IN_PROGRESS,
    revision="r",
    owner="",
    fencing_token=1,
    lease_until=0,
    fingerprint=None,
    attempts=0,
    created_at=0,
    updated_at=0,
    task="",
    task_id="",
    worker="",
)
NEEDED = {each.name for each in fields(Record) if each.default is MISSING and each.default_factory is MISSING}


def _read(values: dict[str, Any]) -> Record:
    return Record.from_fields(values, store="here")


@pytest.mark.parametrize("record", [BARE, replace(a_record(), steps={"a": {"at": 1}}, result=b"\xff", takeovers=2)])
def test_record_is_read_as_it_was_written(record: Record) -> None:
    """Fields that say nothing are not written, and mean the same when they are not there."""
    assert _read(record.to_fields()) == record


def test_what_says_nothing_is_not_written() -> None:
    """A record is paid for by its size, and read by people."""
    assert BARE.to_fields().keys() == NEEDED - {"fingerprint"} | {"schema"}


@pytest.mark.parametrize("field", sorted(NEEDED - {"fingerprint"}))
def test_field_that_is_missing_is_named(field: str) -> None:
    """What follows from a record counts on it; somebody has taken it away."""
    written = a_record().to_fields()
    del written[field]
    with pytest.raises(StoreMisconfigured, match=rf"is damaged: KeyError: '{field}'"):
        _read(written)


@pytest.mark.parametrize("field", ["fencing_token", "lease_until", "attempts", "takeovers", "updated_at"])
def test_number_that_no_store_could_hold_with_one_more_is_refused(field: str) -> None:
    """The next claim adds one, and every store has 64 bits."""
    most = 2**63 - 2
    assert getattr(_read({**a_record().to_fields(), field: most}), field) == most
    for number in (-1, most + 1):
        with pytest.raises(StoreMisconfigured, match=f"{field} is {number}"):
            _read({**a_record().to_fields(), field: number})


def test_change_is_that_of_a_dataclass() -> None:
    """``but`` is a faster ``replace``, and no way to give a record what it has no place for."""
    record = a_record()
    assert record.but(owner="me", attempts=7) == replace(record, owner="me", attempts=7)
    with pytest.raises(TypeError, match="no field 'onwer'"):
        record.but(onwer="me")


def test_longest_name_is_kept_whole() -> None:
    """One character more, and it is cut to as many, and not taken for the id of a message."""
    whole, cut = "x" * 255, bounded("x" * 256)
    assert bounded(whole) == whole
    assert len(cut) == 255
    assert [message_of(BARE.but(task_id=each)) for each in (whole, cut)] == [whole, ""]


@pytest.mark.parametrize("name", ["Zoë \ud83d", "\udcff", "a\0b", "\ud800" * 255, "\ud83d" + "x" * 300])
def test_name_that_a_store_could_not_hold_is_kept_readable(name: str) -> None:
    """As any JSON body can bring it; it stays different from others, and is not taken for the id of a message."""
    kept = bounded(name)

    assert kept.encode().decode() == kept
    assert "\0" not in kept
    assert len(kept) <= 255
    assert kept == bounded(kept) != bounded(keepable(name))
    assert message_of(BARE.but(task_id=kept)) == ""


@pytest.mark.parametrize("name", ["", "orders.charge", "Zoë 💥", "a\nb", "\x1b"])
def test_name_that_every_store_can_hold_is_kept_as_it_is(name: str) -> None:
    """Whatever a terminal would make of it."""
    assert bounded(name) == name


def test_name_with_the_mark_of_a_cut_is_one_that_was_not_cut() -> None:
    """Only together with a hash does it tell."""
    name = f"{'x' * 238}…short"
    assert message_of(BARE.but(task_id=name)) == name


def test_a_trace_is_that_of_the_owner_or_none() -> None:
    """A worker that does not know the field claims without it, and in an SQL row an earlier owner's stays."""
    told = replace(a_record(), owner="1" * 32, trace=marked("00-1-2-01", "1" * 32))
    assert trace_of(told) == "00-1-2-01"
    assert trace_of(replace(told, owner="2" * 32)) == ""
    assert trace_of(replace(told, trace="")) == ""
