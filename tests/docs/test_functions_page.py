"""docs/how-to/functions.md: its script charges once, and its retries go on until there is an outcome."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.documents import DOCS, code, execute_block

PAGE = DOCS / "how-to/functions.md"
(SCRIPT,) = code(PAGE, "py")

pytestmark = pytest.mark.usefixtures("unchanged_celery")


class Gateway:
    """Honours keys, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.charges: dict[str, str] = {}
        self.calls = 0

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError
        return self.charges.setdefault(idempotency_key, f"{order_id}:{cents}")

    async def label(self, order_id: str, *, idempotency_key: str) -> str:
        await asyncio.sleep(0)
        return self.charge(order_id, 0, idempotency_key=idempotency_key)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(failures=1)


@pytest.fixture
def page(store: FaultyStore, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's blocks define, on a store in memory."""
    monkeypatch.setattr("celery_idempotent.integration.settings.open_store", lambda url: store)
    monkeypatch.setattr("celery_idempotent.integration.task.guard._by_url", {})
    names = {"gateway": gateway, "carrier": gateway, "__name__": "page"}
    for line, text in code(PAGE, "python"):
        execute_block(PAGE, line, text, names)
    return names


def test_script_charges_once_however_often_it_is_run(tmp_path: Path) -> None:
    """As its comments say."""
    (tmp_path / "charges.py").write_text(SCRIPT[1])
    command = [sys.executable, "charges.py", "o-1"]
    said = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]

    assert said == ["charging 500 for o-1\nch_o-1\n", "ch_o-1\n"]


def test_retries_go_on_until_there_is_an_outcome(page: dict[str, Any], store: FaultyStore, gateway: Gateway) -> None:
    """Over a store that does not answer and a gateway that fails: one charge, and what it gave."""
    store.faults.extend(["request lost", "request lost"])
    refund = page["refund"]
    refund.retry.wait = lambda state: 0

    assert refund("o-1", 5) == refund("o-1", 5) == "o-1:-5"
    assert len(gateway.charges) == 1
    assert gateway.calls == 2
    assert refund.statistics["attempt_number"] == 1


def test_what_is_awaited_is_made_once(page: dict[str, Any], gateway: Gateway) -> None:
    """Ten calls at a time."""
    gateway.failures = 0

    async def ten() -> list[Any]:
        return await asyncio.gather(*(page["ship"]("o-1") for _ in range(10)))

    assert asyncio.run(ten()) == [{"parcel": "o-1:0"}] * 10
    assert gateway.calls == 1
