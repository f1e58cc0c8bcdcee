"""What drivers' errors mean: no answer is never taken for a refusal, and a refusal by its sign alone."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, NoCredentialsError
from botocore.exceptions import ReadTimeoutError as BotoReadTimeoutError
from botocore.parsers import ResponseParserError
from redis import exceptions as redis_errors

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.dynamodb import items as dynamodb
from celery_idempotent.stores.failures import NO_RULE, Meaning, Rule, failure, rule_of
from celery_idempotent.stores.redis import client as redis
from celery_idempotent.stores.sql import errors as sql
from celery_idempotent.stores.sql.statements import DuplicateKey, UnreadableRow
from celery_idempotent.troubleshooting import link


class Psycopg(Exception):
    """As psycopg says it."""

    def __init__(self, code: str | None, text: str = "said the server") -> None:
        super().__init__(text)
        self.sqlstate = code


class Psycopg2(Exception):
    """As psycopg2 says it."""

    def __init__(self, code: str | None, text: str = "said the server") -> None:
        super().__init__(text)
        self.pgcode = code


class Pg8000(Exception):
    """As pg8000 says it."""

    def __init__(self, code: str | None, text: str = "said the server") -> None:
        super().__init__({"C": code, "M": text} if code else text)


class PyMySQL(Exception):
    """As PyMySQL and mysqlclient say it."""

    def __init__(self, code: int, text: str = "said the server") -> None:
        super().__init__(code, text)


def sqlite(name: str, text: str = "said the library") -> sqlite3.OperationalError:
    """As the module of Python says it."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorname = name
    return error


POSTGRES: tuple[Callable[..., Exception], ...] = (Psycopg, Psycopg2, Pg8000)

_LOST_ON_POSTGRES = (
    (None, "server closed the connection unexpectedly: this probably means the server terminated abnormally"),
    (None, "consuming input failed: SSL connection has been closed unexpectedly"),
    (None, "network error"),
    ("08000", "connection exception"),
    ("08003", "connection does not exist"),
    ("08006", "connection failure"),
    ("08007", "transaction resolution unknown"),
    ("25P02", "current transaction is aborted"),
    ("53200", "out of memory"),
    ("53300", "too many connections"),
    ("57P01", "terminating connection due to administrator command"),
    ("57P02", "terminating connection because of crash of another server process"),
    ("57P03", "the database system is starting up"),
    ("58030", "could not write to file"),
    ("XX000", "internal error"),
)

_LOST_ON_MYSQL = (
    (1053, "Server shutdown in progress"),
    (1205, "Lock wait timeout exceeded; try restarting transaction"),
    (1317, "Query execution was interrupted"),
    (1927, "Connection was killed"),
    (2003, "Can't connect to MySQL server"),
    (2006, "MySQL server has gone away"),
    (2013, "Lost connection to MySQL server during query"),
    (2055, "Lost connection to server at 'reading initial communication packet'"),
    (4031, "The client was disconnected by the server because of inactivity"),
)

_LOST_ON_SQLITE = ("SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", "SQLITE_LOCKED", "SQLITE_IOERR_WRITE", "SQLITE_FULL")

NO_ANSWERS = [
    *(driver(*said) for driver in POSTGRES for said in _LOST_ON_POSTGRES),
    *(PyMySQL(*said) for said in _LOST_ON_MYSQL),
    *(sqlite(name, "disk I/O error") for name in _LOST_ON_SQLITE),
    OSError(104, "Connection reset by peer"),
    TimeoutError("timed out"),
]


@pytest.mark.parametrize("error", NO_ANSWERS, ids=repr)
@pytest.mark.parametrize("operation", ["swap", "commit"])
def test_sql_error_after_which_a_write_may_have_happened_is_no_refusal(error: Exception, operation: str) -> None:
    """It is asked about again until there is an answer, and not sent again as if the database had undone it."""
    told = sql.explained(error, "s", operation)

    assert type(told) is StoreUnavailable
    assert sql.meaning_of(error) is Meaning.UNAVAILABLE


_REFUSALS_OF_POSTGRES = {
    Meaning.TOO_LARGE: ("22001", "54000"),
    Meaning.READ_ONLY: ("25006",),
    Meaning.UNDONE: ("40001", "40P01"),
    Meaning.ALREADY_THERE: ("42P07", "42710", "23505"),
    Meaning.MISCONFIGURED: (
        *("42P01", "42703", "42804", "42P10", "23502"),
        *("3F000", "3D000", "42501", "28P01", "28000"),
    ),
}

_REFUSALS_OF_MYSQL = {
    Meaning.TOO_LARGE: (1118, 1153, 1406),
    Meaning.READ_ONLY: (1290, 1792, 1836),
    Meaning.DUPLICATE: (1062,),
    Meaning.UNDONE: (1213,),
    Meaning.ALREADY_THERE: (1050, 1061),
    Meaning.MISCONFIGURED: (1146, 1054, 1072, 1364, 1049, 1044, 1142, 1143, 1045, 1698),
}

