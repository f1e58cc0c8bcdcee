"""Imports point downwards only; read from the source, so that no import can hide."""

import ast
from pathlib import Path

import celery_idempotent

ROOT = Path(celery_idempotent.__file__).parent

LAYERS: list[dict[str, set[str]]] = [
    # Within a layer, a module may import those that stand before it.
    {"printable": set(), "errors": set(), "record": set(), "_version": set()},
    {
        "store": set(),
        "protocol": set(),
        "paths": {"jmespath"},
        "keys": {"jmespath", "pydantic_core"},
        "codec": {"kombu"},
        "effects": set(),
        "policy": set(),
        "steps": set(),
    },
    {
        "stores.clock": set(),
        "stores.reading": set(),
        "stores.exposure": set(),
        "stores.memory": set(),
        "stores.dynamodb_writes": {"boto3"},
        "stores.dynamodb": {"boto3", "botocore", "mypy_boto3_dynamodb"},
        "stores.sql_schema": {"sqlalchemy"},
        "stores.sql_statements": {"sqlalchemy"},
        "stores.sql_drivers": {"psycopg", "sqlalchemy"},
        "stores.sql_outbox": {"sqlalchemy"},
        "stores.sql_transaction": {"sqlalchemy"},
        "stores.sql_checks": {"sqlalchemy"},
        "stores.sql": {"sqlalchemy"},
        "stores.redis_url": {"redis"},
        "stores.redis_errors": {"redis"},
        "stores.redis": {"redis"},
        "stores": set(),
    },
    {
        "attempt": set(),
        "heartbeat": set(),
        "guard": {"kombu"},
        "transactions": set(),
        "protected": {"kombu"},
        "handle": set(),
        "verdicts": set(),
    },
    {
        "runtime": {"celery", "kombu"},
        "resolution": {"celery"},
        "deliveries": {"celery"},
        "received": {"celery"},
        "binding": {"celery"},
        "startup": {"celery", "click"},
        "signals": {"celery"},
        "handlers": {"celery"},
        "publishing": {"celery", "kombu"},
        "conflicts": {"celery", "kombu"},
        "outbox": {"celery", "kombu"},
        "task": {"celery", "kombu"},
        "cli": {"celery", "click", "kombu"},
    },
    {
        "contrib": set(),
        "contrib.django": set(),
        "contrib.django.transactions": {"django"},
        "contrib.django.store": {"celery", "django", "sqlalchemy"},
        "contrib.django.fields": {"django"},
        "contrib.django.operations": {"django", "sqlalchemy"},
        "contrib.django.templatetags": set(),
        "contrib.django.templatetags.celery_idempotent": {"django"},
        "contrib.django.migrations": set(),
        "contrib.django.migrations.0001_initial": {"django"},
        "contrib.django.migrations.0002_complete_tables": {"django"},
        "contrib.django.models": {"django"},
        "contrib.django.project": {"celery", "django"},
        "contrib.django.display": set(),
        "contrib.django.forms": {"django"},
        "contrib.django.checks": {"django"},
        "contrib.django.apps": {"django"},
        "contrib.django.admin": {"django"},
    },
    {"": set()},
]
"""From the ground up: by layer its modules, and the packages beyond the standard library they may import."""

HALVES = (set(LAYERS[2]), {"attempt", "heartbeat", "guard", "transactions", "protected", "handle", "verdicts"})
"""Two halves of one level: stores know nothing of attempts, attempts nothing of any store."""

PURE = {"printable", "record", "errors", "protocol", "policy", "paths", "keys", "store"}
FORBIDDEN_IN_PURE = {"time", "random", "secrets", "os", "socket", "threading", "logging"}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "celery_idempotent":
                found |= {f"celery_idempotent.{each.name}" for each in node.names}
    return found


def _modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if not name.startswith("testing"):
            found[name] = path
    return found


def test_every_module_has_a_layer() -> None:
    """A new module must be given its place."""
    assert set(_modules()) == {name for layer in LAYERS for name in layer}


def test_imports_point_downwards() -> None:
    """No module imports one of a higher layer, or one of its own that stands after it."""
    below: set[str] = set()
    for layer in LAYERS:
        for name in layer:
            own = {
                each.removeprefix("celery_idempotent").lstrip(".")
                for each in _imports(_modules()[name])
                if each.split(".")[0] == "celery_idempotent"
            } & set(_modules())
            assert own - {""} <= below, f"{name} imports upwards: {own - below}"
            below.add(name)


def test_the_halves_do_not_know_each_other() -> None:
    """Attempts and stores meet only in the Store protocol."""
    for half, other in (HALVES, HALVES[::-1]):
        for name in half:
            used = {each.removeprefix("celery_idempotent.") for each in _imports(_modules()[name])}
            assert not used & other, name


def test_only_declared_packages_are_imported() -> None:
    """Celery is imported by the top layer alone, a driver by its own store alone, and nothing else at all."""
    import sys

    for layer in LAYERS:
        for name, allowed in layer.items():
            roots = {each.split(".")[0] for each in _imports(_modules()[name])}
            assert roots - set(sys.stdlib_module_names) - {"celery_idempotent"} <= allowed, name


def test_the_pure_part_has_no_clock_randomness_or_io() -> None:
    """What decides takes the time and every nonce as an argument."""
    for name in PURE:
        roots = {each.split(".")[0] for each in _imports(_modules()[name])}
        assert not roots & FORBIDDEN_IN_PURE, name


def test_testing_is_imported_by_nobody() -> None:
    """The test kit stands beside the library, not under it."""
    for name, path in _modules().items():
        assert not any(each.startswith("celery_idempotent.testing") for each in _imports(path)), name
