"""Statements of the SQL stores: records as rows, answers that no healthy database gives, and a library that fails."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymysql.converters import escape_bytes, escape_string
from sqlalchemy import Executable, create_engine

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import SCHEMA, Record
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores import forks
from celery_idempotent.stores.sql import SQLStore, statements
from celery_idempotent.stores.sql.drivers import is_dead
from celery_idempotent.stores.sql.schema import DIALECTS, KEY, outbox, records
from celery_idempotent.stores.sql.statement_store import StatementStore, Values
from celery_idempotent.stores.sql.statements import SERVER_NOW, Parameters, Reply, Statements, record_of, row_of
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
    """A loser that is shown what it expected was shown the past, as by a replica, which is not asked for ever."""
    past = replace(a_record(), revision="revision") if expected else None
    winner, new, postgresql = a_record(), a_record(), Statements(records, "postgresql", "s")
    asked, execute = database(lost(past), lost(past), lost(winner))
    assert postgresql.swap(execute, new, expected) == winner
    assert asked == [asked[0]] * 3

    asked, execute = database(lost(past))
    with pytest.raises(StoreUnavailable, match="replica"):
        postgresql.swap(execute, new, expected)
    assert len(asked) == 100
    asked, execute = database(lost(None))
    if expected:
        assert postgresql.swap(execute, new, expected) is None
        assert len(asked) == 1


def test_own_write_that_is_met_again_waits_for_the_standby() -> None:
    """On PostgreSQL a commit that was cut off in its wait is visible: it counts with another one behind it."""
    new = a_record()
    asked, execute = database(lost(new), Reply([], 1))
    assert Statements(records, "postgresql", "s").swap(execute, new, None) == new
    assert [each.get("expected") for each in asked] == [None, new.revision]


@pytest.mark.parametrize("dialect", ["mysql", "mariadb", "sqlite"])
def test_answer_from_before_the_race_repeats_write_and_look(dialect: str) -> None:
    """Where a swap takes two statements, both are repeated: the write may win now."""
    new, nothing = a_record(), Reply([], 0)
    asked, execute = database(nothing, nothing, Reply([], 1))
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
    assert written + len(str(Statements(records, "mysql", "s")._replace)) < statements.bytes_on_the_wire(values)


class FromDriver(Exception):
    """As psycopg says it; the library has put its own around it."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(f"code {sqlstate}")
        self.sqlstate = sqlstate


class FromLibrary(Exception):
    """As SQLAlchemy's, whose text shows statements."""


class Link:
    """A driver's connection."""


DEADLOCK, LOST, NO_TABLE = "40P01", "08006", "42P01"


class Scripted(StatementStore[Link]):
    """Answers by what is planned, in order; its time is known unless ``dialect`` is given."""

    wrapper = FromLibrary
    errors = (FromLibrary,)

    def __init__(self, *plan: str | Reply, dialect: str = "") -> None:
        super().__init__(DIALECTS[dialect or "postgresql"](), records, outbox)
        self.plan = list(plan)
        self.sent: list[tuple[Link, Values]] = []
        self.lent: list[str] = []
        if not dialect:
            self._clock.learn(1_000, self._clock.before_asking())

    def __repr__(self) -> str:
        return "scripted"

    @contextmanager
    def _connected(self, operation: str) -> Iterator[Link]:
        self.lent.append(operation)
        yield Link()

    def _run(self, connection: Link, text: str, values: Values, names: Sequence[str] | None) -> Reply:
        self.sent.append((connection, values))
        planned = self.plan.pop(0)
        if isinstance(planned, str):
            raise FromLibrary("INSERT 'secret'") from FromDriver(planned)
        return planned

    def _of_driver(self, connection: Link) -> Any:
        return connection

    def _undone(self, connection: Link, operation: str) -> AbstractContextManager[None]:
        return nullcontext()


WON = Reply([{"won": True}], 1)