_REFUSALS_OF_SQLITE = {
    Meaning.TOO_LARGE: ("SQLITE_TOOBIG",),
    Meaning.MISCONFIGURED: (
        *("SQLITE_READONLY", "SQLITE_READONLY_DIRECTORY", "SQLITE_PERM"),
        *("SQLITE_CANTOPEN", "SQLITE_CANTOPEN_ISDIR", "SQLITE_NOTADB", "SQLITE_CORRUPT"),
    ),
}

_TEXTS = {
    "no such table: records": Meaning.MISCONFIGURED,
    "no such column: steps": Meaning.MISCONFIGURED,
    "table records has no column named steps": Meaning.MISCONFIGURED,
    "ON CONFLICT clause does not match any PRIMARY KEY or UNIQUE constraint": Meaning.MISCONFIGURED,
    'connection failed: FATAL:  database "shop" does not exist': Meaning.MISCONFIGURED,
    'FATAL:  password authentication failed for user "shop"': Meaning.MISCONFIGURED,
    "fe_sendauth: no password supplied": Meaning.MISCONFIGURED,
    "FATAL:  no pg_hba.conf entry for host": Meaning.MISCONFIGURED,
    'FATAL:  role "shop" does not exist': Meaning.MISCONFIGURED,
    "connect() got an unexpected keyword argument 'sslmod'": Meaning.MISCONFIGURED,
    'invalid connection option "sslmod"': Meaning.MISCONFIGURED,
    'invalid URI query parameter: "sslmod"': Meaning.MISCONFIGURED,
    "invalid dsn": Meaning.MISCONFIGURED,
    "FATAL:  unsupported startup parameter: options": Meaning.MISCONFIGURED,
    "table records already exists": Meaning.ALREADY_THERE,
    "index by_age already exists": Meaning.ALREADY_THERE,
    "Could not decode to UTF-8 column 'task' with text 'secret'": Meaning.UNREADABLE,
}

REFUSALS = [
    *((d(code), meaning) for d in POSTGRES for meaning, codes in _REFUSALS_OF_POSTGRES.items() for code in codes),
    *((PyMySQL(code), meaning) for meaning, codes in _REFUSALS_OF_MYSQL.items() for code in codes),
    *((sqlite(name), meaning) for meaning, names in _REFUSALS_OF_SQLITE.items() for name in names),
    *((sqlite3.OperationalError(text), meaning) for text, meaning in _TEXTS.items()),
]

_TOLD: dict[Meaning, type[Exception]] = {
    Meaning.MISCONFIGURED: StoreMisconfigured,
    Meaning.TOO_LARGE: RecordTooLarge,
    Meaning.DUPLICATE: DuplicateKey,
    Meaning.UNREADABLE: UnreadableRow,
}


@pytest.mark.parametrize(("error", "meaning"), REFUSALS, ids=repr)
def test_sql_refusals_mean_what_follows_from_them(error: Exception, meaning: Meaning) -> None:
    """By the code of each driver, and where SQLite or a client library has none, by its text."""
    assert sql.meaning_of(error) is meaning
    assert type(sql.explained(error, "s", "swap")) is _TOLD.get(meaning, StoreUnavailable)


def test_every_code_and_every_text_of_sql_is_among_those() -> None:
    """So none can be added, or moved to another meaning, without a line above."""
    codes = {sql._code(error) for error, _ in REFUSALS} - {""}
    known = frozenset[str]().union(*(rule.codes for rule in sql._RULES))

    assert codes == known


def test_no_error_at_all_means_no_answer() -> None:
    """An outage without a cause is an outage."""
    assert sql.meaning_of(None) is Meaning.UNAVAILABLE


def test_what_is_stored_is_not_told() -> None:
    """Not by the details of PostgreSQL, nor by SQLite's text that it could not decode."""
    detailed = Psycopg("42804", "whole text, with DETAIL: secret")
    detailed.diag = type("Diagnostic", (), {"message_primary": "column has\nanother type"})()  # type: ignore[attr-defined]
    undecodable = sqlite3.OperationalError("Could not decode to UTF-8 column 'task' with text 'secret'")

    for error in (detailed, undecodable):
        assert "secret" not in str(sql.explained(error, "s", "get"))
    assert "column has another type" in str(sql.explained(detailed, "s", "get"))


@pytest.mark.parametrize("operation", ["verify", "provision", "swap", "commit", "get"])
def test_server_that_only_reads_is_an_outage_in_the_midst_of_work(operation: str) -> None:
    """There it may be a fail-over; at leisure it is a wrong address."""
    told = failure(Rule(meaning=Meaning.READ_ONLY), "s", operation, "read-only")

    assert type(told) is (StoreMisconfigured if operation in {"verify", "provision"} else StoreUnavailable)


def test_the_first_rule_that_fits_counts() -> None:
    """By code, class or text; what fits none is no answer."""
    rules = (
        Rule(codes=frozenset({"1"}), meaning=Meaning.UNDONE),
        Rule(errors=(LookupError,), meaning=Meaning.UNREADABLE),
        Rule(text="full$", meaning=Meaning.TOO_LARGE),
    )

    def meaning(error: BaseException, code: str, text: str) -> Meaning:
        return rule_of(rules, error, code, text).meaning

    assert meaning(KeyError(), "1", "full") is Meaning.UNDONE
    assert meaning(KeyError(), "2", "full") is Meaning.UNREADABLE
    assert meaning(ValueError(), "2", "it is full") is Meaning.TOO_LARGE
    assert rule_of(rules, ValueError(), "2", "fuller") is NO_RULE
    assert rule_of((Rule(),), ValueError(), "", "") is NO_RULE


