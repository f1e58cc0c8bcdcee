"""What calls make a server write is counted where it is written."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from lab.journal import SERVERS, Cost, measure, measure_sqlite
from tests.support.stores import a_store

TARGETS = {"Redis": "redis", "PostgreSQL": "postgres", "MariaDB": "mariadb"}


@pytest.mark.parametrize("name", [*SERVERS, "SQLite"])
def test_new_key_writes_its_record_twice_and_a_duplicate_next_to_nothing(name: str) -> None:
    """A claim and an end hold some hundred bytes each; a duplicate changes no record."""
    run: Callable[[int], Iterator[Cost]] = measure_sqlite if name == "SQLite" else partial(measure, name)
    if name in TARGETS:
        with a_store(TARGETS[name]):  # or the test is skipped
            pass
    new, duplicate = run(50)
    assert (new.call, duplicate.call) == ("new key", "duplicate")
    assert 500 < new.bytes < 100_000
    assert duplicate.bytes < new.bytes / 10
    assert (new.server_us is None) is (name == "SQLite")
