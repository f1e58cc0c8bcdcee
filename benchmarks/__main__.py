"""Measure what the library costs: requests, CPU, key derivation, and a worker's throughput.

Everything is measured in one run and interleaved with what it is compared to, and only medians and ratios
are worth quoting: they survive a noisy machine, absolute times do not.

BENCH_DYNAMODB_ENDPOINT=http://127.0.0.1:8000 takes another DynamoDB than the embedded one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import cpu_per_call, key_derivation, report, requests_per_path, throughput
from benchmarks.environment import Servers, described, servers
from benchmarks.payloads import SIZES
from benchmarks.report import Section

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each benchmark is repeated."""

    cpu: int
    keys: int
    throughput: int


FULL = Rounds(cpu=800, keys=25, throughput=9)
QUICK = Rounds(cpu=60, keys=3, throughput=1)

_WIDTH = 118
"""Columns that the widest table needs; where the output is no terminal, rich would take 80."""


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Few rounds and no file: to see that it works.")
@click.option(
    "--results",
    default=RESULTS,
    show_default="docs/benchmarks",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.md and results.json.",
)
def main(quick: bool, results: Path) -> None:
    """Run every benchmark and print what it found."""
    rounds = QUICK if quick else FULL
    console = Console()
    console.width = max(console.width, _WIDTH)
    logging.getLogger("celery_idempotent").setLevel(logging.WARNING)
    with servers() as where:
        environment = described(where, quick=quick)
        for name, value in environment.items():
            console.print(f"{name}: {value}", highlight=False)
        sections = []
        for section in _sections(where, rounds, console):
            report.show(console, section)
            sections.append(section)
    goals = [goal for section in sections for goal in section.goals]
    console.print(f"\n{sum(goal.reached for goal in goals)} of {len(goals)} goals reached")
    if not quick:
        report.save(results, environment, sections)


def _sections(where: Servers, rounds: Rounds, console: Console) -> Iterator[Section]:
    yield requests_per_path.measure(where)
    with _bar(console, "CPU per call", rounds.cpu + cpu_per_call.WARM_UP) as step:
        section = cpu_per_call.measure(where, rounds.cpu, step)
    yield section
    with _bar(console, "key derivation", rounds.keys * len(SIZES)) as step:
        section = key_derivation.measure(where, rounds.keys, step)
    yield section
    with _bar(console, "throughput", (rounds.throughput + 1) * len(throughput.BROKERS)) as step:
        section = throughput.measure(where, rounds.throughput, step)
    yield section


@contextmanager
def _bar(console: Console, what: str, steps: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A thread that repaints the bar would compete with what is measured; so it is painted between the rounds.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(what, total=steps)

        def step() -> None:
            progress.advance(bar)
            progress.refresh()

        yield step


if __name__ == "__main__":
    main()
