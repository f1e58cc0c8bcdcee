"""The table of all methods: what is kept is read, and nothing that broke or was not noticed is lost."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lab.proof import methods
from lab.proof.table import CONTROL, FOLDER, OURS, Row, keep

ROW = Row(
    system=OURS,
    store="s",
    promise="at least once",
    campaign="c",
    tasks=9,
    faulted=7,
    deliveries=9,
    violations=0,
    seconds=1.0,
)


def test_what_broke_and_what_was_not_noticed_is_told(tmp_path: Path) -> None:
    """Of each file of a method, and of each control by its store."""
    blind, noticed = replace(ROW, system=CONTROL), replace(ROW, system=CONTROL, store="t", violations=3)
    keep("faults_s", tmp_path, rows=[ROW, replace(ROW, violations=2), blind, noticed])
    keep("faults_t", tmp_path, rows=[replace(ROW, stuck=1)])
    checks = [{"states": 5, "mistake": mistake, "broken": mistake} for mistake in ("", "no owner")]
    keep("specification", tmp_path, checks=checks)
    assert [(name, tried, *told[1:]) for name, tried, _, *told in methods.read(tmp_path)] == [
        ("specification", 5, "1 / 1", 0),
        ("faults", 21, "1 / 2", 3),
    ]


def test_what_is_published_is_read_and_fits_a_terminal_with_all_numbers_whole() -> None:
    """Nothing broke, and all controls were noticed."""
    rows = list(methods.read(FOLDER))
    assert len(rows) > 9
    assert all(len(set(controls.split(" / "))) == 1 and not broken for *_, controls, broken in rows)
    console = Console(width=80)
    with console.capture() as printed:
        console.print(methods.table(FOLDER))
    assert all(f" {row[1]:,} " in printed.get() for row in rows)
