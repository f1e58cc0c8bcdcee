"""``python -m lab.proof``: attack the library and print one table a reader can judge."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab import tether
from lab.proof.explorer import Exploration, Violation, explore
from lab.proof.multitude import STORES
from lab.proof.mutants import MUTANTS, judge
from lab.proof.programs import NOT_ENOUGH, PROGRAMS, Program
from lab.proof.table import CONTROL, FOLDER, PLAIN, Row, as_table, read, save, versions
from lab.proof.targets import ALL, TARGETS, start, why_not

A = TypeVar("A")
B = TypeVar("B")

console = Console(width=None if sys.stdout.isatty() else 140)
"""A log is wider than the 80 characters that are taken for granted where there is no terminal."""

SEED = 20261121


@dataclass(frozen=True, slots=True)
class Scope:
    """How far a program is explored; what each delivery does multiplies the worlds, so there the scope is smaller."""

    program: Program
    deliveries: int
    faults: int


def scopes(quick: bool) -> list[Scope]:
    """What is explored: in minutes, or in seconds."""
    if quick:
        return [Scope(program, program.deliveries, program.few_faults) for program in PROGRAMS]
    return [Scope(program, deliveries, faults) for program in PROGRAMS for deliveries, faults in _far(program)]


def _far(program: Program) -> list[tuple[int, int]]:
    """How many deliveries, and how many ordinary faults; where both at once are too many, one and then the other."""
    if not program.ordinary_faults:
        return [(3, 0)]
    match program.few_faults:
        case 0:
            return [(2, 1)]
        case 1:
            return [(3, 1)] if program.deliveries == 3 else [(2, 2)]
        case _ if program.policy.on_takeover == "refuse":
            return [(3, 2)]
        case _:
            return [(2, 2), (3, 1)]


@click.group()
@click.option("--publish", is_flag=True, help="Keep results under docs/reliability.")
@click.pass_context
def main(context: click.Context, publish: bool) -> None:
    """Attack the production code and report what happened; exits with 1 if a promise was broken.

    Results are kept under build/reliability unless they are to be published.
    """
    logging.getLogger("celery_idempotent").addHandler(logging.NullHandler())  # outages are what is wanted here
    tether.unwind_on_signals()
    context.obj = FOLDER if publish else FOLDER.parent.parent / "build" / "reliability"


def _stores(names: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option that chooses among stores; by default all."""
    return click.option(
        "--store",
        "stores",
        multiple=True,
        default=names,
        type=click.Choice(names),
        help=f"Which store; may be repeated. Default: all of {', '.join(names)}.",
    )


def _folder() -> Path:
    folder: Path = click.get_current_context().find_root().obj
    return folder


@main.command(name="all")
@click.option("--quick", is_flag=True, help="A shorter form of everything, for continuous integration.")
@click.option("--seed", default=SEED, show_default=True, help="Chooses the random faults.")
@click.pass_context
def everything(context: click.Context, quick: bool, seed: int) -> None:
    """Explorer, mutants, oracle, sweeps, strikes, faults, recovery, baselines, and the table of all of them."""
    context.invoke(explorer, quick=quick)
    context.invoke(mutants)
    context.invoke(oracle, examples=50 if quick else 500)
    context.invoke(sweep, quick=quick, tasks=2_000, seed=seed)
    context.invoke(effects, quick=quick)
    context.invoke(strikes, every=11 if quick else 1)
    context.invoke(faults, tasks=500 if quick else 5_000, seed=seed)
    context.invoke(multitude, faulted=1_000 if quick else 20_000, first=0, seed=seed)
    if not quick:
        context.invoke(recovery, seed=seed)
        context.invoke(baselines, seed=seed)
    context.invoke(table)


@main.command()
@click.option("--quick", is_flag=True, help="Two deliveries instead of three.")
def explorer(quick: bool) -> None:
    """All interleavings of two deliveries and two faults, or of three deliveries, on the production code."""
    found = list(_in_processes(_explored, scopes(quick), "exploring"))
    console.print(_explorations(found))
    controls = {program.name: _way_to_two(program) for program in NOT_ENOUGH}
    for name, way in controls.items():
        console.print(f"{name} (a control): {way}")
    _keep("explorer", {"explorations": [_exploration(each) for each in found], "controls": controls})
    for each in found:
        if each.missed:
            missed = ", ".join(sorted(each.missed))
            raise click.ClickException(f"{each.program.name}: never reached {missed}, so it proves nothing")


