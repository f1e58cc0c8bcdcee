"""What differs between the drivers of SQL databases: how to connect, and what a connection reveals of its peer."""

import math
import select
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sqlalchemy import URL, Connection, Engine, PoolProxiedConnection, create_engine, event, make_url
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from celery_idempotent.errors import PolicyError, StoreMisconfigured
from celery_idempotent.printable import scheme_of
from celery_idempotent.stores.failures import UNENCRYPTED, UNVERIFIED, leaves_machine, weakness_of
from celery_idempotent.stores.sql.schema import DIALECTS

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection


_RECYCLE = 300
"""Seconds after which a connection is replaced: before the 350 s after which AWS's NAT gateways and load balancers
silently forget an idle one."""


def parsed(url: str) -> URL:
    """The parts of a URL: SQLAlchemy's, or with Celery's ``db+`` before it."""
    try:
        return make_url(url.removeprefix("db+"))
    except (ArgumentError, ValueError):  # whose text would quote a password that looks like a port
        raise PolicyError(
            "idempotency_store",
            scheme_of(url),
            "is not the URL of a database, such as postgresql+psycopg://user:password@host/db; write special "
            "characters of user and password as %xx",
        ) from None


def connectable(url: URL) -> URL:
    """The URL with a driver that is installed: its own, or the best there is."""
    dialect, _, driver = url.drivername.lower().partition("+")
    drivers = _DRIVERS.get(dialect)
    if drivers is None:
        raise _refused(url, f"records can be kept in {', '.join(DIALECTS)}, and not in {dialect}")
    if not driver:
        driver = next((name for name, each in drivers.items() if find_spec(each.module)), next(iter(drivers)))
    if driver not in drivers:
        raise _refused(url, f"use one of these drivers: {', '.join(f'{dialect}+{each}' for each in drivers)}")
    if not find_spec(drivers[driver].module):
        raise _refused(
            url,
            f"{drivers[driver].module} is not installed; "
            f'run: pip install "celery-idempotent[sql]" "{drivers[driver].distribution}"',
        )
    if dialect == "sqlite" and (url.database in {None, "", ":memory:"} or url.query.get("mode") == "memory"):
        raise _refused(url, "every connection would have a database of its own; name a file, or use memory://")
    if dialect == "sqlite" and url.query and "uri" not in url.query:
        raise _refused(url, f"unknown option for SQLite: {', '.join(url.query)}")
    return url.set(drivername=f"{dialect}+{driver}")


def dialect_of(url: URL) -> Dialect:
    kind: Any = url.get_dialect()
    dialect: Dialect = kind(dbapi=kind.import_dbapi())
    return dialect


def url_of(engine: object) -> URL:
    if not isinstance(engine, Engine) or engine.dialect.is_async:
        raise PolicyError(
            "idempotency_store", type(engine).__name__, "must be a URL, a store, or SQLAlchemy's Engine without asyncio"
        )
    return engine.url.set(drivername=f"{engine.dialect.name}+{engine.driver}")


def check_pool(engine: Engine) -> None:
    """Refuse a pool that lends a connection to two at once: a write of one commits what the other has begun."""
    if isinstance(engine.pool, StaticPool | SingletonThreadPool):
        raise PolicyError(
            "idempotency_store",
            type(engine.pool).__name__,
            "lends one connection to several users, and a write of the store would commit the transaction of another; "
            "use a URL, or an engine with QueuePool or NullPool",
        )


def end_transaction_of_a_hook(connection: Connection) -> None:
    """End what an engine's ``begin`` hook has begun on SQLite, as SQLAlchemy advises for SAVEPOINT.

    A write would be part of it, and be undone when the connection goes back to the pool.

    Raises:
        StoreMisconfigured: The driver itself is always in a transaction.
    """
    driver: Any = connection.connection.dbapi_connection
    driver.rollback()
    if driver.in_transaction:
        raise StoreMisconfigured(
            "an engine of your own", "connect", "it has no autocommit mode; drop autocommit=False, or use a URL"
        )


def _refused(url: URL, remedy: str) -> PolicyError:
    return PolicyError("idempotency_store", scheme_of(f"{url.drivername}://"), remedy)


def new_engine(url: URL, *, timeout: float, pool_size: int) -> Engine:
    """An engine whose statements are sent alone, in autocommit mode, and end within seconds.

    Connecting, waiting for a connection of the pool, and a statement on the server have ``timeout`` seconds each. The
    driver itself waits one second more for the answer.
    """
    dialect, _, driver = url.drivername.partition("+")
    engine = create_engine(
        url,
        # No BEGIN before a statement, no COMMIT or ROLLBACK after it, no ping before: one round trip each.
        isolation_level="AUTOCOMMIT",
        skip_autocommit_rollback=True,
        pool_reset_on_return=None,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=timeout,
        pool_recycle=_RECYCLE,
        # The least used connections stay at the bottom, where servers close them and recycling finds them.
        pool_use_lifo=True,
        hide_parameters=True,
        connect_args=_DRIVERS[dialect][driver].settings(url.query, timeout),
    )
    if url.drivername == "postgresql+psycopg":
        event.listen(engine, "do_connect", _connect_with_deadline(timeout + 1))
    if url.drivername == "postgresql+pg8000":
        event.listen(engine, "connect", _refuse_pooler)
    for statement in _session(dialect, timeout):
        event.listen(engine, "connect", _executing(statement))
    return engine


