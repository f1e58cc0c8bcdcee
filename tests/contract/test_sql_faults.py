"""What only SQL databases can get wrong: round trips, snapshots, transactions, restarts, locks, interrupted drivers."""
# mypy: allow-untyped-decorators

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import Replay, Run, Wait
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_record, a_rival
from celery_idempotent.testing.contract.parallel import in_children, race
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.documents import DOCS, table
from tests.support.scene import an_operation
from tests.support.sql_databases import Database, process_behind, stopped
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until


@pytest.fixture
def postgresql(postgres: EmbeddedPostgres) -> Database:
    return Database(postgres.url, postgres)


@pytest.fixture(params=["postgres", "mariadb"])
def served(request: pytest.FixtureRequest) -> Database:
    """A database behind a network."""
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
    return Database(server.url, server)


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Any."""
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path}/records.sqlite")
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
    return Database(server.url, server)


@pytest.fixture
def store(database: Database) -> Iterator[SQLStore]:
    with database.store() as store:
        yield store


# -- round trips


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


def test_swap_is_one_round_trip(served: Database) -> None:
    """Won it is one statement, alone, everywhere; lost it is one on PostgreSQL and two on MySQL."""
    lost = 1 if served.dialect == "postgresql" else 2
    record = a_record()
    second = replace(record, revision=new_nonce())
    with _behind(served) as (store, proxy):
        assert _cost(proxy, lambda: store.swap(record, None)) == 1
        assert _cost(proxy, lambda: store.swap(second, record.revision)) == 1
        assert _cost(proxy, lambda: store.swap(a_rival(record), None)) == lost
        assert _cost(proxy, lambda: store.swap(a_rival(record), record.revision)) == lost
        assert _cost(proxy, lambda: store.swap(a_record(), "nothing there")) == lost
        assert _cost(proxy, lambda: store.get(record.key)) == 1
        assert _cost(proxy, store.now) == 0
        assert proxy.connections == 1


def test_paths_cost_what_the_documentation_says(served: Database) -> None:
    """New keys, duplicates, conflicts, takeovers and renewals, as an attempt meets them."""
    column = {"postgresql": "PostgreSQL", "mysql": "MySQL, MariaDB"}[served.dialect]
    documented = {row["path"]: int(row[column]) for row in table(DOCS / "how-to/sql.md", "path")}
    result = Encoded("1", "application/json")
    with _behind(served) as (store, proxy):

        def run(key: str) -> None:
            held(key).complete(result)

        def wait_for(key: str) -> None:
            assert isinstance(claim(store, an_operation(key)), Wait | Replay)

        def held(key: str) -> Claim:
            decision = claim(store, an_operation(key))
            assert isinstance(decision, Run)
            return Claim(store, decision.record, lease=60_000, retain=600_000, claimed_at=0)

        def costs(number: int) -> dict[str, int]:
            held(f"running {number}")
            held(f"given back {number}").release()
            renewing = held(f"renewing {number}")
            return {
                "new key": _cost(proxy, lambda: run(f"new {number}")),
                "duplicate of something finished": _cost(proxy, lambda: wait_for(f"new {number}")),
                "duplicate of something running": _cost(proxy, lambda: wait_for(f"running {number}")),
                "takeover, or running again after a release": _cost(proxy, lambda: run(f"given back {number}")),
                "renewal, per third of a lease": _cost(proxy, renewing.renew),
            }

        for number in range(10):  # until psycopg has prepared all statements, which costs a round trip each
            costs(number)
        assert documented == costs(10)


@pytest.mark.parametrize(("driver", "cost"), [("psycopg2", 1), ("pg8000", 3)])
def test_other_drivers_of_postgresql_cost_what_is_documented(postgresql: Database, driver: str, cost: int) -> None:
    """psycopg2 needs one round trip, too; pg8000 prepares every statement."""
    other = replace(postgresql, url=postgresql.url.replace("psycopg", driver))
    record = replace(a_record(), status=Status.COMPLETED, result=b"\0x", content_type="x/y")
    with _behind(other) as (store, proxy):
        assert _cost(proxy, lambda: store.swap(record, None)) == cost
        assert _cost(proxy, lambda: store.swap(a_rival(record), None)) == cost
        assert store.swap(a_rival(record), None) == record


def test_connection_left_idle_costs_no_ping(served: Database) -> None:
    """Whether it lives is seen without a round trip."""
    with _behind(served) as (store, proxy):
        assert [_cost(proxy, lambda: store.swap(a_record(), None)) for _ in range(5)] == [1] * 5


# -- lost messages, restarts, servers that hang


def test_lost_reply_is_no_certain_answer_and_the_repeated_swap_knows_its_own(served: Database) -> None:
    """The first call has no answer; the second finds its own revision and has won."""
    with _behind(served) as (store, proxy):
        first = a_record()
        for new, expected in ((first, None), (replace(first, revision=new_nonce()), first.revision)):
            cut = proxy.cut_reply(new.revision.encode())
            with pytest.raises(StoreUnavailable) as raised:
                store.swap(new, expected)
            assert cut.struck
            assert raised.value.__cause__ is not None
            assert store.swap(new, expected) == new
        assert store.get(first.key) == new


def test_lost_request_has_written_nothing_and_can_be_repeated(served: Database) -> None:
    """From the outside it looks the same."""
    with _behind(served) as (store, proxy):
        record = a_record()
        proxy.cut_request(record.revision.encode())
        with pytest.raises(StoreUnavailable):
            store.swap(record, None)
        assert store.get(record.key) is None
        assert store.swap(record, None) == record


def test_new_connection_of_mysql_that_breaks_at_once_is_not_used_again(mariadb: EmbeddedMariaDB) -> None:
    """What it is asked first gets no answer; neither the pool nor a caller's transaction takes it for a good one."""
    database = Database(mariadb.url, mariadb)
    with database.store() as provisioned, TcpProxy(mariadb.port) as proxy:
        url, record = database.through(proxy.port), a_record()
        with database.reopened(provisioned.table.name, url=url) as store, Database(url).engine() as engine:
            proxy.cut_reply(b"max_allowed_packet")
            with pytest.raises(StoreUnavailable):
                store.swap(record, None)
            assert store.swap(record, None) == record
            proxy.cut_reply(b"max_allowed_packet")
            with engine.connect() as connection, pytest.raises(StoreUnavailable):
                store.swap_on(connection, a_rival(record), None)
            with engine.connect() as connection:
                assert store.swap_on(connection, a_rival(record), None) == record