def test_statement_that_the_database_has_undone_is_sent_again() -> None:
    """The very same, on a connection of its own, and the ninth deadlock in a row is no outage yet; the tenth is."""
    store, record = Scripted(*[DEADLOCK] * 9, WON), a_record()
    assert store.swap(record, None) == record
    assert len(store.lent) == len({id(connection) for connection, _ in store.sent}) == 10
    assert all(parameters == store.sent[0][1] for _, parameters in store.sent)
    given_up = Scripted(*[DEADLOCK] * 20)
    with pytest.raises(StoreUnavailable):
        given_up.swap(record, None)
    assert len(given_up.sent) == 10


@pytest.mark.parametrize(
    "ask",
    [lambda store: store.swap(a_record(), None), lambda store: list(store.scan()), lambda store: store.take(9, 9)],
)
@pytest.mark.parametrize(("code", "told"), [(LOST, StoreUnavailable), (NO_TABLE, StoreMisconfigured)])
def test_unanswered_statement_is_not_repeated(ask: Any, code: str, told: type[Exception]) -> None:
    """It may have been executed; whoever asked decides, and is told by the driver's error without the statement."""
    store = Scripted(code, code)
    with pytest.raises(StoreUnavailable) as raised:
        ask(store)
    assert (len(store.sent), type(raised.value), raised.value.store) == (1, told, "scripted")
    assert isinstance(raised.value.__cause__, FromDriver)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda store, link: store.swap_on(link, a_record(), None),
        lambda store, link: store.enqueue_on(link, OutboxMessage("id", "{}", "application/json")),
    ],
)
@pytest.mark.parametrize("code", [DEADLOCK, LOST, None])
def test_write_in_a_transaction_of_the_callers_is_sent_once_and_on_its_connection(write: Any, code: str | None) -> None:
    """On another it would count before the commit; what the database undid, it undid with all that was before."""
    store, link = Scripted(*([code] if code else []), WON), Link()
    if code:
        with pytest.raises(StoreUnavailable):
            write(store, link)
    else:
        write(store, link)
    assert [connection for connection, _ in store.sent] == [link]
    assert store.lent == []


def test_message_whose_number_is_another_ones_fails_its_transaction() -> None:
    """The same error is an answer to a claim; here it would lose the message without a word."""
    with pytest.raises(StoreUnavailable, match="number of another"):
        Scripted("1062").enqueue_on(Link(), OutboxMessage("id", "{}", "application/json"))


@pytest.mark.parametrize("reply", [{}, {"won": True}], ids=["asked", "learned from a swap"])
def test_time_costs_one_statement_at_most(reply: dict[str, Any]) -> None:
    """And none where a reply has told it before."""
    store = Scripted(Reply([{**reply, SERVER_NOW: 5_000_000}], 0), dialect="postgresql")
    if reply:
        store.swap(a_record(), None)
    assert [abs(store.now() - 5_000_000) < 60_000 for _ in range(2)] == [True, True]
    assert len(store.sent) == 1


@pytest.mark.parametrize(
    "driver",
    [
        lambda link: SimpleNamespace(_sock=link, open=True),  # PyMySQL
        lambda link: SimpleNamespace(_usock=link, _sock=object()),  # pg8000
        lambda link: SimpleNamespace(fileno=link.fileno, closed=False),  # psycopg
    ],
)
def test_connection_is_dead_once_the_other_side_has_closed_it(driver: Callable[[Any], Any]) -> None:
    """Whatever it said before; as long as it has not, unread bytes mean nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"terminating connection due to administrator command")
        assert not is_dead(driver(ours))
        theirs.close()
        assert is_dead(driver(ours))
    assert is_dead(SimpleNamespace(closed=True))
    assert is_dead(SimpleNamespace(open=False))


def test_connections_from_before_a_fork_are_left_to_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child opens its own, at its first use, and what it inherits is kept: nobody closes it, nor the collector."""
    url = f"sqlite:///{tmp_path}/records.sqlite"
    engine = create_engine(url)
    given, own = SQLStore(engine), SQLStore(url)
    own.provision()
    given.get("k")
    pool, inherited = engine.pool, own._pool()
    monkeypatch.setattr("os.getpid", lambda: -1)
    record = a_record()
    assert given.swap(record, None) == record
    assert engine.pool is not pool
    assert forks.inherited.pop() is pool
    assert own._pool() is not inherited
    own.close()
    for each in (engine, inherited, pool):
        each.dispose()
