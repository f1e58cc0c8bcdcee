"""What errors of SQL drivers mean; the codes are SQLSTATE, MySQL's error number and SQLite's name."""

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.failures import Meaning, Rule, failure, rule_of
from celery_idempotent.stores.sql.statements import UnreadableRow

OTHER_TABLE = (
    "the table differs from what this prints: celery -A <your app> idempotency ddl; "
    "change it, or use another one by the option table"
)
"""What is wrong with a table that others made."""

CREATION = "celery -A <your app> idempotency provision, or without an app: open_store(URL).provision()"
"""What creates the tables, unless a store has another command."""

_RULES = (
    Rule(meaning=Meaning.DUPLICATE, codes=frozenset({"1062"})),  # first, as every duplicate on MySQL comes here
    Rule(meaning=Meaning.TOO_LARGE, codes=frozenset({"22001", "54000", "1118", "1153", "1406", "SQLITE_TOOBIG"})),
    Rule(
        # A server that gave up its part in a fail-over says this, too; the next connection finds its successor.
        meaning=Meaning.READ_ONLY,
        codes=frozenset({"25006", "1290", "1792", "1836"}),
        remedy="the server only reads; name the primary in idempotency_store",
    ),
    # How Python says that text in SQLite is not UTF-8; it goes on to quote all of it.
    Rule(meaning=Meaning.UNREADABLE, text="^Could not decode to UTF-8"),
    Rule(meaning=Meaning.UNDONE, codes=frozenset({"1213", "40001", "40P01"}), text="^tuple concurrently "),
    Rule(
        # The loser of two CREATEs in the same moment is told by PostgreSQL of the table's type (42710), or of a
        # duplicate in the catalogue (23505); the winner has committed by then.
        meaning=Meaning.ALREADY_THERE,
        codes=frozenset({"42P07", "42710", "23505", "1050", "1061"}),
        text="^(table|index) .* already exists$",
    ),
    Rule(
        codes=frozenset({"42P01", "1146"}),
        text="^no such table",
        remedy="the table does not exist; create it with: {creation}",
    ),
    Rule(
        codes=frozenset({"42703", "42804", "42P10", "23502", "1054", "1072", "1364"}),
        text="no such column|has no column named|does not match any PRIMARY KEY",
        remedy=OTHER_TABLE,
    ),
    Rule(
        codes=frozenset({"3F000", "3D000", "1049"}),
        text='database "[^"]*" does not exist',
        remedy="the database or schema does not exist",
    ),
    Rule(
        codes=frozenset({"42501", "1044", "1142", "1143", "SQLITE_READONLY", "SQLITE_PERM"}),
        remedy="a permission is missing: a worker needs SELECT, INSERT and UPDATE on the table, purging also DELETE; "
        "the outbox takes all four",
    ),
    Rule(
        codes=frozenset({"28P01", "28000", "1045", "1698"}),
        text='authentication failed|no password supplied|no pg_hba.conf entry|role "[^"]*" does not exist',
        remedy="the server refuses this user",
    ),
    Rule(
        text="unexpected keyword argument|invalid connection option|invalid URI query|invalid dsn",
        remedy="the driver does not know an option in the query of the URL",
    ),
    Rule(
        text="unsupported startup parameter",
        remedy="a pooler keeps settings from the server; tell PgBouncer: ignore_startup_parameters = options",
    ),
    Rule(
        text="^pg8000 behind a pooler$",
        remedy="this driver could write to another client's table there; use postgresql+psycopg",
    ),
    Rule(
        codes=frozenset({"SQLITE_CANTOPEN", "SQLITE_NOTADB", "SQLITE_CORRUPT"}),
        remedy="the file cannot be used as a database",
    ),
)


def meaning_of(error: BaseException | None) -> Meaning:
    return Meaning.UNAVAILABLE if error is None else rule_of(_RULES, error, _code(error), _reason(error)).meaning


def explained(
    error: Exception, store: str, operation: str, *, creation: str = CREATION
) -> StoreUnavailable | RecordTooLarge:
    """What a store raises for a driver's error, from :func:`cause_of`; ``creation`` is what makes its tables."""
    reason = _reason(error)
    rule = rule_of(_RULES, error, _code(error), reason)
    if rule.meaning is Meaning.UNREADABLE:
        return UnreadableRow(store, operation, f"a row is damaged: {reason.partition(' with text ')[0]}; look at it")
    return failure(rule, store, operation, reason, creation=creation)


def _code(error: BaseException) -> str:
    first = error.args[0] if error.args else None
    if isinstance(first, int):
        return str(first)  # PyMySQL, mysqlclient
    if isinstance(first, dict):
        return str(first.get("C"))  # pg8000
    names = ("sqlstate", "pgcode", "sqlite_errorname")  # psycopg, psycopg2, sqlite3
    code = next((found for name in names if (found := getattr(error, name, None))), "")
    return "_".join(code.split("_")[:2])  # SQLITE_READONLY_DIRECTORY is a kind of SQLITE_READONLY


def _reason(error: BaseException) -> str:
    """One line; of PostgreSQL's answers without the details, which show values."""
    message = getattr(getattr(error, "diag", None), "message_primary", None)  # psycopg, psycopg2
    if message is None and error.args and isinstance(error.args[0], dict):
        message = error.args[0].get("M")  # pg8000
    return " ".join(str(message or error).split())