@pytest.mark.parametrize(
    "ask", [lambda store: store.swap(a_record(), None), lambda store: store.get("key")], ids=["swap", "get"]
)
def test_pooled_connections_that_died_are_noticed_before_anything_is_sent(
    served: Database, ask: Callable[[SQLStore], object]
) -> None:
    """A server, firewall or pooler that closed idle connections costs no task an error, however many there were."""
    with _behind(served) as (store, proxy):
        _use_connections(store, 5)
        assert proxy.connections == 5
        proxy.drop_connections()

        for _ in range(6):
            ask(store)

        assert proxy.connections == 6


def _use_connections(store: SQLStore, count: int) -> None:
    """Have that many connections in the pool."""
    with ThreadPoolExecutor(count) as pool:
        barrier = threading.Barrier(count)

        def hold() -> None:
            with store._connected("test"):
                barrier.wait()

        for each in [pool.submit(hold) for _ in range(count)]:
            each.result()


def test_acknowledged_writes_survive_a_killed_server(served: Database) -> None:
    """Claims go on while the server is killed and comes back; what was acknowledged is there, whatever else is."""
    assert served.server is not None
    acknowledged: list[Record] = []
    is_over = threading.Event()

    def claim_often(store: SQLStore) -> None:
        while not is_over.is_set():
            record = a_record()
            try:
                assert store.swap(record, None) == record
                acknowledged.append(record)
            except StoreMisconfigured:
                raise
            except StoreUnavailable:
                is_over.wait(0.01)

    with served.store() as opened, ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(claim_often, opened) for _ in range(4)]
        try:
            for _ in range(2):
                count = len(acknowledged)
                wait_until(partial(_has, acknowledged, count + 20), "no claims before the kill")
                served.server.restart()
            count = len(acknowledged)
            wait_until(partial(_has, acknowledged, count + 20), "the store did not reconnect by itself")
        finally:
            is_over.set()
        for each in workers:
            each.result()

        stored = {each.key: each for each in opened.scan()}
        assert [stored.get(each.key) for each in acknowledged] == acknowledged


