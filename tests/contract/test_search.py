"""What operators search for is found in every store, whatever that leaves out by itself."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from celery_idempotent.engine.search import Filter, find
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_record

LABELS = ("acme/7", "acme/70", "acme", "ACME/7", "a_me/7", "acme%", "", "ÄCME", "a\0b", "a\x1bb", "a\\b", "shop")
KEYS = ("shop:1:ab", "ab", "shop:AB", "shop:o-1", "o-1\\x00", "id-3", "shop", "b_", "%", ":", "a\\", "%" * 60_000)
ASKED = (
    *(Filter(label=each) for each in ("acme/7", "acme/*", "acme*", "a_*", "*", "Ä*", "a\0*", "a\x1b*", "a\\*", "%")),
    *(Filter(key=each) for each in KEYS),
    Filter(label="%" * 60_000 + "*"),
    Filter(worker="w1", older_than=5_000),
    *(Filter(status=each, older_than=1) for each in ("UNKNOWN", "COMPLETED", "FORGOTTEN")),
)


@pytest.fixture(params=["postgresql", "mysql", "sqlite", "redis_server", "redis_cluster"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    servers: Any = request.getfixturevalue(request.param)
    if request.param in {"postgresql", "mysql", "sqlite"}:
        with servers.store() as store:
            yield store
    else:
        url = servers.url if request.param == "redis_server" else f"redis+cluster://{servers.address}"
        with closing(open_store(f"{url}?prefix={{{request.node.name}}}-")) as store:
            yield store


def test_every_store_finds_the_same(store: Store) -> None:
    """As a store that hands out whatever it has; also those that were written first, and no label that is encrypted."""
    memory = MemoryStore(store.now)

    def keep(number: int, label: str, **changes: Any) -> Record:
        key = f"o-{number}\0" if number % 2 else f"shop:1:{'abABb_%'[number // 2 :][:2]}{number}"
        named = {"key": key, "task": "shop", "task_id": f"id-{number}", "worker": f"w{number % 2}", "label": label}
        record = a_record().but(updated_at=number * 1000, **{"status": Status.UNKNOWN, **named, **changes})
        memory.swap(record, None)
        assert store.swap(record, None) == record
        return record

    kept = [keep(*each) for each in enumerate(LABELS)]
    keep(20, "", status=Status.COMPLETED, expires_at=2**33, key="grab:1:ab")
    for asked in ASKED:
        listed = sorted(each.key for each in find(store, asked))
        assert listed == sorted(each.key for each in find(memory, asked)), asked
    first = sorted(each.updated_at for each in find(store, Filter(worker="w1"), oldest=3))[:3]
    assert first == [each.updated_at for each in kept[1:6:2]]
    keep(22, "encrypted:AAAA")
    with pytest.raises(PolicyError, match="is encrypted with a key"):
        list(find(store, Filter(label="acme/*")))