@main.command()
def mutants() -> None:
    """Broken variants of the production code; each must be noticed."""
    verdicts = list(_in_processes(_judged, range(len(MUTANTS)), "judging mutants"))
    console.print(_verdicts(verdicts))
    _keep("mutants", {"mutants": verdicts})
    survivors = [each["name"] for each in verdicts if not each["by"]]
    if survivors:
        raise click.ClickException(f"nobody noticed: {', '.join(survivors)}")


@main.command()
@_stores(ALL)
@click.option("--examples", default=500, show_default=True, help="Runs of 30 steps in each store.")
def oracle(stores: tuple[str, ...], examples: int) -> None:
    """Every store beside a small oracle; stores that are broken on purpose must be noticed."""
    from lab.proof import broken_stores
    from lab.proof.flaws import STORE_FLAWS

    followed: list[dict[str, object]] = []
    judged: list[dict[str, object]] = []
    for store in _present(stores):
        with start(store) as site:
            with console.status(f"{store} beside the oracle"):
                broken_stores.follow(site.url, examples=examples)
            followed.append({"store": TARGETS[store].label, "runs": examples, "steps": broken_stores.STEPS})
            console.print(f"{store}: {examples} runs of {broken_stores.STEPS} steps agree with the oracle")
            for flaw in [name for name, each in STORE_FLAWS.items() if store in each.stores]:
                with console.status(f"{store}, broken: {flaw}"):
                    noticed = dict(broken_stores.judge(store, site.url, flaw))
                judged.append({"store": TARGETS[store].label, "flaw": flaw, "noticed": noticed})
                console.print(f"{store}, broken: {flaw}: noticed by {', '.join(noticed) or 'NOBODY'}")
    _keep("oracle", {"followed": followed, "broken stores": judged})
    survivors = [f"{each['store']}: {each['flaw']}" for each in judged if not each["noticed"]]
    if survivors:
        raise click.ClickException(f"nobody noticed: {', '.join(survivors)}")


@main.command()
@_stores(ALL)
@click.option("--quick", is_flag=True, help="Only single kills.")
@click.option("--tasks", default=2_000, show_default=True, help="How many tasks are attacked in each store.")
@click.option("--seed", default=SEED, show_default=True)
def sweep(stores: tuple[str, ...], quick: bool, tasks: int, seed: int) -> None:
    """SIGKILL at every point of an attempt, at pairs of points, and at every system call to the store."""
    from lab.proof import crash_sweep

    for store in _present(stores):
        with _counted(f"crash sweep, {store}", None if quick else tasks) as progress:
            rows = crash_sweep.run(store, 0 if quick else tasks, seed, progress)
        _campaign(f"crash_sweep_{store}", rows)


@main.command()
@_stores(ALL)
@click.option("--quick", is_flag=True, help="Only single kills.")
def effects(stores: tuple[str, ...], quick: bool) -> None:
    """SIGKILL at every point, and pair of points, of steps, commits, transactions and fenced steps."""
    from lab.proof import effects_sweep

    for store in _present(stores):
        with _counted(f"effects, {store}", None) as progress:
            rows = effects_sweep.run(store, progress, pairs=not quick)
        _campaign(f"effects_{store}", rows)


@main.command()
@click.option("--every", default=1, show_default=True, help="Strike at every so many lines.")
def strikes(every: int) -> None:
    """Raise an exception of somebody else's at every line of the library, in every kind of call."""
    from lab.proof import strikes as strikes_module

    with _counted("strikes", len(strikes_module.KINDS)) as progress:
        rows, problems = strikes_module.run(progress, every)
    for each in problems[:20]:
        console.print(f"BROKEN {each}")
    _campaign("strikes", rows)