def _has(records: list[Record], count: int) -> bool:
    return len(records) >= count


def test_restarted_server_is_no_error_for_whoever_comes_after(served: Database) -> None:
    """A store that was idle meanwhile does not even notice."""
    assert served.server is not None
    record = a_record()
    with served.store() as store:
        store.swap(record, None)
        served.server.restart()
        assert store.swap(a_rival(record), None) == record


def test_server_that_hangs_is_given_up_within_seconds(served: Database) -> None:
    """Its kernel still acknowledges what is sent, so only a deadline of our own ends the waiting."""
    with served.store(timeout=1.0) as store:
        pid = process_behind(store)
        asked = time.monotonic()
        with stopped(pid), pytest.raises(StoreUnavailable):
            store.swap(a_record(), None)
        assert 1 < time.monotonic() - asked < 6
        record = a_record()
        assert store.swap(record, None) == record


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_of_several_hosts_the_one_that_can_be_written_is_found(postgresql: Database, driver: str) -> None:
    """libpq skips a host that is gone, and one that only reads."""
    assert postgresql.server is not None
    with TcpProxy(postgresql.server.port) as gone:
        nobody = gone.port
    hosts = f"host=127.0.0.1:{nobody}&host=127.0.0.1:{postgresql.server.port}&target_session_attrs=read-write"
    with postgresql.store() as provisioned:
        url = f"postgresql+{driver}://postgres@/postgres?{hosts}"
        with postgresql.reopened(provisioned.table.name, url=url) as store:
            record = a_record()
            assert store.swap(record, None) == record


def test_pool_that_is_exhausted_is_given_up_within_seconds(postgresql: Database) -> None:
    """More threads than connections wait, but not for ever."""
    with postgresql.store(timeout=0.5, pool_size=1) as store, store._connected("test"):
        asked = time.monotonic()
        with pytest.raises(StoreUnavailable, match="QueuePool"):
            store.swap(a_record(), None)
        assert time.monotonic() - asked < 5


# -- locks and snapshots


@contextmanager
def _transaction(database: Database, **options: Any) -> Iterator[Connection]:
    """Somebody's transaction; it is rolled back unless the block commits it."""
    with database.engine(**options) as engine, engine.connect() as connection:
        yield connection


@contextmanager
def _meanwhile(call: Callable[[], Any], others: Database, count: int = 1) -> Iterator["Future[Any]"]:
    """A call in another thread that waits for a lock, the block, and then its answer."""
    with ThreadPoolExecutor(count) as pool:
        future = pool.submit(call)
        _until_waiting(others, future)
        yield future


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


def test_loser_of_a_takeover_is_told_of_a_winner_that_it_could_not_see(served: Database) -> None:
    """The winner commits while the loser waits for it: the loser's snapshot still shows what it expected."""
    with served.store() as store, _transaction(served) as winner:
        seen = a_record()
        store.swap(seen, None)
        won, late = a_rival(seen), a_rival(seen)
        assert store.swap_on(winner, won, seen.revision) == won

        with _meanwhile(lambda: store.swap(late, seen.revision), served) as answer:
            assert not answer.done()
            winner.commit()
            assert answer.result() == won
        assert store.get(seen.key) == won


def test_loser_of_a_claim_is_told_of_a_winner_that_it_could_not_see(served: Database) -> None:
    """The same where there was nothing before: the loser's snapshot shows nothing."""
    with served.store() as store, _transaction(served) as winner:
        won = a_record()
        assert store.swap_on(winner, won, None) == won

        with _meanwhile(lambda: store.swap(a_rival(won), None), served) as answer:
            assert not answer.done()
            winner.commit()
            assert answer.result() == won


def test_claim_wins_when_the_one_before_is_rolled_back(served: Database) -> None:
    """What was never committed was never there."""
    with served.store() as store, _transaction(served) as other:
        never = a_record()
        assert store.swap_on(other, never, None) == never
        late = a_rival(never)

        with _meanwhile(lambda: store.swap(late, None), served) as answer:
            other.rollback()
            assert answer.result() == late


