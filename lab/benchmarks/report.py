"""Tables and goals, shown on the terminal and saved as CSV and JSON."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape

from lab.proof.table import make_table


@dataclass(frozen=True, slots=True)
class Goal:
    """Something the library wants to reach, and what was measured."""

    what: str
    wanted: str
    measured: str
    reached: bool

    @classmethod
    def at_most(cls, what: str, most: float, measured: float, unit: str = "", *, digits: int = 3) -> Self:
        """A goal that is reached by costing no more."""
        return cls(what, f"at most {most}{unit}", f"{measured:.{digits}f}", measured <= most)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the first column names its rows, the others hold figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark: how it was done, and what came out."""

    title: str
    method: str
    grids: Sequence[Grid]
    goals: Sequence[Goal]


def show(console: Console, section: Section) -> None:
    console.print()
    console.rule(f"[bold]{section.title}")
    console.print(section.method, style="dim", highlight=False)
    for grid in section.grids:
        console.print(make_table(escape(grid.title), grid.columns, grid.rows))
    for goal in section.goals:
        console.print(f"  {goal.what}: wanted {goal.wanted}, measured {goal.measured}: ", end="", highlight=False)
        console.print("[green]reached" if goal.reached else "[bold red]NOT reached")


def save(folder: Path, environment: Mapping[str, str], sections: Sequence[Section]) -> None:
    """Write ``results.csv``, a line for each figure, and ``results.json``, with goals and methods, to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = [
        (section.title, grid.title, name, column, figure)
        for section in sections
        for grid in section.grids
        for name, *row in grid.rows
        for column, figure in zip(grid.columns[1:], row, strict=True)
    ]
    with (folder / "results.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("section", "table", "row", "column", "figure"), *figures])
    kept = [{"title": each.title, "method": each.method, "goals": list(map(asdict, each.goals))} for each in sections]
    (folder / "results.json").write_text(json.dumps({"environment": environment, "sections": kept}, indent=2) + "\n")
