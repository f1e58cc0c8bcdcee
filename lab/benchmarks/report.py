"""Tables and goals, shown on the terminal and saved as CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.benchmarks.stats import Spread

__all__ = ["Goal", "Grid", "Section", "ratio", "save", "show"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Something the library wants to reach, and what was measured."""

    what: str
    wanted: str
    measured: str
    reached: bool

    @property
    def verdict(self) -> str:
        """For people."""
        return "reached" if self.reached else "NOT reached"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the first column names its rows, the others hold figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark: how it was done, what came out, in words for people and as data."""

    title: str
    method: str
    grids: Sequence[Grid]
    goals: Sequence[Goal] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def ratio(value: Spread) -> str:
    """A ratio for people: median and quartiles."""
    return f"{value.median:.3f} [{value.p25:.3f}-{value.p75:.3f}]"


def show(console: Console, section: Section) -> None:
    """Print ``section``."""
    console.print()
    console.rule(f"[bold]{section.title}")
    console.print(section.method, style="dim", highlight=False)
    for grid in section.grids:
        console.print(_table(grid))
    for goal in section.goals:
        style = "green" if goal.reached else "bold red"
        console.print(f"  {goal.what}: wanted {goal.wanted}, measured {goal.measured}: ", end="", highlight=False)
        console.print(goal.verdict, style=style)


def save(folder: Path, environment: Mapping[str, str], sections: Sequence[Section]) -> None:
    """Write ``results.csv``, a line for each figure, ``goals.csv`` and ``results.json`` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_csv(folder / "results.csv", ("section", "table", "row", "column", "figure"), _figures(sections))
    goals = [
        (each.title, goal.what, goal.wanted, goal.measured, goal.verdict) for each in sections for goal in each.goals
    ]
    _save_csv(folder / "goals.csv", ("section", "goal", "wanted", "measured", "verdict"), goals)
    data = {
        "environment": environment,
        "sections": [
            {
                "title": each.title,
                "method": each.method,
                "data": each.data,
                "goals": [_goal_data(goal) for goal in each.goals],
            }
            for each in sections
        ],
    }
    (folder / "results.json").write_text(json.dumps(data, indent=2) + "\n")


def _table(grid: Grid) -> Table:
    table = Table(title=escape(grid.title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def _figures(sections: Sequence[Section]) -> Iterator[tuple[str, ...]]:
    for section in sections:
        for grid in section.grids:
            for name, *figures in grid.rows:
                for column, figure in zip(grid.columns[1:], figures, strict=True):
                    yield section.title, grid.title, name, column, figure


def _save_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def _goal_data(goal: Goal) -> dict[str, Any]:
    return {"what": goal.what, "wanted": goal.wanted, "measured": goal.measured, "reached": goal.reached}
