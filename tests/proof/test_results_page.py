"""The page of results: it is made of the figures beside it, and claims no more than they do."""

from pathlib import Path

from lab.proof.page import write
from lab.proof.table import CONTROL, FOLDER, Row, save


def test_the_published_page_is_made_of_the_published_figures(tmp_path: Path) -> None:
    """Page, tables and pictures: nothing was written by hand, and nothing is left of an earlier run."""
    for path in FOLDER.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write(tmp_path)
    published, made = ({path.name: path.read_text() for path in folder.iterdir()} for folder in (FOLDER, tmp_path))
    assert published.keys() == made.keys()
    assert [name for name in made if made[name] != published[name]] == [], "run: python -m lab.proof --publish table"


def _row(system: str, faulted: int, violations: int) -> Row:
    return Row(
        system=system,
        store="Shelf",
        promise="p",
        campaign="c",
        tasks=faulted,
        faulted=faulted,
        deliveries=faulted,
        violations=violations,
        seconds=1.0,
    )


def _line(folder: Path, rows: list[Row]) -> list[str]:
    """What the table of faults at every write says of a store, but for the commit."""
    save("multitude_shelf", rows, folder)
    (line,) = (each for each in write(folder).read_text().splitlines() if each.startswith("| Shelf "))
    return [cell.strip() for cell in line.split("|")[2:6]]


def test_a_bound_follows_from_operations_that_met_a_fault(tmp_path: Path) -> None:
    """By the rule of three, over all promises; what the controls met is no part of it."""
    rows = [_row("celery-idempotent", 200, 0), _row("celery-idempotent", 100, 0), _row(CONTROL, 5_000, 7)]
    assert _line(tmp_path, rows) == ["300", "0", "1 in 100", "1 of 1"]


def test_a_violation_leaves_no_bound_and_a_blind_control_is_told(tmp_path: Path) -> None:
    """A control without a violation has seen nothing, so the zero beside it says nothing."""
    rows = [_row("celery-idempotent", 300, 2), _row(CONTROL, 10, 0), _row(CONTROL, 10, 1)]
    assert _line(tmp_path, rows) == ["300", "2", "", "1 of 2"]
