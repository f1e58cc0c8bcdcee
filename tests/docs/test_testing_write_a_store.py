"""how-to/write-a-store.md does what it says: its store is registered by a real entry point and passes the contract."""

import re
import sys

import pytest

from celery_idempotent.testing import OutageContract, StoreContract
from tests.support.documents import DOCS, code, table

pytest_plugins = ["pytester"]

BARE = ("-p", "no:cacheprovider", "-p", "no:celery", "-p", "no:ddtrace", "-p", "no:docker_tools")
"""Without what else is installed here."""

PAGE = DOCS / "how-to/write-a-store.md"
RULES = DOCS / "how-to/write-a-store.md"
OTHERS = DOCS / "how-to/write-a-store.md"


PROGRAM = """
import sys
from celery import Celery
from celery_idempotent import IdempotentTask
from celery_idempotent.stores import open_store

app = Celery("shop", broker="memory://")
app.conf.update(idempotency_store=f"file://{sys.argv[1]}", task_acks_late=True, task_reject_on_worker_lost=True)
open_store(app.conf.idempotency_store).provision()

@app.task(base=IdempotentTask, name="shop.charge")
def charge(order_id):
    print("charging")
    return {"id": "ch_1", "paid": True}

print(charge.apply(("o-1",)).get())
"""


def names_of(*contracts: type) -> set[str]:
    """Names of tests."""
    return {name for contract in contracts for name in dir(contract) if name.startswith("test_")}


@pytest.fixture
def files() -> dict[str, str]:
    """The blocks that begin with their file's name."""
    blocks = [text for page in (PAGE, OTHERS) for _, text in code(page, "python")]
    return {match[1]: text for text in blocks if (match := re.match(r"# (\w+\.py)\n", text))}


@pytest.fixture
def package(pytester: pytest.Pytester, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's store as an installed package: its module, and a dist-info with the page's entry point."""
    ((_, toml),) = code(PAGE, "toml")
    group = re.search(r'^\[project\.entry-points\."(.+)"\]$', toml, re.MULTILINE)
    entries = re.findall(r'^(\w+) = "(.+)"$', toml, re.MULTILINE)
    assert group
    info = pytester.mkdir("filestore-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: filestore\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join([f"[{group[1]}]", *(f"{name} = {value}" for name, value in entries)])
    )
    for name, text in files.items():
        (pytester.path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")


@pytest.mark.usefixtures("package")
def test_store_of_the_page_passes_the_contract(pytester: pytest.Pytester) -> None:
    """Opened by its URL, with every warning an error; no test of the contract is left out."""
    result = pytester.runpytest_subprocess("-W", "error", *BARE)

    result.assert_outcomes(passed=len(names_of(StoreContract)) + len(names_of(OutageContract)))


@pytest.mark.usefixtures("package")
def test_store_of_the_page_is_one_for_tasks(pytester: pytest.Pytester) -> None:
    """A duplicate that another process gets is answered from the folder, by the scheme in the app's setting."""
    pytester.makepyfile(program=PROGRAM)

    first, second = (pytester.run(sys.executable, "program.py", str(pytester.path / "records")) for _ in range(2))

    assert first.outlines == ["charging", "{'id': 'ch_1', 'paid': True}"]
    assert second.outlines == ["{'id': 'ch_1', 'paid': True}"]


def test_store_of_the_page_is_short(files: dict[str, str]) -> None:
    """One file of under eighty lines of code, as wide as the screen."""
    lines = [line for line in files["filestore.py"].splitlines() if line.strip()]

    assert len(lines) < 80
    assert max(map(len, lines)) <= 120


def test_rules_name_the_tests_that_hold_them() -> None:
    """Every test that the page names is in a contract, and every test of the contract is named by a rule."""
    named = set(re.findall(r"`(test_\w+)`", " ".join(row["held by"] for row in table(RULES, "rule"))))

    assert named <= names_of(StoreContract, OutageContract)
    assert named >= names_of(StoreContract)
