"""The pure parts of the demo: its ledger, its payment provider, its audit and its verdict."""

import configparser
import multiprocessing
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.demo import audit
from lab.demo.gateway import Gateway
from lab.demo.shop import CHARGE, MAIL, STOCK
from lab.ledger import Ledger, Row
from tests.support.documents import ROOT
from tests.tools.test_project_files import imports

ORDER = "order-0007"


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    """What is half written is read when it is whole, and what is there twice is there twice."""
    first, torn, last = (Row(what="effect", order=f"order-{number}") for number in range(3))
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    ledger.append(first)
    rows, position = ledger.since(0)
    ledger.append(torn)
    whole = file.read_bytes()
    file.write_bytes(whole[: position + 10])
    assert (rows, ledger.since(position)[0]) == ([first], [])
    file.write_bytes(whole)
    assert ledger.since(position)[0] == [torn]
    file.write_bytes(whole[: position + 10])
    for _ in range(2):
        ledger.append(last)
    assert ledger.rows() == [first, last, last]


def _write(ledger: Ledger, name: int) -> list[str]:
    for number in range(200):
        ledger.append(Row(what="run", task=str(name), attempt=number))
    return [Gateway(ledger).charge(ORDER, idempotency_key=f"key-{number}") for number in range(10)]


def test_many_writers_lose_nothing_and_racing_callers_with_one_key_get_one_charge(tmp_path: Path) -> None:
    """A key is one charge, whoever asks; no key is a charge every time."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        charges = pool.starmap(_write, [(ledger, name) for name in range(3)])
    rows = ledger.rows()
    assert len({(row.task, row.attempt) for row in rows if row.what == "run"}) == 600
    assert charges[0] == charges[1] == charges[2]
    assert [sum(row.what == what for row in rows) for what in ("effect", "recognised")] == [10, 20]
    assert Gateway(ledger).charge(ORDER) != Gateway(ledger).charge(ORDER)


def figures(*more: Row, **times: int) -> audit.Figures:
    """Of one order, whose effects happened once unless told otherwise."""
    effects = [
        Row(what=what, task=task, order=ORDER, task_id=f"id-{task}")
        for task in (CHARGE, STOCK, MAIL)
        for _ in range(times.get(task, 1))
        for what in ("run", "effect")
    ]
    return audit.figures([*effects, *more], orders=[ORDER], published=1, seconds=1.0)


def broken(*more: Row, **times: int) -> int:
    return len(audit.broken_promises({"idempotent": figures(*more, **times)}))


def test_a_task_was_redelivered_while_another_process_was_at_it_and_not_after() -> None:
    """A delivery that has not returned is one that has not ended."""
    apart = [Row(what=what, pid=9, task_id="apart") for what in ("delivery", "returned")] * 2
    kills = [Row(what="kill", task=CHARGE, point="before", order=ORDER, pid=pid) for pid in range(2)]
    rows = [*(Row(what="delivery", pid=pid, task_id="same") for pid in range(3)), *apart, *kills]
    found = figures(*rows)
    assert (found["redelivered"], found["killed_before"], found["killed_after"]) == (1, 2, 0)
    assert audit.unended(rows) == 1


@pytest.mark.parametrize("what", ["kill", "lease_lost"])
def test_the_verdict_demands_exactly_what_is_promised(what: str) -> None:
    """A charge is never excused, nor what is missing; a repetition is, by a crash or a lost lease of that very task."""

    def excuse(task: str, order: str = ORDER, point: str = "after") -> Row:
        return Row(what=what, task=task, point=point, order=order, task_id=f"id-{task}" if order == ORDER else "other")

    assert broken() == 0
    assert [broken(excuse(CHARGE), charge_card=times) for times in (0, 2, 3)] == [1, 1, 1]
    for task in (STOCK, MAIL):
        assert (broken(**{task: 2}), broken(excuse(task), **{task: 2}), broken(excuse(task), **{task: 0})) == (1, 0, 1)
    others = [excuse(MAIL), excuse(STOCK, "order-0001")] + [excuse(STOCK, point="before")] * (what == "kill")
    assert [broken(other, reserve_stock=2) for other in others] == [1] * len(others)


FIRE: dict[str, Any] = {"killed_before": 2, "killed_after": 1, "redelivered": 1}


def gaps(plain: Mapping[str, Any] = FIRE, ours: Mapping[str, Any] = FIRE, **planned: int) -> int:
    found = {
        "plain": {**figures(charge_card=2), **FIRE, **plain},
        "idempotent": {**figures(), **FIRE, "replayed": 1, "taken_over": 1, **ours},
    }
    return len(audit.missing_evidence(found, **{"kills": 3, "store_kills": 0, **planned}))


def test_a_demonstration_that_could_not_fail_proves_nothing() -> None:
    """Without a duplicate in the plain column, or without fire in ours; both must meet every planned kill."""
    calm = [{each: 0} for each in ("killed_before", "redelivered", "replayed", "taken_over")]
    assert (gaps(), gaps(plain={"charged_more": 0}), [gaps(ours=each) for each in calm]) == (0, 1, [1] * 4)
    assert (gaps(kills=4), gaps(store_kills=1)) == (2, 2)


OURS = dict.fromkeys(("celery", "click", "kombu", "rich"), "install_requires")


def test_make_demo_installs_all_that_is_imported_at_once() -> None:
    """And little more: what belongs to another store's server is imported where that is started."""
    parts = "demo/* embedded/* fleet ledger servers tether*"
    paths = [path for part in parts.split() for path in (ROOT / "lab").glob(f"{part}.py")]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    demo = config["options.extras_require"]["demo"]
    ours = {"lab", "celery_idempotent", "example_project", *sys.stdlib_module_names}
    for module in imports(*paths, *(ROOT / "example_project").glob("*.py")) - ours:
        extra = {**OURS, "boto3": "dynamodb", "sqlalchemy": "sql"}.get(module, module)
        assert extra == "install_requires" or re.search(rf"^{extra}\b|\[.*\b{extra}\b.*\]", demo, re.MULTILINE), module
