"""Measure what the library costs: CPU, the throughput of real workers, and what a full store changes.

Everything is measured in one run and interleaved with what it is compared to, and only medians and ratios
are worth quoting: they survive a noisy machine, absolute times do not.

Without a PART, all of them run, and the results are saved; name some to run only these and save nothing.

\b
  cpu         CPU per call on DynamoDB, beside bare boto3 and Powertools
  peers       celery-once and celery-singleton on the same Redis: requests, tasks/s
  own         the library's own code, in calls of a plain task
  growth      each store with 1,000 to 1,000,000 records: CPU, time, requests, bytes, listing

BENCH_DYNAMODB_ENDPOINT=http://127.0.0.1:8000 takes another DynamoDB than the embedded one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_idempotent import IdempotencyWarning
from lab import tether
from lab.benchmarks import cpu_per_call, growth, own_code, peers, report
from lab.benchmarks.environment import Servers, described, servers
from lab.benchmarks.report import Section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each benchmark is repeated."""

    cpu: int
    workers: int
    own: int
    growth: int
    #: Records of the largest store.
    largest: int
    #: Whether stores that fill slowly are filled, too.
    big: bool = False


FULL = Rounds(cpu=800, workers=7, own=2_000, growth=200, largest=max(growth.SIZES))
QUICK = Rounds(cpu=60, workers=1, own=100, growth=20, largest=10_000)

_WIDTH = 118
"""Columns that the widest table needs; where the output is no terminal, rich would take 80."""

Step = Callable[[], None]
"""Moves the bar on by one."""


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark.

    Args:
        measure: Does it, with a bar that moves.
        steps: How often the bar moves.
    """

    measure: Callable[[Servers, Rounds, Step], Section]
    steps: Callable[[Rounds], int]


PARTS: Mapping[str, Part] = {
    "cpu": Part(
        lambda where, rounds, step: cpu_per_call.measure(where, rounds.cpu, step),
        lambda rounds: cpu_per_call.WARM_UP + rounds.cpu,
    ),
    "peers": Part(lambda _, rounds, step: peers.measure(rounds.workers, step), lambda rounds: 1 + rounds.workers),
    "own": Part(
        lambda _, rounds, step: own_code.measure(rounds.own, step), lambda rounds: own_code.WARM_UP + rounds.own
    ),
    "growth": Part(
        lambda where, rounds, step: growth.measure(where, rounds.growth, rounds.largest, step, big=rounds.big),
        lambda rounds: growth.WARM_UP + rounds.growth,
    ),
}


@click.command(help=__doc__)
@click.argument("parts", metavar="[PART]...", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--quick", is_flag=True, help="Few rounds and no file: to see that it works.")
@click.option("--big", is_flag=True, help="Part growth: the slow ones, too: MariaDB to 10^6 records, DynamoDB to 10^5.")
@click.option(
    "--results",
    default=RESULTS,
    show_default="docs/benchmarks",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for results.csv, goals.csv and results.json.",
)
def main(parts: Sequence[str], quick: bool, big: bool, results: Path) -> None:
    """Run the benchmarks and print what they found."""
    tether.unwind_on_signals()
    console = Console()
    console.width = max(console.width, _WIDTH)
    logging.getLogger("celery_idempotent").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", IdempotencyWarning)  # that memory is for one process: here it is the floor
    with servers() as where:
        environment = described(where, quick=quick)
        for name, value in environment.items():
            console.print(f"{name}: {value}", highlight=False)
        sections = []
        for section in _sections(parts or list(PARTS), where, replace(QUICK if quick else FULL, big=big), console):
            report.show(console, section)
            sections.append(section)
    goals = [goal for section in sections for goal in section.goals]
    console.print(f"\n{sum(goal.reached for goal in goals)} of {len(goals)} goals reached")
    if not quick and not parts:
        report.save(results, environment, sections)


def _sections(parts: Sequence[str], where: Servers, rounds: Rounds, console: Console) -> Iterator[Section]:
    for name in parts:
        with _bar(console, name, PARTS[name].steps(rounds)) as step:
            section = PARTS[name].measure(where, rounds, step)
        yield section


@contextmanager
def _bar(console: Console, what: str, steps: int) -> Iterator[Step]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A thread that repaints the bar would compete with what is measured; so it is painted between the rounds.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task(what, total=steps)
        progress.refresh()

        def step() -> None:
            progress.advance(bar)
            progress.refresh()

        yield step


if __name__ == "__main__":
    main()
