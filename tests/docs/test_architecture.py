"""What the pages say of the source is so: the rooms, the tables that decide, and every step of one delivery."""

import ast
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from celery_idempotent import Policy
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, decide, ended, given_up, released, settle
from celery_idempotent.protocol.record import Record, Status
from tests.support.documents import DOCS, ROOT, table
from tests.support.layers import FLOORS, MAY_USE, MODULES, modules_used

ROOMS = DOCS / "architecture.md"
DECIDED = DOCS / "reference/record.md"
DELIVERY = DOCS / "explanation/one-delivery.md"
PACKAGE = ROOT / "celery_idempotent"
WALK = table(DELIVERY, "step")
LEASE = GRACE = RETAIN = 1000
NOW = 1_700_000_000_000


def test_the_table_of_rooms_is_the_one_that_the_linter_enforces() -> None:
    """The same rooms, from the ground up, each with the rooms that it may import from."""
    documented = {_word(row["room"]): set(_words(row["may import from"])) for row in table(ROOMS, "room")}
    assert list(documented) == list(MAY_USE), "docs/architecture.md: the rooms of MAY_USE in tests/support/layers.py"
    assert documented == MAY_USE, "docs/architecture.md: a room may import from others than MAY_USE says"


def test_the_floors_of_the_integration_are_those_that_the_linter_enforces() -> None:
    """The modules that every room may use, then the rooms in the order of the test."""
    ground, *rooms = (_words(row["floor of `integration`"]) for row in table(ROOMS, "floor of `integration`"))
    modules = {name.split(".")[1] for name in MODULES if name.startswith("integration.")}
    assert [name for row in rooms for name in row] == list(FLOORS)
    assert {*ground, *FLOORS, "__init__"} == modules


def _by(policy: Policy) -> Operation:
    return Operation(identity=Identity("k", "f"), policy=policy, task="t", task_id="i", worker="w")


RERUN = _by(Policy(lease=1))
POISON = _by(Policy(lease=1, max_takeovers=5))
REFUSE = _by(Policy(lease=1, on_takeover="refuse"))

CLAIMED = Record(
    key="k",
    status=Status.IN_PROGRESS,
    revision="r",
    owner="o",
    fencing_token=NOW,
    lease_until=NOW + LEASE,
    fingerprint="f",
    attempts=1,
    created_at=NOW,
    updated_at=NOW,
    task="t",
    task_id="i",
    worker="w",
)
COMPLETED = ended(CLAIMED, Status.COMPLETED, NOW, RETAIN, "r2")
OVER = NOW + LEASE + GRACE

DECISIONS: dict[str, list[tuple[Record | None, Operation, int]]] = {
    "none, or an outcome past its expiry": [
        (None, RERUN, NOW),
        (replace(COMPLETED, fingerprint="other"), RERUN, NOW + RETAIN),
    ],
    "of other arguments, and not `RELEASED`, or with a step": [
        (replace(CLAIMED, fingerprint="other"), RERUN, OVER),
        (replace(released(CLAIMED, NOW, "r2"), fingerprint="other", steps={"a": {}}), RERUN, OVER),
    ],
    "`COMPLETED`": [(COMPLETED, RERUN, NOW)],
    "`FAILED`": [(ended(CLAIMED, Status.FAILED, NOW, RETAIN, "r2", error="e"), RERUN, NOW)],
    "`UNKNOWN`": [(given_up(CLAIMED, NOW, "r2", "why"), RERUN, OVER)],
    "`RELEASED`": [
        (released(CLAIMED, NOW, "r2"), REFUSE, NOW),
        (replace(released(CLAIMED, NOW, "r2"), fingerprint="other"), REFUSE, NOW),
    ],
    "`IN_PROGRESS`, its lease or the grace after it running": [
        (CLAIMED, RERUN, NOW),
        (CLAIMED, REFUSE, OVER - 1),
    ],
    '`IN_PROGRESS`, both over, under `"rerun"`': [(CLAIMED, RERUN, OVER)],
    "`IN_PROGRESS`, both over, after `max_takeovers` takeovers": [(replace(CLAIMED, takeovers=5), POISON, OVER)],
    '`IN_PROGRESS`, both over, under `"refuse"`': [(CLAIMED, REFUSE, OVER)],
}
"""By its row: records seen, which operation asks, and when."""


