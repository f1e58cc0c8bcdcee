"""Measure what the library costs: requests, CPU, key derivation, and the throughput of real workers.

Everything is measured in one run and interleaved with what it is compared to, and only medians and ratios
are worth quoting: they survive a noisy machine, absolute times do not.

Without a PART, all of them run, and the results are saved and drawn; name some to run only these and save nothing.

\b
  requests    requests per path on DynamoDB, beside Powertools
  cpu         CPU per call on DynamoDB, beside bare boto3 and Powertools
  keys        key derivation, beside Powertools
  aws         tasks/s of a worker on SQS and DynamoDB, beside plain Celery
  stores      each store: round trips, CPU, tasks/s
  effects     steps, commits and transactions: requests, write units
  peers       celery-once and celery-singleton on the same Redis: requests, tasks/s
  own         the library's own code, in calls of a plain task
  growth      each store with 1,000 to 1,000,000 records: CPU, time, requests, bytes, listing
  memory      the resident size of one process over 1,000,000 tasks

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
from lab.benchmarks import (
    cpu_per_call,
    effects,
    growth,
    key_derivation,
    memory,
    own_code,
    peers,
    plots,
    report,
    requests_per_path,
    stores,
    throughput,
)
from lab.benchmarks.environment import Servers, described, servers
from lab.benchmarks.payloads import SIZES
from lab.benchmarks.report import Section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often each benchmark is repeated."""

    cpu: int
    keys: int
    workers: int
    stores_cpu: int
    own: int
    growth: int
    #: Records of the largest store.
    largest: int
    memory: int
    #: Whether stores that fill slowly are filled, too.
    big: bool = False


FULL = Rounds(
    cpu=800, keys=25, workers=7, stores_cpu=300, own=2_000, growth=200, largest=max(growth.SIZES), memory=1_000_000
)
QUICK = Rounds(cpu=60, keys=3, workers=1, stores_cpu=20, own=100, growth=20, largest=10_000, memory=10_000)

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
    "requests": Part(lambda where, _, __: requests_per_path.measure(where), lambda _: 0),
    "cpu": Part(
        lambda where, rounds, step: cpu_per_call.measure(where, rounds.cpu, step),
        lambda rounds: cpu_per_call.WARM_UP + rounds.cpu,
    ),
    "keys": Part(
        lambda where, rounds, step: key_derivation.measure(where, rounds.keys, step),
        lambda rounds: rounds.keys * len(SIZES),
    ),
    "aws": Part(
        lambda where, rounds, step: throughput.measure(where, rounds.workers, step),
        lambda rounds: 1 + rounds.workers,
    ),
    "stores": Part(
        lambda where, rounds, step: stores.measure(where, rounds.stores_cpu, rounds.workers, step),
        lambda rounds: stores.WARM_UP + rounds.stores_cpu + 1 + rounds.workers,
    ),
    "effects": Part(lambda where, _, __: effects.measure(where), lambda _: 0),
    "peers": Part(lambda _, rounds, step: peers.measure(rounds.workers, step), lambda rounds: 1 + rounds.workers),
    "own": Part(
        lambda _, rounds, step: own_code.measure(rounds.own, step), lambda rounds: own_code.WARM_UP + rounds.own
    ),
    "growth": Part(
        lambda where, rounds, step: growth.measure(where, rounds.growth, rounds.largest, step, big=rounds.big),
        lambda rounds: growth.WARM_UP + rounds.growth,
    ),
    "memory": Part(lambda _, rounds, step: memory.measure(rounds.memory, step), lambda _: memory.SAMPLES),
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
    help="Folder for the page, its pictures, results.csv, goals.csv and results.json.",
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
        plots.save(results)


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