def test_remedies_name_what_is_missing() -> None:
    """With what the driver said, in parentheses, and with the address of what is misconfigured."""
    rule = Rule(remedy="run: {creation}")
    told = failure(rule, "s", "swap", "no table", creation="make it")

    assert str(told) == f"s: swap failed: run: make it (no table); see {link('stores#store-misconfigured')}"


def answer(code: str, message: str = "", operation: str = "PutItem") -> ClientError:
    """An error that DynamoDB answers."""
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


@pytest.mark.parametrize(
    "error",
    [
        *map(
            answer,
            (
                *("InternalServerError", "ServiceUnavailable", "500", "ThrottlingException", "RequestLimitExceeded"),
                *("ProvisionedThroughputExceededException", "TransactionConflictException", "ExpiredTokenException"),
                *("TransactionInProgressException", "TransactionCanceledException", "ReplicatedWriteConflictException"),
            ),
        ),
        BotoReadTimeoutError(endpoint_url="u"),
        ConnectTimeoutError(endpoint_url="u"),
        EndpointConnectionError(endpoint_url="u"),
        ResponseParserError("Unable to parse response"),
    ],
    ids=repr,
)
def test_dynamodb_error_after_which_a_write_may_have_happened_is_no_refusal(error: Exception) -> None:
    """A server that fails while it answers may have written; and what is throttled passes."""
    assert type(dynamodb.explained(error, "s", "PutItem", key="id (S)")) is StoreUnavailable


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (answer("ValidationException", "Item size has exceeded the maximum allowed size"), RecordTooLarge),
        (answer("ValidationException", "One of the required keys was not given a value"), StoreMisconfigured),
        (answer("ResourceNotFoundException"), StoreMisconfigured),
        (answer("AccessDeniedException"), StoreMisconfigured),
        (answer("AccessDenied"), StoreMisconfigured),
        (answer("UnrecognizedClientException"), StoreMisconfigured),
        (answer("InvalidSignatureException"), StoreMisconfigured),
        (NoCredentialsError(), StoreMisconfigured),
    ],
    ids=repr,
)
def test_dynamodb_refusals_are_told_apart(error: Exception, told: type[Exception]) -> None:
    """What is too large is completed without its result; the rest needs somebody."""
    assert type(dynamodb.explained(error, "s", "PutItem", key="id (S)")) is told


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.ConnectionError("Connection closed by server."),
        redis_errors.TimeoutError("Timeout reading from socket"),
        redis_errors.BusyLoadingError("Redis is loading the dataset in memory"),
        redis_errors.TryAgainError("Multiple keys request during rehashing of slot"),
        redis_errors.ClusterDownError("The cluster is down"),
        redis_errors.MasterDownError("Link with MASTER is down"),
        redis_errors.ResponseError("MISCONF Redis is configured to save RDB snapshots, but cannot persist to disk"),
        redis_errors.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis_errors.ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
        redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis_errors.InvalidResponse("Protocol Error"),
        OSError(104, "Connection reset by peer"),
    ],
    ids=repr,
)
def test_redis_error_after_which_a_write_may_have_happened_is_no_refusal(error: Exception) -> None:
    """Nor what passes by itself."""
    assert redis.trouble_of(error).meaning is Meaning.UNAVAILABLE


def _caused(by: Exception) -> Exception:
    error = redis_errors.ConnectionError("while connecting")
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (redis_errors.ReadOnlyError("You can't write against a read only replica."), Meaning.READ_ONLY),
        (redis_errors.ResponseError("-READONLY You can't write against a read only replica"), Meaning.READ_ONLY),
        (redis_errors.AuthenticationError("WRONGPASS"), Meaning.MISCONFIGURED),
        (redis_errors.NoPermissionError("NOPERM"), Meaning.MISCONFIGURED),
        (redis_errors.ResponseError("WRONGTYPE Operation against a key"), Meaning.MISCONFIGURED),
        (redis_errors.ResponseError("MOVED 866 h:1"), Meaning.MISCONFIGURED),
        (redis_errors.RedisClusterException("Cluster mode is not enabled on this node"), Meaning.MISCONFIGURED),
        (redis_errors.ResponseError("DB index is out of range"), Meaning.MISCONFIGURED),
        (redis_errors.ResponseError("unknown command 'EVALSHA', with args beginning with: x"), Meaning.MISCONFIGURED),
        (_caused(redis_errors.AuthenticationError("WRONGPASS")), Meaning.MISCONFIGURED),
    ],
    ids=repr,
)
def test_redis_refusals_are_told_apart(error: Any, meaning: Meaning) -> None:
    """Also where redis-py has put its own error around the server's."""
    assert redis.trouble_of(error).meaning is meaning
