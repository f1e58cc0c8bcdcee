"""What only SQL databases can get wrong: round trips, snapshots, transactions, restarts, locks, interrupted drivers."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, text

from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_claim, a_record, a_rival
from celery_idempotent.testing.contract.parallel import in_children, race
from tests.support.documents import DOCS, table
from tests.support.scene import an_operation
from tests.support.sql_databases import Database, process_behind, stopped
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


@contextmanager
def _behind(database: Database, **options: Any) -> Iterator[tuple[SQLStore, TcpProxy]]:
    """A provisioned store that reaches its server through a proxy and is connected."""
    assert database.server is not None
    with database.store() as provisioned, TcpProxy(database.server.port) as proxy:
        url = database.through(proxy.port)
        with database.reopened(provisioned.table.name, url=url, **options) as store:
            store.get("anything")
            yield store, proxy


def _cost(proxy: TcpProxy, call: Callable[[], object]) -> int:
    before = proxy.round_trips
    call()
    return proxy.round_trips - before


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000", "pymysql"])
def test_swap_is_one_round_trip(driver: str, request: pytest.FixtureRequest) -> None:
    """Lost it takes two on MySQL; pg8000 prepares every statement. A connection that was left idle costs no ping."""
    database: Database = request.getfixturevalue("mysql" if driver == "pymysql" else "postgresql")
    each = 3 if driver == "pg8000" else 1
    record = a_record()
    second = replace(record, revision=new_nonce())
    with _behind(replace(database, url=database.url.replace("psycopg", driver))) as (store, proxy):
        wins = [(record, None), (second, record.revision)]
        loses = [(a_rival(record), None), (a_rival(record), record.revision), (a_record(), "nothing there")]
        assert [_cost(proxy, partial(store.swap, *swap)) for swap in wins] == [each] * 2
        lost = 2 if driver == "pymysql" else each
        assert [_cost(proxy, partial(store.swap, *swap)) for swap in loses] == [lost] * 3
        assert (_cost(proxy, lambda: store.get(record.key)), _cost(proxy, store.now)) == (each, 0)


def test_paths_cost_what_the_documentation_says(served: Database) -> None:
    """New keys, duplicates, conflicts, takeovers and renewals, as an attempt meets them."""
    column = {"postgresql": "PostgreSQL", "mysql": "MySQL, MariaDB"}[served.dialect]
    documented = {row["path"]: int(row[column]) for row in table(DOCS / "how-to/sql.md", "path")}
    with _behind(served) as (store, proxy):

        def ask(key: str) -> object:
            return claim(store, an_operation(key))

        def held(key: str) -> Claim:
            decision = claim(store, an_operation(key))
            assert isinstance(decision, Run)
            return Claim(store, decision.record, lease=60_000, retain=600_000, claimed_at=0)

        def run(key: str) -> None:
            held(key).complete(Encoded("1", "application/json"))

        def costs(number: int) -> dict[str, int]:
            held(f"running {number}")
            held(f"given back {number}").release()
            return {
                "new key": _cost(proxy, lambda: run(f"new {number}")),
                "duplicate of something finished": _cost(proxy, lambda: ask(f"new {number}")),
                "duplicate of something running": _cost(proxy, lambda: ask(f"running {number}")),
                "takeover, or running again after a release": _cost(proxy, lambda: run(f"given back {number}")),
                "renewal, per third of a lease": _cost(proxy, held(f"renewing {number}").renew),
            }

        for number in range(10):  # until psycopg has prepared all statements, which costs a round trip each
            costs(number)
        assert documented == costs(10)


@pytest.mark.parametrize("cut", [TcpProxy.cut_reply, TcpProxy.cut_request], ids=["reply", "request"])
@pytest.mark.parametrize("is_new", [True, False], ids=["claim", "replacement"])
def test_swap_that_is_sent_again_knows_its_own_write(served: Database, cut: Callable[..., Any], is_new: bool) -> None:
    """From the outside it looks the same, whether it was written or not; the second call has won in either case."""
    with _behind(served) as (store, proxy):
        seen = None if is_new else a_claim(store)
        new, expected = (a_rival(seen), seen.revision) if seen else (a_record(), None)
        fault = cut(proxy, new.revision.encode())
        with pytest.raises(StoreUnavailable) as raised:
            store.swap(new, expected)
        assert (fault.struck, raised.value.__cause__ is None) == (1, False)
        assert store.get(new.key) == (seen if cut is TcpProxy.cut_request else new)
        assert store.swap(new, expected) == new


def test_new_connection_of_mysql_that_breaks_at_once_is_not_used_again(mysql: Database) -> None:
    """What it is asked first gets no answer; the pool does not take it for a good one."""
    assert mysql.server is not None
    with mysql.store() as provisioned, TcpProxy(mysql.server.port) as proxy:
        proxy.cut_reply(b"max_allowed_packet")
        with mysql.reopened(provisioned.table.name, url=mysql.through(proxy.port)) as store:
            record = a_record()
            with pytest.raises(StoreUnavailable):
                store.swap(record, None)
            assert store.swap(record, None) == record


def test_pooled_connections_that_died_are_noticed_before_anything_is_sent(served: Database) -> None:
    """A server, firewall or pooler that closed idle connections costs no task an error, however many there were."""
    with _behind(served) as (store, proxy):
        barrier = threading.Barrier(5)

        def hold() -> None:
            with store._connected("test"):
                barrier.wait()

        for ask, opened in ((lambda: a_claim(store), 5), (lambda: store.begin().rollback(), 10)):
            race([hold] * 5)
            assert proxy.connections == opened
            proxy.drop_connections()
            for _ in range(6):
                ask()
            assert proxy.connections == opened + 1


def test_acknowledged_write_survives_a_killed_server(served: Database) -> None:
    """It is there when the server is back, and the store finds back to it."""
    assert served.server is not None
    with served.store() as store:
        record = a_claim(store)
        served.server.restart()
        assert store.get(record.key) == record
        assert a_claim(store)


def test_server_that_hangs_is_given_up_within_seconds(served: Database) -> None:
    """Its kernel still acknowledges what is sent, so only a deadline of our own ends the waiting."""
    with served.store(timeout=1.0) as store:
        asked = time.monotonic()
        with stopped(process_behind(store)), pytest.raises(StoreUnavailable):
            store.swap(a_record(), None)
        assert 1 < time.monotonic() - asked < 6
        a_claim(store)


@contextmanager
def _transaction(database: Database, **options: Any) -> Iterator[Connection]:
    """Somebody's transaction; it is rolled back unless the block commits it."""
    with database.engine(**options) as engine, engine.connect() as connection:
        yield connection