AnyConnection = Connection | PoolProxiedConnection
C = TypeVar("C", Connection, PoolProxiedConnection)


class ConnectionPool:
    """An engine's pool, and the driver's connections that stay out of it between two statements.

    To go there and back costs a worker at least 5 % of the CPU of a task on PostgreSQL. Whoever wants one of the pool
    has them all given back first, and none is kept where all are lent, so that nobody waits for one that is idle.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: list[PoolProxiedConnection] = []

    def connect(self) -> Connection:
        """A connection of SQLAlchemy's that lives."""
        return self._living(self._engine.connect)

    def raw_connection(self) -> PoolProxiedConnection:
        """A connection of the driver's that lives; after it, :meth:`keep`."""
        while self._kept:
            with suppress(IndexError):  # another thread was faster
                lent = self._kept.pop()
                if monotonic() - lent.info[_FIRST_USED] < _RECYCLE and not is_dead(lent.dbapi_connection):
                    return lent
                drop(lent)
        return self._living(self._engine.raw_connection)

    def keep(self, lent: PoolProxiedConnection) -> None:
        """Have it ready for the next statement."""
        self._kept.append(lent)
        pool: Any = self._engine.pool
        if pool.checkedout() >= pool.size():
            self._give_back()

    def dispose(self) -> None:
        self._give_back()
        self._engine.dispose()

    def _living(self, connect: Callable[[], C]) -> C:
        while True:
            self._give_back()
            lent = connect()
            is_new = lent.info.setdefault(_FIRST_USED, now := monotonic()) is now
            if is_new or not is_dead(of_driver(lent)):
                return lent
            drop(lent)  # nothing was sent on it, so nothing is in doubt

    def _give_back(self) -> None:
        with suppress(IndexError):
            while True:
                self._kept.pop().close()


_FIRST_USED = "celery_idempotent.first_used"
"""In the ``info`` of a pooled connection that was used before, and may be dead since: when."""


def of_driver(lent: AnyConnection) -> Any:
    return (lent.connection if isinstance(lent, Connection) else lent).dbapi_connection


def drop(lent: AnyConnection) -> None:
    """Close it, and leave its place in the pool."""
    lent.invalidate()
    lent.close()


