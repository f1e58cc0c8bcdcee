"""A store by statements over a library that fails when it is told to: what is sent again, on what, and what is not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge
from celery_idempotent.stores.sql.schema import DIALECTS, outbox, records
from celery_idempotent.stores.sql.statement_store import StatementStore, Values
from celery_idempotent.stores.sql.statements import SERVER_NOW, Reply
from celery_idempotent.testing.contract import a_record


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
    """Answers by what is planned, in order, and by what it is told of the table afterwards."""

    wrapper = FromLibrary
    errors = (FromLibrary,)

    def __init__(self, *plan: str | Reply, dialect: str = "postgresql") -> None:
        super().__init__(DIALECTS[dialect](), records, outbox)
        self.plan = list(plan)
        self.sent: list[tuple[Link, Values]] = []
        self.lent: list[str] = []
        self.undone = 0

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
        @contextmanager
        def transaction() -> Iterator[None]:
            try:
                yield
            finally:
                self.undone += 1

        return transaction()


WON = Reply([{"won": True}], 0)
NOTHING = Reply([], 0)


def greeting(largest: int) -> Reply:
    """What MySQL says to a new connection."""
    return Reply([{SERVER_NOW: 1_000, "max_allowed_packet": largest}], 0)


def test_statement_that_the_database_has_undone_is_sent_again() -> None:
    """The very same, on a connection of its own, and the ninth deadlock in a row is no outage yet."""
    store, record = Scripted(*[DEADLOCK] * 9, WON), a_record()

    assert store.swap(record, None) == record

    assert len(store.sent) == len(store.lent) == 10
    assert len({id(connection) for connection, _ in store.sent}) == 10
    assert all(parameters == store.sent[0][1] for _, parameters in store.sent)


def test_statement_that_is_undone_again_and_again_is_an_outage() -> None:
    """After ten times; nobody waits for ever."""
    store = Scripted(*[DEADLOCK] * 20)

    with pytest.raises(StoreUnavailable):
        store.swap(a_record(), None)

    assert len(store.sent) == 10


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.swap(a_record(), None),
        lambda store: store.swap(a_record(), "r"),
        lambda store: store.get("k"),
        lambda store: store.delete("k", "r"),
        lambda store: store.purge(10),
        lambda store: list(store.scan()),
        lambda store: store.take(10, 1_000),
        lambda store: store.forget([1]),
        lambda store: store.waiting(10),
    ],
)
@pytest.mark.parametrize(("code", "told"), [(LOST, StoreUnavailable), (NO_TABLE, StoreMisconfigured)])
def test_statement_without_an_answer_is_not_sent_again(
    ask: Callable[[Scripted], object], code: str, told: type[Exception]
) -> None:
    """It may have been executed; whoever asked decides, and is told by the driver's error without the statement."""
    store = Scripted(code, code)
    store._clock.learn(1_000, store._clock.before_asking())

    with pytest.raises(StoreUnavailable) as raised:
        ask(store)

    assert len(store.sent) == 1
    assert type(raised.value) is told
    assert raised.value.store == "scripted"
    assert isinstance(raised.value.__cause__, FromDriver)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda store, link: store.swap_on(link, a_record(), None),
        lambda store, link: store.enqueue_on(link, OutboxMessage("id", "{}", "application/json")),
    ],
)
@pytest.mark.parametrize("code", [DEADLOCK, LOST])
def test_nothing_is_sent_again_within_a_transaction_of_the_callers(
    write: Callable[[Scripted, Link], object], code: str
) -> None:
    """The database has undone all of it, and what the caller did before would be missing."""
    store, link = Scripted(code, WON), Link()
    store._clock.learn(1_000, store._clock.before_asking())

    with pytest.raises(StoreUnavailable):
        write(store, link)

    assert [connection for connection, _ in store.sent] == [link]
    assert store.lent == []


def test_write_within_a_transaction_of_the_callers_is_made_on_its_connection() -> None:
    """On another it would count before the commit, or without it."""
    store, link, record = Scripted(WON), Link(), a_record()

    assert store.swap_on(link, record, None) == record

    assert [connection for connection, _ in store.sent] == [link]
    assert store.lent == []


@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
def test_what_mysql_would_hang_up_at_is_not_sent(dialect: str) -> None:
    """It would look like a lost connection, after which the record may be written; so it is certain that it is not."""
    store = Scripted(greeting(10_000), dialect=dialect)

    with pytest.raises(RecordTooLarge, match="10000 bytes"):
        store.swap(replace(a_record(), result="x" * 10_000), None)

    assert [values for _, values in store.sent] == [()]


def test_mysql_is_asked_once_for_each_connection() -> None:
    """A pooler, or a changed setting, gives the next one another limit."""
    store, link, record = Scripted(greeting(10**6), Reply([], 1), Reply([], 1), dialect="mysql"), Link(), a_record()

    assert store.swap_on(link, record, None) == record
    assert store.swap_on(link, replace(record, revision="r"), record.revision) is not None

    assert [bool(parameters) for _, parameters in store.sent] == [False, True, True]
    store.plan = [greeting(1)]
    with pytest.raises(RecordTooLarge):
        store.swap_on(Link(), record, None)


@pytest.mark.parametrize("reply", [{}, {"won": True}], ids=["asked", "learned from a swap"])
def test_time_costs_one_statement_at_most(reply: dict[str, Any]) -> None:
    """And none where a reply has told it before."""
    store = Scripted(Reply([{**reply, SERVER_NOW: 5_000_000}], 0))
    if reply:
        store.swap(a_record(), None)

    for _ in range(2):
        assert abs(store.now() - 5_000_000) < 60_000

    assert len(store.sent) == 1


def test_table_that_was_tried_out_is_as_before() -> None:
    """Whatever comes of it."""
    store = Scripted(NO_TABLE)

    with pytest.raises(StoreMisconfigured):
        store.verify()

    assert store.undone == 1


def test_errors_of_another_kind_are_explained_where_they_are_named() -> None:
    """Others are nobody's but the caller's."""
    store = Scripted()

    with pytest.raises(StoreUnavailable, match="pool"), store.explaining("begin", TimeoutError):
        raise TimeoutError("pool")
    with pytest.raises(StoreUnavailable) as raised, store.explaining("begin"):
        raise FromLibrary("INSERT 'secret'") from FromDriver(LOST)
    assert isinstance(raised.value.__cause__, FromDriver)
    with pytest.raises(TimeoutError), store.explaining("begin"):
        raise TimeoutError