_WAITING = {
    "postgresql": "SELECT 'waiting', count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
    "mysql": "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'",
}


def _until_waiting(database: Database, *calls: "Future[Any]") -> None:
    """Until all of the calls wait for a lock, or one of them does not wait at all."""
    with database.administrator() as look:
        wait_until(
            lambda: (
                int(look.execute(text(_WAITING[database.dialect])).one()[1]) >= len(calls)
                or any(each.done() for each in calls)
            ),
            "nobody waits for a lock",
        )


def _delete(store: SQLStore, connection: Connection, record: Record) -> None:
    connection.execute(store.table.delete().where(store.table.c.revision == record.revision))


@pytest.mark.parametrize(
    ("is_there", "deletes", "end"),
    [
        (True, False, Connection.commit),  # the loser's snapshot still shows what it expected
        (False, False, Connection.commit),  # and here nothing
        (False, False, Connection.rollback),  # what was never committed was never there
        (True, True, Connection.commit),  # here the record that is gone
    ],
)
def test_late_swap_waits_and_is_told_what_it_could_not_see(
    served: Database, is_there: bool, deletes: bool, end: Callable[[Connection], None]
) -> None:
    """Another transaction writes or deletes the record, and ends while the swap waits for it."""
    with served.store() as store, _transaction(served) as other, ThreadPoolExecutor(1) as thread:
        seen = a_record()
        winner, late, expected = a_rival(seen), a_rival(seen), seen.revision if is_there else None
        if is_there:
            store.swap(seen, None)
        if deletes:
            _delete(store, other, seen)
        else:
            assert store.swap_on(other, winner, expected) == winner

        answer = thread.submit(store.swap, late, expected)
        _until_waiting(served, answer)
        assert not answer.done()
        end(other)

        right = None if deletes else winner if end is Connection.commit else late
        assert answer.result() == store.get(seen.key) == right


def test_statement_that_waits_for_a_lock_or_a_connection_is_given_up_within_seconds(served: Database) -> None:
    """A transaction that somebody left open, or threads without a connection, hold no worker longer than a lease."""
    with served.store(timeout=1.0, pool_size=1) as store, _transaction(served) as other:
        seen = a_claim(store)
        store.swap_on(other, a_rival(seen), seen.revision)
        asked = time.monotonic()
        with pytest.raises(StoreUnavailable) as raised:
            store.swap(a_rival(seen), seen.revision)
        assert (type(raised.value), time.monotonic() - asked < 5) == (StoreUnavailable, True)

        asked = time.monotonic()
        with store._connected("test"), pytest.raises(StoreUnavailable, match="QueuePool"):
            store.swap(a_record(), None)
        assert time.monotonic() - asked < 5