def test_replacement_of_what_is_deleted_meanwhile_finds_nothing(served: Database) -> None:
    """The loser's snapshot shows the record that is gone."""
    with served.store() as store, _transaction(served) as operator:
        seen = a_record()
        store.swap(seen, None)
        operator.execute(store.table.delete().where(store.table.c.revision == seen.revision))

        with _meanwhile(lambda: store.swap(a_rival(seen), seen.revision), served) as answer:
            operator.commit()
            assert answer.result() is None


def test_statement_that_waits_for_a_lock_is_given_up_within_seconds(served: Database) -> None:
    """A transaction that somebody left open must not hold a worker for longer than a lease."""
    with served.store(timeout=1.0) as store, _transaction(served) as other:
        seen = a_record()
        store.swap(seen, None)
        store.swap_on(other, a_rival(seen), seen.revision)

        asked = time.monotonic()
        with pytest.raises(StoreUnavailable) as raised:
            store.swap(a_rival(seen), seen.revision)
        assert time.monotonic() - asked < 5
        assert not isinstance(raised.value, StoreMisconfigured)
        other.rollback()
        assert store.get(seen.key) == seen


def test_locked_file_is_given_up_within_seconds(tmp_path: Path) -> None:
    """SQLite has one writer at a time; whoever waits too long is told so, and can ask again."""
    database = Database(f"sqlite:///{tmp_path}/records.sqlite")
    record = a_record()
    with database.store(timeout=0.2) as store, database.administrator() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            store.swap(record, None)
        assert store.get(record.key) is None  # readers do not wait for the writer
        other.exec_driver_sql("ROLLBACK")
        assert store.swap(record, None) == record


def test_deadlock_is_nobodys_error(mariadb: EmbeddedMariaDB) -> None:
    """Two claims wait for a deletion; MySQL lets both in, and undoes one. It asks again, and learns who won."""
    database = Database(mariadb.url, mariadb)
    with database.store() as store, _transaction(database) as operator, ThreadPoolExecutor(2) as pool:
        seen = a_record()
        store.swap(seen, None)
        operator.execute(store.table.delete().where(store.table.c.revision == seen.revision))
        claims = [a_rival(seen), a_rival(seen)]
        answers = [pool.submit(store.swap, each, None) for each in claims]
        _until_waiting(database, *answers)
        assert not any(each.done() for each in answers)
        deadlocks = _deadlocks(database)
        operator.commit()

        first, second = (each.result() for each in answers)
        assert first == second
        assert first in claims
        assert _deadlocks(database) == deadlocks + 1


def _deadlocks(database: Database) -> int:
    with database.administrator() as look:
        return int(look.execute(text("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")).one()[1])


@pytest.mark.parametrize(("number", "expected"), [(1213, 10), (1205, 1)])
def test_deadlock_that_never_ends_is_given_up(
    store: SQLStore, monkeypatch: pytest.MonkeyPatch, number: int, expected: int
) -> None:
    """A statement is not repeated for ever, and after no other error is it repeated at all."""
    tries: list[int] = []

    def fail(*arguments: Any) -> Any:
        tries.append(number)
        raise StoreUnavailable("s", "swap", "undone") from RuntimeError(number, "as PyMySQL's errors are built")

    monkeypatch.setattr(store, "_execute", fail)
    with pytest.raises(StoreUnavailable):
        store.swap(a_record(), None)
    assert len(tries) == expected


# -- a transaction of the caller's


def test_record_and_effect_are_committed_together(database: Database, store: SQLStore) -> None:
    """Until the caller commits, nobody sees the record; then both are there."""
    effects = f"e_{store.table.name}"
    database.do(f"CREATE TABLE {effects} (n INTEGER)")
    claimed = a_record()
    store.swap(claimed, None)
    done = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, result="1", content_type="text/plain")

    for end, found in ((Connection.rollback, (0, claimed)), (Connection.commit, (1, done))):
        with _transaction(database) as connection:
            connection.execute(text(f"INSERT INTO {effects} VALUES (1)"))
            assert store.swap_on(connection, done, claimed.revision) == done
            assert store.get(claimed.key) == claimed
            end(connection)
        with database.administrator() as look:
            assert look.execute(text(f"SELECT count(*) FROM {effects}")).scalar_one() == found[0]
        assert store.get(claimed.key) == found[1]


