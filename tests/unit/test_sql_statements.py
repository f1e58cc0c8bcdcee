"""Records as rows and back, and what a swap makes of answers that no healthy database gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymysql.converters import escape_bytes, escape_string
from sqlalchemy import Executable

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import SCHEMA, Record
from celery_idempotent.stores.sql.schema import DIALECTS, KEY, records
from celery_idempotent.stores.sql.statements import (
    DuplicateKey,
    Parameters,
    Reply,
    Statements,
    bytes_on_the_wire,
    record_of,
    row_of,
)
from celery_idempotent.testing.contract import a_record

ANY_TEXT = st.text(st.characters(exclude_categories=[]))


def row(record: Record, **changes: Any) -> dict[str, Any]:
    """The row that a database would return."""
    written = {name.removeprefix("new_"): value for name, value in row_of(record).items()}
    return {KEY: record.key, **written, **changes}


def database(*answers: Reply | Exception) -> tuple[list[Parameters], Callable[[Executable, Parameters], Reply]]:
    """What was asked, and what answers it: the given answers in order, the last one for ever."""
    asked: list[Parameters] = []

    def execute(statement: Executable, parameters: Parameters, /) -> Reply:
        asked.append(parameters)
        answer = answers[min(len(asked), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked, execute


def lost(record: Record | None) -> Reply:
    """PostgreSQL's answer to a swap that did not win."""
    return Reply([{"won": False, **(row(record) if record else {KEY: None})}], 0)


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_can_be_stored_and_comes_back(text: str, other: str) -> None:
    """NUL and lone surrogates included; what reaches the database is text that each of them holds."""
    record = replace(a_record(), task=text, task_id=other, worker=text, error=other, result=text, content_type=other)
    stored = row(record)

    for value in stored.values():
        if isinstance(value, str):
            value.encode()
            assert "\0" not in value
    assert record_of(stored, store="s") == record
    assert (stored["task"] == stored["error"]) is (text == other)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_keys_that_differ_are_stored_differently(dialect: str) -> None:
    """Even where one of them is what another is turned into."""
    keys = ["k\0", "k\x1b0000", "k\x1b001b0000", "k\ud800", "k\x1bd800", "k"]
    asked, execute = database(lost(a_record()))
    for key in keys:
        Statements(records, dialect, "s").delete(execute, key, "r")

    assert len({each["key"] for each in asked}) == len(keys)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_kept_as_bytes_however_the_driver_gives_them(kind: Callable[[bytes], Any]) -> None:
    """Some drivers return memoryviews, and some return what was text as bytes."""
    record = replace(a_record(), result=b"\0\xff", content_type="x/y")
    assert record_of(row(record, result_bytes=kind(b"\0\xff"), **{KEY: kind(record.key.encode())}), store="s") == record


def test_row_that_cannot_be_read_is_refused() -> None:
    """Steps that were forgotten would be done again; the version counts before anything that it could have changed."""
    with pytest.raises(StoreMisconfigured, match="damaged"):
        record_of(row(a_record(), steps="{"), store="s")
    with pytest.raises(StoreMisconfigured, match="upgrade"):
        record_of(row(replace(a_record(), schema=SCHEMA + 1), steps="not JSON at all"), store="s")


@pytest.mark.parametrize("expected", [None, "revision"])
def test_answer_from_before_the_race_is_asked_again(expected: str | None) -> None:
    """A loser that is shown what it expected was shown the past: had it been there, the swap would have won.

    Reads from a replica would loop for ever; nothing where a revision was expected can be so, and is the answer.
    """
    past = replace(a_record(), revision="revision") if expected else None
    winner, new, statements = a_record(), a_record(), Statements(records, "postgresql", "s")
    asked, execute = database(lost(past), lost(past), lost(winner))
    assert statements.swap(execute, new, expected) == winner
    assert asked == [asked[0]] * 3

    asked, execute = database(lost(past))
    with pytest.raises(StoreUnavailable, match="replica"):
        statements.swap(execute, new, expected)
    assert len(asked) == 100
    asked, execute = database(lost(None))
    if expected:
        assert statements.swap(execute, new, expected) is None
        assert len(asked) == 1


@pytest.mark.parametrize("dialect", ["mysql", "mariadb", "sqlite"])
def test_answer_from_before_the_race_repeats_write_and_look(dialect: str) -> None:
    """Where a swap takes two statements, both are repeated: the write may win now."""
    new, nothing = a_record(), Reply([], 0)
    asked, execute = database(DuplicateKey() if dialect != "sqlite" else nothing, nothing, Reply([], 1))

    assert Statements(records, dialect, "s").swap(execute, new, None) == new
    assert len(asked) == 3


@given(st.text(), st.binary())
def test_size_on_the_wire_is_never_underestimated(text: str, data: bytes) -> None:
    """MySQL's drivers write values into the statement and escape them there."""
    values = {**row_of(replace(a_record(), error=text, result=data, content_type="x/y")), "key": data}
    written = sum(
        len(escape_string(each).encode()) if isinstance(each, str) else len(escape_bytes(each))
        for each in values.values()
        if isinstance(each, str | bytes)
    )

    assert written + len(str(Statements(records, "mysql", "s")._replace)) < bytes_on_the_wire(values)