@main.command()
@click.option("--tasks", default=5_000, show_default=True, help="How many tasks are attacked.")
@click.option("--seed", default=SEED, show_default=True)
def faults(tasks: int, seed: int) -> None:
    """Lost, late, doubled, throttled and reset requests between worker and store."""
    from lab.proof import fault_campaign

    with _counted("faults", tasks) as progress:
        rows = fault_campaign.run(tasks, seed, progress)
    _campaign("faults", rows)


@main.command()
@_stores(STORES)
@click.option("--faulted", default=100_000, show_default=True, help="How many operations meet a fault on each store.")
@click.option("--first", default=0, show_default=True, help="Number of the first plan: to go on, or to see one again.")
@click.option("--seed", default=SEED, show_default=True)
def multitude(stores: tuple[str, ...], faulted: int, first: int, seed: int) -> None:
    """Faults at every write, by the hundred thousand, on each store."""
    from lab.proof import multitude as multitude_module

    for store in _present(stores):
        with _counted(f"multitude, {store}", faulted) as progress:
            found = multitude_module.run(store, faulted, seed, progress, first=first)
        for each in found.tally.problems[:10]:
            console.print(f"BROKEN {each.group} of seed {seed}, {each.task}: {'; '.join(each.problems)}")
        _campaign(f"multitude_{store}", found.rows, reached=dict(sorted(found.reached.items())))


@main.command()
@click.option("--minutes", default=5.0, show_default=True, help="How long the fire lasts, for each store.")
@click.option(
    "--seed", default=SEED, show_default=True, help="Chooses load and nemeses; the same again for the same seed."
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    default=("dynamodb",),
    show_default=True,
    type=click.Choice([each for each in ALL if each != "redis-cluster"]),
    help="Which store; may be repeated. Redis, PostgreSQL and MariaDB are also killed and restarted.",
)
@click.option(
    "--broker",
    default="sqs",
    show_default=True,
    type=click.Choice(["sqs", "redis", "rabbitmq"]),
    help="Which broker.",
)
def soak(minutes: float, seed: int, stores: tuple[str, ...], broker: str) -> None:
    """Real prefork workers, beats and a publisher on a real broker, while nemeses kill, stop, skew and cut off."""
    from lab.proof import soak as soak_module

    for store in _present(stores):
        with _told(f"soak, {store}, {broker}") as progress:
            rows = soak_module.run(minutes, seed, progress, store=store, broker=broker)
        _campaign(f"soak_{store}" if broker == "sqs" else f"soak_{store}_{broker}", rows)


@main.command()
@click.option("--seed", default=SEED, show_default=True, help="Chooses the moments of the kills.")
def recovery(seed: int) -> None:
    """Kill pool processes, workers and machines, and measure how long their operations stand still."""
    from lab.proof import recovery as recovery_module

    with _told("recovery") as progress:
        found = recovery_module.run(seed, progress)
    told = [each.as_json() for each in found]
    _keep("recovery", {"seed": seed, "recoveries": told})
    console.print(_recoveries(told))
    wrong, early = sum(each.wrong for each in found), sum(each.early for each in found)
    if wrong or early:
        raise click.ClickException(f"{wrong} operations without an effect or with several, {early} before their lease")


@main.command()
@click.option("--seed", default=SEED, show_default=True)
def baselines(seed: int) -> None:
    """Plain Celery, celery-once, celery-singleton and AWS Powertools under the same fire."""
    from lab.proof import baselines as baselines_module

    with _told("baselines") as progress:
        rows = baselines_module.run(seed, progress)
    _campaign("baselines", rows)


@main.command()
def table() -> None:
    """Print the table of all campaigns that were kept."""
    console.print(as_table(read(_folder())))


def _present(stores: Iterable[str]) -> Iterator[str]:
    """Those that can be started here; one that cannot is an error, once all others had their turn."""
    absent = []
    for store in stores:
        reason = why_not(store)
        if reason is None:
            yield store
        else:
            absent.append(f"{store}: {reason}")
    if absent:
        raise click.ClickException(f"not attacked: {'; '.join(absent)}")


def _ours(row: Row) -> bool:
    return row.system == "celery-idempotent"


