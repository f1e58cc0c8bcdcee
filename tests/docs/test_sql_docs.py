"""The pages on SQL say what the code does."""
# mypy: allow-untyped-decorators

import inspect
import re
from typing import Any

import pytest

from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql.drivers import _DRIVERS
from celery_idempotent.stores.sql.schema import ddl
from celery_idempotent.stores.sql.store import _POOL_SIZE, _TIMEOUT, SQLStore
from tests.support.documents import DOCS, code, table

PAGE = DOCS / "how-to/sql.md"
REFERENCE = DOCS / "reference/sql.md"
SCHEMA = DOCS / "reference/sql.md"


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb"])
def test_ddl_is_the_codes(dialect: str) -> None:
    """The page shows the table of PostgreSQL, and the one that MySQL and MariaDB share."""
    assert ddl(dialect) in [block for _, block in code(SCHEMA, "sql")]


def test_alembic_is_given_the_stores_own_tables() -> None:
    """Under the default names, and under those that the page gives with ``metadata=``."""
    for query, block in zip(("", "?table=effects"), _blocks_for_alembic(), strict=True):
        names: dict[str, Any] = {}
        exec(block, names)
        (metadata,) = names["target_metadata"]
        store = open_store(f"sqlite:////never/opened.sqlite{query}")
        assert isinstance(store, SQLStore)
        assert set(metadata.tables) == {store.table.name, store.outbox.name}
        assert metadata.tables[store.table.name].columns.keys() == store.table.columns.keys()
        assert metadata.tables[store.outbox.name].columns.keys() == store.outbox.columns.keys()


def _blocks_for_alembic() -> list[str]:
    return [block for _, block in code(PAGE, "python") if "target_metadata" in block]


def test_drivers_are_the_codes() -> None:
    """Every driver, no other, with what installs it and a URL that names it."""
    documented = {row["URL"].strip("`").split(":")[0]: row["install"].strip("`") for row in table(REFERENCE, "URL")}

    assert documented == {
        f"{dialect}+{name}": driver.distribution
        for dialect, drivers in _DRIVERS.items()
        for name, driver in drivers.items()
    }
    assert isinstance(open_store(table(REFERENCE, "URL")[0]["URL"].strip("`")), SQLStore)


def test_options_are_the_stores() -> None:
    """Every option, no other, with its default, and what none stands for."""
    documented = table(REFERENCE, "option")
    actual = inspect.signature(SQLStore).parameters

    assert [row["option"].strip("`") for row in documented] == list(actual)
    for row, parameter in zip(documented[1:], list(actual.values())[1:], strict=True):
        assert eval(row["default"].strip("`")) == parameter.default
    nones = {
        row["option"]: int(found[1]) for row in documented if (found := re.search(r"none: (\d+)$", row["meaning"]))
    }
    assert nones == {"`timeout`": _TIMEOUT, "`pool_size`": _POOL_SIZE}