def test_loser_inside_a_transaction_learns_who_won(database: Database, store: SQLStore) -> None:
    """Its caller then rolls back its effect; nothing of the loser is written."""
    claimed = a_record()
    theirs = a_rival(claimed)
    store.swap(claimed, None)
    store.swap(theirs, claimed.revision)

    with _transaction(database) as connection:
        assert store.swap_on(connection, a_rival(claimed), claimed.revision) == theirs
        assert store.swap_on(connection, a_rival(claimed), None) == theirs
        connection.commit()
    assert store.get(claimed.key) == theirs


def test_transaction_that_began_before_sees_what_is_committed_now(mariadb: EmbeddedMariaDB) -> None:
    """MySQL's default isolation shows a transaction the past; what a swap lost to is read as it is now."""
    database = Database(mariadb.url, mariadb)
    with database.store() as store, _transaction(database, isolation_level="REPEATABLE READ") as connection:
        claimed = a_record()
        store.swap(claimed, None)
        connection.execute(store.table.select()).all()
        theirs = a_rival(claimed)
        store.swap(theirs, claimed.revision)

        assert store.swap_on(connection, a_rival(claimed), claimed.revision) == theirs


def test_failure_inside_a_transaction_leaves_the_connection_to_its_owner(postgresql: Database) -> None:
    """The caller rolls back, and goes on with its connection."""
    with postgresql.reopened("t_missing") as missing, _transaction(postgresql) as connection:
        with pytest.raises(StoreMisconfigured):
            missing.swap_on(connection, a_record(), None)
        connection.rollback()
        assert connection.execute(text("SELECT 1")).scalar_one() == 1


# -- processes, threads, signals


class _Interrupt(Exception):
    """As Celery's soft time limit: an ordinary exception, raised wherever the code happens to be."""


