"""Every store behaves as the oracle says, step by step, whatever is lost, late or expired."""

import pytest

from celery_idempotent.stores.memory import MemoryStore
from lab.proof.flaws import STORE_FLAWS
from lab.proof.machine import run_machine
from lab.proof.oracle import follow, judge
from lab.proof.targets import ALL
from tests.support.stores import a_store


def some_nightly(*names: str) -> list[object]:
    slow = {"redis-cluster", "mariadb"}
    return [pytest.param(each, marks=[pytest.mark.nightly] if each in slow else []) for each in names]


def test_memory_store_follows_the_oracle() -> None:
    """The store in memory, over many runs."""
    run_machine(MemoryStore, examples=200)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", some_nightly(*ALL))
def test_store_follows_the_oracle(name: str) -> None:
    """A real server's store, over fewer runs of 30 steps, as a request or a connection takes longer."""
    with a_store(name) as url:
        follow(url, examples=50 if name in {"redis", "sqlite"} else 20)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", some_nightly("redis", "postgres", "mariadb", "sqlite"))
def test_store_with_a_mistake_of_its_own_is_noticed(name: str) -> None:
    """The oracle, races or the crash sweep see each mistake that is put into a store's script or statements."""
    with a_store(name) as url:
        flaws = [flaw for flaw, each in STORE_FLAWS.items() if name in each.stores]
        assert [flaw for flaw in flaws if next(judge(name, url, flaw), None) is None] == []
    assert len(flaws) >= 4