def _has_seen_nothing(row: Row) -> bool:
    return row.system in {CONTROL, PLAIN} and not row.violations


def _campaign(name: str, rows: list[Row], **besides: object) -> None:
    save(name, rows, _folder(), **besides)
    console.print(as_table(rows))
    broken = [row for row in filter(_ours, rows) if row.violations or row.stuck or row.unexplained]
    if broken:
        raise click.ClickException(f"{name}: {sum(row.violations for row in broken)} violations; see the table")
    blind = [row.store for row in filter(_has_seen_nothing, rows)]
    if blind:
        raise click.ClickException(f"{name}: no violation on {', '.join(blind)}, so the zeros beside it prove nothing")


@contextmanager
def _counted(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    with Progress(console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)


@contextmanager
def _told(label: str) -> Iterator[Callable[[str], None]]:
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(label, total=None)

        def tell(news: str) -> None:
            if news.startswith("BROKEN"):
                progress.console.print(news)
            progress.update(task, description=f"{label}: {news}")

        yield tell


def _in_processes(work: Callable[[A], B], items: Iterable[A], label: str) -> Iterable[B]:
    listed = list(items)
    with Progress(console=console) as progress, ProcessPoolExecutor() as pool:
        yield from progress.track(pool.map(work, listed), total=len(listed), description=label)


def _explored(scope: Scope) -> Exploration:
    began = time.monotonic()
    found = explore(scope.program, deliveries=scope.deliveries, faults=scope.faults)
    found.seconds = time.monotonic() - began
    return found


def _way_to_two(program: Program) -> str:
    """How what is not enough repeats an effect.

    Raises:
        click.ClickException: It does not, so the explorer has become blind.
    """
    try:
        explore(program, deliveries=2, faults=1)
    except Violation as violation:
        return str(violation)
    raise click.ClickException(f"{program.name}: no way to a second effect was found, so the explorer is blind")


def _judged(number: int) -> dict[str, str]:
    # By number and as words: what a mutant replaces cannot be sent to another process.
    mutant = MUTANTS[number]
    found = judge(mutant)
    return {"name": mutant.name, "seen in": mutant.seen_in, "by": found.by, "evidence": found.evidence}


def _keep(name: str, document: dict[str, object]) -> None:
    _folder().mkdir(parents=True, exist_ok=True)
    (_folder() / f"{name}.json").write_text(json.dumps({"versions": versions(), **document}, indent=1) + "\n")


def _exploration(found: Exploration) -> dict[str, object]:
    return {
        "program": found.program.name,
        "deliveries": found.deliveries,
        "faults": found.faults,
        "states": found.states,
        "transitions": found.transitions,
        "most effects": found.most_effects,
        "faults reached": dict(found.reached),
        "endings": dict(found.ended),
        "seconds": round(found.seconds, 1),
    }


def _explorations(found: Iterable[Exploration]) -> Table:
    table = Table(
        "program",
        "deliveries",
        "faults",
        "worlds",
        "steps",
        "most effects",
        "kinds of fault",
        "seconds",
        title="Every interleaving: no rule was broken",
    )
    for each in found:
        table.add_row(
            each.program.name,
            str(each.deliveries),
            str(each.faults),
            f"{each.states:,}",
            f"{each.transitions:,}",
            str(each.most_effects),
            f"{len(each.reached)} of {len(each.program.faults)}",
            f"{each.seconds:.1f}",
        )
    return table


def _recoveries(found: Iterable[Mapping[str, object]]) -> Table:
    columns = ("death", "system", "broker", "lease", "operations", "p50", "p95", "max", "after lease", "conflicts")
    table = Table(*columns, title="From a death to the outcome, in seconds")
    for each in found:
        table.add_row(*("" if each[column] is None else str(each[column]) for column in columns))
    return table


def _verdicts(verdicts: Iterable[Mapping[str, str]]) -> Table:
    table = Table("mutant", "seen in", "noticed by", "evidence", title="Mutants of the production code")
    for each in verdicts:
        table.add_row(each["name"], each["seen in"], each["by"] or "NOBODY", each["evidence"])
    return table


if __name__ == "__main__":
    sys.exit(main())
