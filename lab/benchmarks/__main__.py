"""Measure what the library costs: CPU, the throughput of real workers, and what a full store changes.

Everything is measured in one run and interleaved with what it is compared to, and only medians and ratios
are worth quoting: they survive a noisy machine, absolute times do not.

Without a PART, all of them run, and docs/benchmarks gets the results; name some to run only these and save nothing.

\b
  cpu         CPU per call on DynamoDB, beside bare boto3 and Powertools
  latency     what a store adds that is 1, 5 or 20 ms away, in round trips
  peers       celery-once and celery-singleton on the same Redis: tasks/s, CPU
  own         the library's own code, in calls of a plain task
  growth      each store with 1,000 to 1,000,000 records: CPU, time, listing
  memory      what each store adds to a pool process

BENCH_DYNAMODB_ENDPOINT=http://127.0.0.1:8000 takes another DynamoDB than the embedded one.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console

from celery_idempotent import IdempotencyWarning
from lab import tether
from lab.benchmarks import calls, growth, latency, memory, peers, report
from lab.benchmarks.environment import OTHER_DYNAMODB, DynamoDB, describe
from lab.embedded import EmbeddedAws

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"

PARTS: Mapping[str, tuple[Callable[[DynamoDB, int], report.Section], int, int]] = {
    "cpu": (calls.measure, 800, 60),
    "latency": (latency.measure, 400, 5),
    "peers": (peers.measure, 7, 1),
    "own": (calls.measure_own, 2_000, 100),
    "growth": (growth.measure, 200, 4),
    "memory": (memory.measure, 80, 8),
}
"""By name, what is measured, in how many rounds, and in how many to see that it works."""


@click.command(help=__doc__)
@click.argument("parts", metavar="[PART]...", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--quick", is_flag=True, help="Few rounds and no file: to see that it works.")
def main(parts: Sequence[str], quick: bool) -> None:
    """Run the benchmarks and print what they found."""
    tether.unwind_on_signals()
    console = Console()
    console.width = max(console.width, 118)  # for the widest table, where the output is no terminal
    logging.getLogger("celery_idempotent").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", IdempotencyWarning)  # that memory is for one process: here it is the floor
    environment = describe(quick=quick)
    for name, value in environment.items():
        console.print(f"{name}: {value}", highlight=False)
    sections = []
    with EmbeddedAws() as aws:
        for name in parts or PARTS:
            console.print(f"\nmeasuring {name}", style="dim")
            measure, full, few = PARTS[name]
            sections.append(measure(DynamoDB(OTHER_DYNAMODB or aws.endpoint), few if quick else full))
            report.show(console, sections[-1])
    goals = [goal for section in sections for goal in section.goals]
    console.print(f"\n{sum(goal.reached for goal in goals)} of {len(goals)} goals reached")
    if not quick and not parts:
        report.save(RESULTS, environment, sections)


if __name__ == "__main__":
    main()
