"""The example that users copy: small, on its own feet, and right in what its comments say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import KeyReused
from celery_idempotent.stores.memory import MemoryStore
from tests.support.documents import ROOT

EXAMPLE = ROOT / "example_project"


@pytest.fixture
def tasks(unchanged_celery: None) -> Any:
    """The example's tasks on a new store in memory."""
    from example_project import app, tasks

    app.app.conf.idempotency_store = MemoryStore()
    return tasks


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_it_stays_small() -> None:
    """Nobody reads a large example."""
    files = [path for path in EXAMPLE.iterdir() if path.is_file()]
    assert len(files) < 10
    assert sum(len(path.read_text().splitlines()) for path in files if path.suffix == ".py") < 300


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*.py")), ids=lambda path: path.name)
def test_what_is_copied_needs_nothing_of_the_lab(path: Path) -> None:
    """Only the command that starts embedded servers imports them."""
    lab = {each for each in _imports(path) if each.split(".")[0] == "lab"}
    assert lab == ({"lab.embedded"} if path.name == "run.py" else set())


def test_its_page_links_to_what_exists() -> None:
    """Files, and make targets."""
    page = (EXAMPLE / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", page)
    assert links
    assert [link for link in links if not (EXAMPLE / link).exists()] == []
    assert {name for name in re.findall(r"make (\w+)", page) if f"\n{name}:" in (ROOT / "Makefile").read_text()} == {
        "demo",
        "example",
    }


def test_two_messages_are_one_intent(tasks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal messages, and receipts to one mailbox: one result, one effect."""
    for task, first, second in (
        (tasks.charge, ({"id": "o-1", "cents": 500},), ({"id": "o-1", "cents": 500},)),
        (tasks.reserve_stock, ("o-1", "teapot", 1), ("o-1", "teapot", 1)),
        (tasks.send_receipt, ("o-1", "ann@example.com"), ("o-1", " Ann@example.com")),
    ):
        assert task.apply(first).get() == task.apply(second).get()
        assert len(capsys.readouterr().out.splitlines()) == 1


def test_another_article_is_another_intent(tasks: Any) -> None:
    """Both arguments are in the key."""
    assert tasks.reserve_stock.apply(("o-1", "teapot", 1)).get() != tasks.reserve_stock.apply(("o-1", "cup", 1)).get()


def test_another_quantity_is_a_mistake(tasks: Any) -> None:
    """As the comment says: it is not in the key, and must be equal under it."""
    tasks.reserve_stock.apply(("o-1", "teapot", 1))
    assert isinstance(tasks.reserve_stock.apply(("o-1", "teapot", 2)).result, KeyReused)


@pytest.mark.parametrize(
    ("url", "secure"), [("sqs://", True), ("sqs://key:secret@", True), ("sqs://test:test@127.0.0.1:4577//", False)]
)
def test_aws_is_never_spoken_to_in_the_clear(
    unchanged_celery: None, monkeypatch: pytest.MonkeyPatch, url: str, secure: bool
) -> None:
    """An emulator at an address is."""
    monkeypatch.setenv("EXAMPLE_BROKER_URL", url)
    names: dict[str, Any] = {}
    exec(compile((EXAMPLE / "app.py").read_text(), "app.py", "exec"), names)
    assert names["app"].conf.broker_transport_options["is_secure"] is secure