def test_exception_in_the_middle_of_an_answer_does_not_mix_up_the_next(served: Database) -> None:
    """A time limit can strike while a driver reads; that connection is not used again."""
    seen, other = a_record(), a_record()

    def strike(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with served.store() as store, _transaction(served) as blocker:
            for record in (seen, other):
                store.swap(record, None)
            store.swap_on(blocker, a_rival(seen), seen.revision)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(_Interrupt):
                store.swap(a_rival(seen), seen.revision)
            blocker.rollback()
            for _ in range(3):
                assert store.swap(a_rival(other), None) == other
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_child_that_ends_takes_no_connection_of_its_parent_with_it(postgresql: Database, driver: str) -> None:
    """A driver's goodbye on an inherited socket would end the parent's session."""
    url = postgresql.url.replace("psycopg", driver)
    with replace(postgresql, url=url).engine() as engine, postgresql.store() as provisioned:
        own = SQLStore(url, table=provisioned.table.name)
        given = SQLStore(engine, table=provisioned.table.name)
        records = [a_record(), a_record()]
        for each, record in zip((own, given), records, strict=True):
            each.swap(record, None)
        with engine.connect() as connection:
            session = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()

        def child() -> int:
            import gc

            for each, record in zip((own, given), records, strict=True):
                assert each.swap(a_rival(record), None) == record
            with engine.connect() as connection:
                mine: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            own.close()
            gc.collect()
            return mine

        assert session not in in_children([child])
        with engine.connect() as connection:
            assert connection.execute(text("SELECT pg_backend_pid()")).scalar_one() == session
        assert own.swap(a_rival(records[0]), None) == records[0]
        own.close()


def test_own_engine_is_left_open_and_as_it_was(postgresql: Database) -> None:
    """Closing the store is not closing the engine, and what others do on it is in transactions as before."""
    with postgresql.store() as provisioned, postgresql.engine(pool_size=1, max_overflow=0) as engine:
        store = SQLStore(engine, table=provisioned.table.name)
        store.swap(a_record(), None)
        store.close()

        assert engine.pool.status().startswith("Pool size: 1  Connections in pool: 1")
        with engine.connect() as connection:
            connection.execute(provisioned.table.delete())
            connection.rollback()
        assert len(list(store.scan())) == 1


# -- the clock


@pytest.mark.parametrize("zone", ["+00:00", "+05:30", "-08:00"])
def test_clock_of_mysql_does_not_depend_on_the_time_zone(mariadb: EmbeddedMariaDB, zone: str) -> None:
    """Milliseconds since the epoch in UTC, whatever zone a session is in."""
    database = Database(mariadb.url, mariadb)
    with database.engine(connect_args={"init_command": f"SET time_zone = '{zone}'"}) as engine:
        store = SQLStore(engine)
        assert abs(store.now() - time.time_ns() // 1_000_000) < 1_000


def test_clock_is_the_servers(served: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in a process whose date is wrong tells the server's time."""
    real = time.time_ns() // 1_000_000
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    with served.store() as store:
        assert abs(store.now() - real) < 10_000


def test_clock_is_asked_for_only_where_no_answer_has_told_it(served: Database) -> None:
    """``now`` of a store that never asked anything is one round trip on a new connection, and then none."""
    with _behind(served) as (store, proxy):
        store.close()
        fresh = SQLStore(store._url, table=store.table.name)
        assert abs(fresh.now() - time.time_ns() // 1_000_000) < 1_000
        assert _cost(proxy, fresh.now) == 0
        fresh.close()


# -- purging


def _outcome(store: SQLStore, age: int = 60, status: Status = Status.COMPLETED) -> Record:
    record = replace(a_record(), status=status, expires_at=store.now() // 1000 - age)
    store.swap(record, None)
    return record


def test_purge_deletes_what_is_forgotten_and_nothing_else(store: SQLStore) -> None:
    """Outcomes past their expiry, at most as many as asked for; a record that is no outcome never."""
    kept = [
        _outcome(store, age=-60),
        *(replace(a_record(), status=status, updated_at=1, lease_until=1) for status in Status),
        replace(a_record(), status=Status.UNKNOWN, expires_at=1),
    ]
    for record in kept[1:]:
        store.swap(record, None)
    for status in (Status.COMPLETED, Status.FAILED, Status.FAILED, Status.COMPLETED, Status.COMPLETED):
        _outcome(store, status=status)

    assert [store.purge(2) for _ in range(4)] == [2, 2, 1, 0]
    assert {each.key for each in store.scan()} == {each.key for each in kept[:-1]}
    with pytest.raises(StoreMisconfigured, match="UNKNOWN, which never expires"):
        store.get(kept[-1].key)  # so it is there


def test_outcome_that_is_claimed_again_meanwhile_survives_the_purge(served: Database) -> None:
    """The purge looks at it again, or at its revision, before it deletes it."""
    with served.store() as store, _transaction(served) as claimer:
        forgotten = _outcome(store)
        claimed = a_rival(forgotten)
        store.swap_on(claimer, claimed, forgotten.revision)
        with ThreadPoolExecutor(1) as pool:
            purged = pool.submit(store.purge, 10)
            _until_waiting(served, purged)  # PostgreSQL's passes over it and does not wait
            claimer.commit()
            assert purged.result() == 0
        assert store.get(forgotten.key) == claimed


def test_purge_on_postgresql_waits_for_nobody(postgresql: Database) -> None:
    """A record that is being written is passed over, and the others are deleted."""
    with postgresql.store() as store, _transaction(postgresql) as claimer:
        busy = _outcome(store)
        for _ in range(3):
            _outcome(store)
        store.swap_on(claimer, a_rival(busy), busy.revision)

        assert store.purge(10) == 3


def test_purges_and_claims_at_once_lose_nothing(store: SQLStore) -> None:
    """Every claim of a forgotten outcome wins or is told who did, and survives; no deadlock reaches anybody."""
    for _ in range(5):
        forgotten = [_outcome(store) for _ in range(8)]
        claims = [a_rival(each) for each in forgotten]

        def claim_anew(new: Record, seen: Record) -> object:
            return store.swap(new, seen.revision) or store.swap(new, None)

        calls: list[Callable[[], object]] = [partial(store.purge, 5), partial(store.purge, 5)]
        race(calls + [partial(claim_anew, *each) for each in zip(claims, forgotten, strict=True)])

        assert [store.get(each.key) for each in claims] == claims


def test_long_scan_reads_in_pages(store: SQLStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement reads more than a page; every record is found once, in every combination of filters."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGE", 3)
    records = [replace(a_record(), task="ab"[n % 2], status=list(Status)[n % 5]) for n in range(20)]
    for record in records:
        store.swap(record, None)

    for task in (None, "a", "b"):
        for status in (None, *Status):
            wanted = [each for each in records if task in (None, each.task) and status in (None, each.status)]
            assert list(store.scan(status=status, task=task)) == sorted(wanted, key=lambda each: each.key)
