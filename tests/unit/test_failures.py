"""What drivers' errors mean: no answer is never taken for a refusal, and a refusal by its sign alone."""
# mypy: allow-untyped-decorators

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from botocore.parsers import ResponseParserError
from hypothesis import assume, given
from hypothesis import strategies as st
from redis import exceptions as redis

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.dynamodb import items as dynamodb
from celery_idempotent.stores.failures import Meaning, Rule, failure
from celery_idempotent.stores.redis.client import trouble_of
from celery_idempotent.stores.sql import errors as sql
from celery_idempotent.stores.sql.statements import UnreadableRow


def said(*args: Any, **attributes: Any) -> Exception:
    """An error as a driver makes it."""
    error = sqlite3.OperationalError(*args)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def by_postgres(code: str | None, text: str = "said the server") -> list[Exception]:
    """An error as psycopg, psycopg2 and pg8000 say it."""
    return [said(text, sqlstate=code), said(text, pgcode=code), said({"C": code, "M": text} if code else text)]


Driver = Callable[[Any], list[Exception]]
by_mysql: Driver = lambda code: [said(int(code), "said the server")]  # noqa: E731
by_sqlite: Driver = lambda name: [said("said the library", sqlite_errorname=name)]  # noqa: E731


CODES: list[tuple[Meaning, Any, str]] = [
    (Meaning.TOO_LARGE, by_postgres, "22001 54000"),
    (Meaning.READ_ONLY, by_postgres, "25006"),
    (Meaning.UNDONE, by_postgres, "40001 40P01"),
    (Meaning.ALREADY_THERE, by_postgres, "42P07 42710 23505"),
    (Meaning.MISCONFIGURED, by_postgres, "42P01 42703 42804 42P10 23502 3F000 3D000 42501 28P01 28000"),
    (Meaning.TOO_LARGE, by_mysql, "1118 1153 1406"),
    (Meaning.READ_ONLY, by_mysql, "1290 1792 1836"),
    (Meaning.DUPLICATE, by_mysql, "1062"),
    (Meaning.UNDONE, by_mysql, "1213"),
    (Meaning.ALREADY_THERE, by_mysql, "1050 1061"),
    (Meaning.MISCONFIGURED, by_mysql, "1146 1054 1072 1364 1049 1044 1142 1143 1045 1698"),
    (Meaning.TOO_LARGE, by_sqlite, "SQLITE_TOOBIG"),
    (Meaning.MISCONFIGURED, by_sqlite, "SQLITE_READONLY SQLITE_PERM SQLITE_CANTOPEN SQLITE_NOTADB SQLITE_CORRUPT"),
]

TEXTS = {
    "no such table: records": Meaning.MISCONFIGURED,
    "no such column: steps": Meaning.MISCONFIGURED,
    "table records has no column named steps": Meaning.MISCONFIGURED,
    "ON CONFLICT clause does not match any PRIMARY KEY or UNIQUE constraint": Meaning.MISCONFIGURED,
    'connection failed: FATAL:  database "shop" does not exist': Meaning.MISCONFIGURED,
    'FATAL:  password authentication failed for user "shop"': Meaning.MISCONFIGURED,
    "FATAL:  no pg_hba.conf entry for host": Meaning.MISCONFIGURED,
    "connect() got an unexpected keyword argument 'sslmod'": Meaning.MISCONFIGURED,
    'invalid connection option "sslmod"': Meaning.MISCONFIGURED,
    'invalid URI query parameter: "sslmod"': Meaning.MISCONFIGURED,
    "invalid dsn": Meaning.MISCONFIGURED,
    "FATAL:  unsupported startup parameter: options": Meaning.MISCONFIGURED,
    "table records already exists": Meaning.ALREADY_THERE,
    "tuple concurrently updated": Meaning.UNDONE,
    "Could not decode to UTF-8 column 'task' with text 'secret'": Meaning.UNREADABLE,
    # After these a write may have happened.
    "server closed the connection unexpectedly: the server terminated abnormally": Meaning.UNAVAILABLE,
    "consuming input failed: SSL connection has been closed unexpectedly": Meaning.UNAVAILABLE,
    "the database system is starting up": Meaning.UNAVAILABLE,
}

SIGNS = [
    *((error, meaning) for meaning, driver, codes in CODES for code in codes.split() for error in driver(code)),
    *((said(text), meaning) for text, meaning in TEXTS.items()),
]

TOLD: dict[Meaning, type[Exception]] = {
    Meaning.MISCONFIGURED: StoreMisconfigured,
    Meaning.TOO_LARGE: RecordTooLarge,
    Meaning.UNREADABLE: UnreadableRow,
}