def test_decisions_are_the_codes() -> None:
    """Each row is what the production table decides about such records."""
    documented = {row["record"]: _word(row["decision"]) for row in table(DECIDED, "record")}
    assert list(documented) == list(DECISIONS)
    decided = {row: {_decision(*case) for case in cases} for row, cases in DECISIONS.items()}
    assert decided == {row: {decision} for row, decision in documented.items()}


def _decision(record: Record | None, operation: Operation, now: int) -> str:
    return type(decide(record, operation, now, owner="another attempt", revision="another write")).__name__


SETTLEMENTS = {
    "the write itself": COMPLETED,
    "the attempt's own record, in a state that it may go on from": replace(CLAIMED, revision="a renewal"),
    "nothing": None,
    "`COMPLETED` by somebody else, with the same arguments": replace(COMPLETED, owner="another attempt", revision="r3"),
    "anything else": replace(CLAIMED, owner="another attempt", revision="r3"),
}
"""By its row: what the store holds after the completion was sent."""


def test_settlements_are_the_codes() -> None:
    """Each row is what the production code makes of a write and of what is stored now."""
    documented = {row["stored"]: _word(row["settlement"]) for row in table(DECIDED, "stored")}
    assert documented == {row: type(settle(COMPLETED, stored)).__name__ for row, stored in SETTLEMENTS.items()}


@pytest.mark.parametrize("row", WALK, ids=lambda row: row["step"])
def test_a_step_of_the_walk_is_in_the_source(row: dict[str, str]) -> None:
    """The file is there, is linked, and defines what the step names."""
    module, name = _module(row), _word(row["function"])
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    here = f"docs/explanation/one-delivery.md, step {row['step']}"
    assert path.is_file(), f"{here}: {path.relative_to(ROOT)} is gone; name the file that does this now"
    target = re.search(r"\]\((.+)\)", row["file"])
    assert target, f"{here}: link the file"
    assert (DELIVERY.parent / target[1]).resolve() == path, f"{here}: the link leads to another file than its text"
    assert name in _defined(path), f"{here}: {path.relative_to(ROOT)} defines no {name}; name what does this now"


@pytest.mark.parametrize(("row", "following"), list(pairwise(WALK)), ids=lambda row: row["step"])
def test_each_step_knows_the_next(row: dict[str, str], following: dict[str, str]) -> None:
    """The module of a step imports that of the next, or is imported by it, on the way back."""
    one, other = _module(row), _module(following)
    assert one == other or other in modules_used(one) or one in modules_used(other), (
        f"docs/explanation/one-delivery.md, steps {row['step']} and {following['step']}: neither of {one} and {other} "
        "imports the other, so something stands between them; name it"
    )


def test_the_walk_leads_from_publishing_to_a_store_and_back() -> None:
    """It is numbered, begins and ends where Celery is, and comes to a store's `swap` on the way."""
    assert [row["step"] for row in WALK] == [str(number) for number in range(1, len(WALK) + 1)]
    first, last = WALK[0], WALK[-1]
    assert _word(first["function"]).endswith(".apply_async")
    assert _module(first) == _module(last)
    swaps = {_module(row) for row in WALK if _word(row["function"]).endswith(".swap")}
    assert any(module.startswith("stores.") for module in swaps)


def _module(row: dict[str, str]) -> str:
    """The module of a row's file, by its name in the package."""
    module = _word(row["file"]).removesuffix(".py").replace("/", ".")
    if f"integration.{module}" in MODULES:
        module = f"integration.{module}"
    return f"{module}.__init__" if f"{module}.__init__" in MODULES else module


def _defined(path: Path) -> set[str]:
    """The functions and classes of a file, and their methods with the class before a dot."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _word(cell: str) -> str:
    (word,) = _words(cell)
    return word