def _libpq(query: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    seconds = math.ceil(timeout)
    ours = {
        "connect_timeout": seconds,
        # A server that has vanished acknowledges nothing.
        "tcp_user_timeout": round(timeout * 1000),
        "keepalives_idle": seconds,
        "keepalives_interval": 1,
        "application_name": "celery-idempotent",
    }
    ours = {name: value for name, value in ours.items() if name not in query}
    return {**ours, "options": f"{_options(timeout)} {query.get('options', '')}".strip()}


def _options(timeout: float) -> str:
    """Settings of a session, sent with the request to connect, so that they cost no round trip."""
    return f"-c statement_timeout={round(timeout * 1000)} -c default_transaction_isolation=read\\ committed"


def _psycopg(query: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    # Nothing is prepared before it is known whether there is a pooler in between.
    return {"prepare_threshold": None, **_libpq(query, timeout)}


def _pg8000(query: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    ours = {"application_name": "celery-idempotent", "startup_params": {"options": _options(timeout)}}
    return {"timeout": timeout + 1, **{name: value for name, value in ours.items() if name not in query}}


def _mysql(query: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    ours = {
        "charset": "utf8mb4",
        "connect_timeout": math.ceil(timeout),
        "read_timeout": math.ceil(timeout) + 1,
        "write_timeout": math.ceil(timeout) + 1,
    }
    return {name: value for name, value in ours.items() if name not in query}


class _Driver(NamedTuple):
    module: str
    distribution: str
    settings: Callable[[Mapping[str, Any], float], dict[str, Any]]
    """Settings for the driver when it connects. One in the URL's query takes precedence."""


_MYSQL = {"pymysql": _Driver("pymysql", "pymysql", _mysql), "mysqldb": _Driver("MySQLdb", "mysqlclient", _mysql)}
_DRIVERS = {
    "postgresql": {
        "psycopg": _Driver("psycopg", "psycopg[binary]", _psycopg),
        "psycopg2": _Driver("psycopg2", "psycopg2-binary", _libpq),
        "pg8000": _Driver("pg8000", "pg8000", _pg8000),
    },
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": {"pysqlite": _Driver("sqlite3", "", lambda query, timeout: {"timeout": timeout})},
}
"""By dialect, the drivers that are known to work, the best first."""


def _session(dialect: str, timeout: float) -> list[str]:
    match dialect:
        case "mysql" | "mariadb":
            return [
                "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
                # Without strict mode MySQL truncates text and reports success.
                "SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES'), "
                f"innodb_lock_wait_timeout = {math.ceil(timeout)}, lock_wait_timeout = {math.ceil(timeout)}, "
                # Otherwise the server may begin a transaction where one ends, and nobody would commit it.
                "completion_type = 'NO_CHAIN'",
            ]
        case "sqlite":
            return ["PRAGMA synchronous = EXTRA"]
        case _:
            return []


def _executing(statement: str) -> Callable[[Any, Any], None]:
    def execute(dbapi_connection: Any, _record: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(statement)
        cursor.close()

    return execute


def _connect_with_deadline(seconds: float) -> Callable[..., "PsycopgConnection"]:
    """psycopg waits for an answer as long as the server's kernel says that the server lives; this does not.

    From psycopg 3.2.13 on; before, it does not look up from its waiting.
    """
    import psycopg

    def until(deadline: float, generator: Generator[Any, Any, Any], connection: "PsycopgConnection") -> Any:
        # psycopg looks up ten times a second, and says that nothing is ready.
        try:
            wanted = next(generator)
            while True:
                ready = yield wanted
                if not ready and monotonic() > deadline:
                    connection.close()
                    raise psycopg.OperationalError(f"no answer in {seconds:g} s")
                wanted = generator.send(ready)
        except StopIteration as end:
            return end.value

    class Connection(psycopg.Connection):
        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            return super().wait(until(monotonic() + seconds, gen, self), *args, **kwargs)

    def connect(_dialect: Any, _record: Any, args: Any, parameters: Any) -> "PsycopgConnection":
        connection = Connection.connect(*args, **parameters)
        if has_server_of_its_own(connection, connection.info.backend_pid):
            connection.prepare_threshold = _PREPARED_AFTER
        return connection

    return connect


def has_server_of_its_own(connection: Any, told: int) -> bool:
    """Whether it is one process of PostgreSQL that answers here for ever, so that a statement may be prepared there.

    ``told`` is the id of the process that the connection was told at its beginning.

    A pooler such as PgBouncer changes servers at will. A statement that is prepared on one is missing on another, or
    worse: psycopg counts its names, and under the same name there may be somebody else's. To the client a pooler
    gives a process id of its own making, so the server itself is asked for the true one.
    """
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute("SELECT pg_backend_pid()")
    return bool(cursor.fetchone()[0] == told)


def _refuse_pooler(connection: Any, _record: Any) -> None:
    """pg8000 prepares each statement under no name, and binds values to it in a second request.

    In between, a pooler may let somebody else prepare there. The values would go to that statement, of any table.
    """
    told = connection._backend_key_data or b""
    if not has_server_of_its_own(connection, int.from_bytes(told[:4], "big")):
        raise ArgumentError("pg8000 behind a pooler")


_PREPARED_AFTER = 5
"""Uses of a statement; to prepare one costs a round trip."""


def is_dead(dbapi_connection: Any) -> bool:
    """Whether the other side has closed the connection; costs one system call and no round trip.

    What it does not see yet, the next statement reports as an error.
    """
    if getattr(dbapi_connection, "closed", False) or not getattr(dbapi_connection, "open", True):
        return True
    link = _link_of(dbapi_connection)
    if link is None or not hasattr(select, "poll"):
        return False  # SQLite has no other side; Windows has no poll
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN | _PEER_CLOSED)
    return any(events & ~select.POLLIN for _, events in poll.poll(0))


def exposure(dbapi_connection: Any) -> str:
    """What is weak about a connection to another machine; empty if nothing is, or if the driver does not reveal it.

    That is mysqlclient.
    """
    link = _link_of(dbapi_connection)
    if link is None or not leaves_machine(link.fileno()):
        return ""
    if link is not dbapi_connection:
        return weakness_of(link)
    if hasattr(dbapi_connection, "pgconn"):  # psycopg
        libpq = dbapi_connection.pgconn
        settings = {each.keyword.decode(): each.val for each in libpq.info}
        is_encrypted, mode = libpq.ssl_in_use, (settings["sslmode"] or b"").decode()
    else:  # psycopg2
        libpq = dbapi_connection.info
        is_encrypted, mode = libpq.ssl_in_use, libpq.dsn_parameters.get("sslmode")
    if not is_encrypted:
        return UNENCRYPTED
    return "" if mode in {"verify-ca", "verify-full"} else UNVERIFIED


def _link_of(dbapi_connection: Any) -> Any:
    """What has the descriptor of the connection's socket: itself, or the socket."""
    if hasattr(dbapi_connection, "fileno"):
        return dbapi_connection
    # Of pg8000 and PyMySQL; what pg8000 calls ``_sock`` is a file around it.
    return getattr(dbapi_connection, "_usock", None) or getattr(dbapi_connection, "_sock", None)


_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)
"""Linux tells it apart from data that has come."""