@pytest.mark.parametrize(("error", "meaning"), SIGNS, ids=repr)
def test_sql_error_means_what_follows_from_it(error: Exception, meaning: Meaning) -> None:
    """By the code of each driver, and where SQLite or a client library has none, by its text."""
    assert sql.meaning_of(error) is meaning
    assert type(sql.explained(error, "s", "swap")) is TOLD.get(meaning, StoreUnavailable)


@given(
    st.from_regex("[0-9A-Z]{5}", fullmatch=True)
    | st.integers(1000, 5000)
    | st.from_regex("SQLITE_[A-Z]+", fullmatch=True)
)
def test_sql_error_without_such_a_code_is_no_refusal(code: Any) -> None:
    """A write may have happened: it is asked about again, and not sent again as if the database had undone it."""
    assume(str(code) not in {each for _, _, codes in CODES for each in codes.split()})
    driver = by_mysql if isinstance(code, int) else by_sqlite if "_" in code else by_postgres
    assert {sql.meaning_of(error) for error in driver(code)} == {Meaning.UNAVAILABLE}


def test_what_is_stored_is_not_told() -> None:
    """Not by the details of PostgreSQL, nor by SQLite's text that it could not decode."""
    primary = type("Diagnostic", (), {"message_primary": "column has\nanother type"})()
    detailed = said("whole text, with DETAIL: secret", sqlstate="42804", diag=primary)
    for error in (detailed, said("Could not decode to UTF-8 column 'task' with text 'secret'")):
        assert "secret" not in str(sql.explained(error, "s", "get"))
    assert "column has another type" in str(sql.explained(detailed, "s", "get"))


@pytest.mark.parametrize("operation", ["verify", "provision", "swap", "commit", "get"])
def test_server_that_only_reads_is_an_outage_in_the_midst_of_work(operation: str) -> None:
    """There it may be a fail-over; at leisure it is a wrong address."""
    told = failure(Rule(meaning=Meaning.READ_ONLY), "s", operation, "read-only")
    assert type(told) is (StoreMisconfigured if operation in {"verify", "provision"} else StoreUnavailable)


def answer(code: str, message: str = "") -> ClientError:
    """An error that DynamoDB answers."""
    return ClientError({"Error": {"Code": code, "Message": message}}, "PutItem")


_PASSING = "InternalServerError ThrottlingException ExpiredTokenException TransactionConflictException 500"
_REFUSING = "ResourceNotFoundException AccessDeniedException UnrecognizedClientException InvalidSignatureException"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        *((answer(code), StoreUnavailable) for code in _PASSING.split()),
        *((kind(endpoint_url="u"), StoreUnavailable) for kind in (ReadTimeoutError, EndpointConnectionError)),
        (ResponseParserError("Unable to parse response"), StoreUnavailable),
        *((answer(code), StoreMisconfigured) for code in _REFUSING.split()),
        (answer("ValidationException", "One of the required keys was not given a value"), StoreMisconfigured),
        (NoCredentialsError(), StoreMisconfigured),
        (answer("ValidationException", "Item size has exceeded the maximum allowed size"), RecordTooLarge),
    ],
    ids=repr,
)
def test_dynamodb_errors_are_told_apart(error: Exception, told: type[Exception]) -> None:
    """A server that fails while it answers may have written; what is throttled passes; the rest needs somebody."""
    assert type(dynamodb.explained(error, "s", "PutItem", key="id (S)")) is told


NO_CLUSTER = "Cluster mode is not enabled on this node"
REFUSED = redis.ConnectionError("while connecting")  # which redis-py has put around its cause
REFUSED.__cause__ = redis.AuthenticationError("WRONGPASS")


@pytest.mark.parametrize(
    ("meaning", "errors"),
    [
        (Meaning.UNAVAILABLE, [redis.ConnectionError(""), redis.BusyLoadingError(""), redis.ClusterDownError("")]),
        (Meaning.UNAVAILABLE, [redis.OutOfMemoryError(""), redis.InvalidResponse(""), OSError(104, "reset by peer")]),
        (Meaning.UNAVAILABLE, [*map(redis.ResponseError, ["MISCONF cannot persist", "NOREPLICAS"])]),
        (Meaning.READ_ONLY, [redis.ReadOnlyError(""), redis.ResponseError("-READONLY a replica")]),
        (Meaning.MISCONFIGURED, [redis.NoPermissionError(""), redis.RedisClusterException(NO_CLUSTER), REFUSED]),
        (Meaning.MISCONFIGURED, [*map(redis.ResponseError, ["WRONGTYPE Operation", "unknown command 'EVALSHA'"])]),
    ],
)
def test_redis_errors_are_told_apart(meaning: Meaning, errors: list[Exception]) -> None:
    """What passes by itself is no refusal."""
    for error in errors:
        assert trouble_of(error).meaning is meaning, error