def test_deadlock_is_nobodys_error(mysql: Database) -> None:
    """Two claims wait for a deletion; MySQL lets both in, and undoes one. It asks again, and learns who won."""

    def deadlocks() -> int:
        with mysql.administrator() as look:
            return int(look.execute(text("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")).one()[1])

    with mysql.store() as store, _transaction(mysql) as operator, ThreadPoolExecutor(2) as pool:
        seen, before = a_claim(store), deadlocks()
        _delete(store, operator, seen)
        answers = [pool.submit(store.swap, a_rival(seen), None) for _ in range(2)]
        _until_waiting(mysql, *answers)
        operator.commit()
        assert answers[0].result() == answers[1].result() == store.get(seen.key) != seen
        assert deadlocks() == before + 1


def test_transaction_that_began_before_sees_what_is_committed_now(mysql: Database) -> None:
    """MySQL's default isolation shows a transaction the past; what a swap lost to is read as it is now."""
    with mysql.store() as store, _transaction(mysql, isolation_level="REPEATABLE READ") as connection:
        claimed = a_claim(store)
        connection.execute(store.table.select()).all()
        store.swap(theirs := a_rival(claimed), claimed.revision)
        assert store.swap_on(connection, a_rival(claimed), claimed.revision) == theirs


def test_exception_in_the_middle_of_an_answer_does_not_mix_up_the_next(served: Database) -> None:
    """A time limit can strike while a driver reads; that connection is not used again."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with served.store() as store, _transaction(served) as blocker:
            seen, other = a_claim(store), a_claim(store)
            store.swap_on(blocker, a_rival(seen), seen.revision)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                store.swap(a_rival(seen), seen.revision)
            blocker.rollback()
            assert store.swap(a_rival(other), None) == other
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_child_that_ends_takes_no_connection_of_its_parent_with_it(postgresql: Database, driver: str) -> None:
    """A driver's goodbye on an inherited socket would end the parent's session."""
    url = postgresql.url.replace("psycopg", driver)
    with replace(postgresql, url=url).engine() as engine, postgresql.store() as provisioned:
        own, given = (SQLStore(each, table=provisioned.table.name) for each in (url, engine))
        record, _ = a_claim(own), a_claim(given)

        def session() -> int:
            with engine.connect() as connection:
                return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())

        def child() -> int:
            assert own.swap(a_rival(record), None) == given.swap(a_rival(record), None) == record
            mine = session()
            own.close()
            gc.collect()
            return mine

        before = session()
        assert before not in in_children([child])
        assert session() == before
        assert own.swap(a_rival(record), None) == record
        own.close()


def test_own_engine_is_left_open_and_as_it_was(postgresql: Database) -> None:
    """Closing the store is not closing the engine, and what others do on it is in transactions as before."""
    with postgresql.store() as provisioned, postgresql.engine(pool_size=1, max_overflow=0) as engine:
        store = SQLStore(engine, table=provisioned.table.name)
        record = a_claim(store)
        store.close()
        assert engine.pool.status().startswith("Pool size: 1  Connections in pool: 1")
        with engine.connect() as connection:
            connection.execute(provisioned.table.delete())
            connection.rollback()
        assert store.get(record.key) == record


def test_clock_is_the_servers(served: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """In UTC, also in a process whose date is wrong or, on MySQL, in a session of another time zone."""
    real, arguments = time.time_ns() // 1_000_000, {"connect_args": {"init_command": "SET time_zone = '+05:30'"}}
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    with served.store() as store, served.engine(**arguments if served.dialect == "mysql" else {}) as engine:
        assert abs(store.now() - real) < 10_000
        assert abs(SQLStore(engine).now() - real) < 10_000


def test_outcome_that_is_claimed_again_meanwhile_survives_the_purge(served: Database) -> None:
    """The purge looks at it again, or at its revision, before it deletes it; PostgreSQL's waits for nobody."""
    with served.store() as store, _transaction(served) as claimer, ThreadPoolExecutor(1) as pool:
        busy, *others = [replace(a_record(), status=Status.COMPLETED, expires_at=1) for _ in range(4)]
        for each in (busy, *others):
            store.swap(each, None)
        claimed = a_rival(busy)
        store.swap_on(claimer, claimed, busy.revision)
        purged = pool.submit(store.purge, 10)
        if served.dialect == "postgresql":
            assert purged.result() == 3
        else:
            _until_waiting(served, purged)
        claimer.commit()
        assert purged.result() == 3
        assert list(store.scan()) == [claimed]


def test_long_scan_reads_in_pages(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is found once, in the order of keys."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGE", 3)
    with database.store() as store:
        records = [a_claim(store) for _ in range(20)]
        assert list(store.scan()) == sorted(records, key=lambda each: each.key)
