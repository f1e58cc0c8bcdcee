"""``python -m lab.proof``: attack the library and print one table a reader can judge."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import active_children, get_context
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from lab import tether
from lab.proof import (
    baselines,
    campaign,
    failover,
    methods,
    oracle,
    recovery,
    soak,
    specification,
    strikes,
    sweep,
    traces,
)
from lab.proof.explorer import Violation, explore
from lab.proof.flaws import STORE_FLAWS
from lab.proof.mutants import MUTANTS, judge_by_number
from lab.proof.programs import NOT_ENOUGH, PROGRAMS, Program
from lab.proof.table import CONTROL, FOLDER, OURS, PLAIN, Row, keep, make_table, summarize
from lab.proof.targets import ALL, TARGETS, start, why_not
from lab.proof.verdicts import Verdict
from lab.proof.virtual_fleet import FLAWS, simulate, simulate_flaw, sum_up

A = TypeVar("A")

console = Console(width=None if sys.stdout.isatty() else 140)
"""A log is wider than the 80 characters that are taken for granted where there is no terminal."""

SEED = 20261121

logging.getLogger("celery_idempotent").addHandler(logging.NullHandler())  # outages are what is wanted here


def scopes(program: Program, quick: bool) -> list[tuple[int, int]]:
    """With how many deliveries and ordinary faults it is explored, in minutes or in seconds.

    What each delivery does multiplies the worlds; where both at once are too many, one and then the other.
    """
    if quick:
        return [(program.deliveries, program.few_faults)]
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


_quick = click.option("--quick", is_flag=True, help="A shorter form, for continuous integration.")
_seed = click.option("--seed", default=SEED, show_default=True, help="Chooses what is random.")


def _choose_stores(names: Iterable[str], chosen: Iterable[str] | None = None) -> Callable[[Callable[..., None]], Any]:
    """The option that chooses among stores; by default all."""
    listed, shown = tuple(names), tuple(chosen or names)
    text = f"Which store; may be repeated. Default: {', '.join(shown)}."
    return click.option("--store", "stores", multiple=True, default=shown, type=click.Choice(listed), help=text)


@click.group()
@click.option("--publish", is_flag=True, help="Keep results under docs/reliability.")
@click.pass_context
def main(context: click.Context, publish: bool) -> None:
    """Attack the production code and report what happened; exits with 1 if a promise was broken.

    Results are kept under build/reliability unless they are to be published.
    """
    tether.unwind_on_signals()
    context.obj = FOLDER if publish else FOLDER.parent.parent / "build" / "reliability"


@main.command(name="all")
@_quick
@_seed
@click.pass_context
def everything(context: click.Context, quick: bool, seed: int) -> None:
    """All of these but the soak, and one table of them."""
    context.invoke(check_specification, quick=quick)
    context.invoke(judge_traces, quick=quick, seed=seed)
    context.invoke(explore_programs, quick=quick)
    context.invoke(judge_mutants)
    context.invoke(follow_oracle, examples=50 if quick else 500)
    context.invoke(sweep_stores, quick=quick)
    context.invoke(strike_lines, every=11 if quick else 1)
    context.invoke(inject_faults, stores=tuple(TARGETS), faulted=1_000 if quick else 20_000, first=0, seed=seed)
    context.invoke(fail_over, quick=quick)
    context.invoke(simulate_fleet, seeds=2 if quick else 100, seed=seed)
    if not quick:
        context.invoke(measure_recovery, seed=seed)
        context.invoke(try_baselines, seed=seed)
    context.invoke(print_table)


@main.command("specification")
@_quick
def check_specification(quick: bool) -> None:
    """Every order of everything that the specification allows, by Spin, and the mistakes that it must find."""
    found = list(_count(specification.run(quick), "specification"))
    checks = [each.as_json() for each in found]
    _print("The specification, in every order", checks, "bounds", "mistake", "states", "steps", "broken")
    for each in found:
        if each.way:
            console.print(f"{each.bounds.mistake or each.bounds}: {'; '.join(each.way)}")
    _keep("specification", checks=checks)
    _unless((f"{each.bounds}, {each.bounds.mistake}" for each in found if not each.is_right), "not as it must be")


@main.command("traces")
@_quick
@_seed
def judge_traces(quick: bool, seed: int) -> None:
    """What the production code did under explorer, faults, kills and fire, judged by the specification."""
    scoped = [(program, *scope) for program in PROGRAMS for scope in scopes(program, quick)]
    stores = {"memory": 300} if quick else {"memory": 20_000, **dict.fromkeys(("sqlite", "postgres", "redis"), 1_000)}
    more = traces.processes(seed, quick=quick)
    found = list(_count(traces.run(scoped, seed, 20 if quick else 5_000, stores, more), "traces"))
    _print(
        "Traces", (each.as_json() for each in found), "source", "mistake", "traces", "lines", "different", "rejected"
    )
    for each in found:
        console.print("\n".join(each.rejected[:1]), highlight=False)
    ours, controls = ([each for each in found if bool(each.mistake) is wrong] for wrong in (False, True))
    _keep("traces", seed=seed, judged=[each.as_json() for each in ours], controls=[each.as_json() for each in controls])
    _unless((each.source for each in ours if each.rejected), "the specification does not allow what was done")
    _unless((each.mistake for each in controls if not each.rejected), "not rejected")


@main.command("explorer")
@_quick
def explore_programs(quick: bool) -> None:
    """All interleavings of two deliveries and two faults, or of three deliveries, on the production code."""
    scoped = [(program, *scope) for program in PROGRAMS for scope in scopes(program, quick)]
    found = list(_in_processes(explore, "exploring", *zip(*scoped, strict=True)))
    explorations, columns = [each.as_json() for each in found], ("states", "transitions", "most effects")
    _print("Every interleaving: no rule was broken", explorations, "program", "deliveries", "faults", *columns)
    controls = {program.name: _way_to_two(program) for program in NOT_ENOUGH}
    for name, way in controls.items():
        console.print(f"{name} (a control): {way}")
    _keep("explorer", explorations=explorations, controls=controls)
    missed = (f"{each.program.name}: {fault}" for each in found for fault in sorted(each.missed))
    _unless(missed, "never reached, so it proves nothing")


@main.command("mutants")
def judge_mutants() -> None:
    """Broken variants of the production code; each must be noticed."""
    verdicts = list(_in_processes(judge_by_number, "judging mutants", range(len(MUTANTS))))
    _print("Mutants of the production code, and by whom each is noticed", verdicts, "name", "seen in", "by", "evidence")
    _keep("mutants", mutants=verdicts)
    _unless((each["name"] for each in verdicts if not each["by"]), "nobody noticed")


@main.command("oracle")
@_choose_stores(ALL)
@click.option("--examples", default=500, show_default=True, help="Runs of 30 steps in each store.")
def follow_oracle(stores: Iterable[str], examples: int) -> None:
    """Every store beside a small oracle; stores that are broken on purpose must be noticed."""
    followed: list[dict[str, object]] = []
    judged: list[dict[str, object]] = []
    for store in _present(stores):
        with start(store) as url:
            oracle.follow(url, examples=examples)
            followed.append({"store": TARGETS[store].label, "runs": examples, "steps": oracle.STEPS})
            console.print(f"{store}: {examples} runs of {oracle.STEPS} steps agree with the oracle")
            for flaw in [name for name, each in STORE_FLAWS.items() if store in each.stores]:
                noticed = dict(oracle.judge(store, url, flaw))
                judged.append({"store": TARGETS[store].label, "flaw": flaw, "noticed": noticed})
                console.print(f"{store}, broken: {flaw}: noticed by {', '.join(noticed) or 'NOBODY'}")
    _keep("oracle", followed=followed, **{"broken stores": judged})
    _unless((f"{each['store']}: {each['flaw']}" for each in judged if not each["noticed"]), "nobody noticed")


@main.command("sweep")
@_choose_stores(ALL)
@_quick
def sweep_stores(stores: Iterable[str], quick: bool) -> None:
    """SIGKILL at every point, pair of points and system call of an attempt, and within every kind of effect."""
    for store in _present(stores):
        how = "singles" if quick else "points"
        with _show_progress(f"crash sweep, {store}") as progress:
            rows = sweep.run(store, progress, how)
        _campaign(f"crash_sweep_{store}", rows)
        with _show_progress(f"effects, {store}") as progress:
            rows = sweep.sweep(how, sweep.kinds_of(store), target=store, progress=progress).rows
        _campaign(f"effects_{store}", rows)


@main.command("strikes")
@click.option("--every", default=1, show_default=True, help="Strike at every so many lines.")
def strike_lines(every: int) -> None:
    """Raise an exception of somebody else's at every line of the library, in every kind of call."""
    with _show_progress("strikes") as progress:
        found = strikes.run(progress, every)
    _campaign("strikes", found.rows, found.problems)


@main.command("faults")
@_choose_stores(TARGETS)
@click.option("--faulted", default=5_000, show_default=True, help="How many operations meet a fault on each store.")
@click.option("--first", default=0, show_default=True, help="Number of the first plan: to go on, or to see one again.")
@_seed
def inject_faults(stores: Iterable[str], faulted: int, first: int, seed: int) -> None:
    """Faults at every write on each store."""
    for store in _present(stores):
        with _show_progress(f"faults, {store}") as progress:
            found = campaign.run(store, faulted, seed, progress, first=first)
        _campaign(f"faults_{store}", found.rows, found.problems, reached=dict(sorted(found.reached.items())))


@main.command("soak")
@click.option("--minutes", default=5.0, show_default=True, help="How long the fire lasts, for each store.")
@_seed
@_choose_stores([each for each in ALL if each not in {"redis-cluster", "sqlite"}], ["dynamodb"])
@click.option("--broker", default="sqs", show_default=True, type=click.Choice(["sqs", "redis", "rabbitmq"]))
def soak_workers(minutes: float, seed: int, stores: Iterable[str], broker: str) -> None:
    """Real prefork workers on a real broker, while nemeses kill, stop and cut off."""
    for store in _present(stores):
        with _show_progress(f"soak, {store}, {broker}") as progress:
            rows = soak.run(minutes, seed, progress, store=store, broker=broker)
        _campaign(f"soak_{store}" if broker == "sqs" else f"soak_{store}_{broker}", rows)


@main.command("fleet")
@click.option("--seeds", default=20, show_default=True, help="How many hours.")
@_seed
def simulate_fleet(seeds: int, seed: int) -> None:
    """Hours of 50 workers under one virtual clock, with deaths, stalls and outages; mistakes must be noticed."""
    began = time.monotonic()
    hours = list(_in_processes(simulate, "hours of a fleet", range(seed, seed + seeds)))
    controls = list(_in_processes(simulate_flaw, "their controls", FLAWS))
    for number, counts in enumerate(hours, seed):
        console.print(*(f"hour {number}: {each}" for each in counts if "BROKEN" in each), sep="\n", end="")
    common: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "seed": seed}
    blind = sum_up(controls, system=CONTROL, **{**common, "store": f"virtual, {len(controls)} mistakes"})
    mistakes = {name: bool(counts) for name, counts in zip(FLAWS, controls, strict=True)}
    _campaign("fleet", [sum_up(hours, system=OURS, **common), blind], hours=seeds, mistakes=mistakes)
    _unless((name for name, noticed in mistakes.items() if not noticed), "nobody noticed")


@main.command("recovery")
@_seed
def measure_recovery(seed: int) -> None:
    """Kill pool processes, workers and machines, and measure how long their operations stand still."""
    with _show_progress("recovery") as progress:
        found = recovery.run(seed, progress)
    told = [each.as_json() for each in found]
    _keep("recovery", seed=seed, recoveries=told)
    columns = ("death", "system", "broker", "lease", "operations", "p50", "p95", "max", "after lease", "conflicts")
    _print("From a death to the outcome, in seconds", told, *columns)
    wrong, early = sum(each.wrong for each in found), sum(each.early for each in found)
    if wrong or early:
        raise click.ClickException(f"{wrong} operations without an effect or with several, {early} before their lease")


@main.command("failover")
@_quick
def fail_over(quick: bool) -> None:
    """Promote replicas of Valkey and PostgreSQL that lack what was acknowledged, under real workers."""
    with _show_progress("failover") as progress:
        found = failover.run(failover.plan(quick=quick), progress)
    told = [each.figures for each in found]
    columns = ("pair", "primary", "promotions", "operations", "lost", "different", "stuck", "p50", "max")
    _print("From the loss of a primary until all is well, in seconds", told, *columns)
    _campaign("failover", [row for each in found for row in each.rows], failovers=told)


@main.command("baselines")
@_seed
def try_baselines(seed: int) -> None:
    """Plain Celery, celery-once, celery-singleton and AWS Powertools under the same fire."""
    with _show_progress("baselines") as progress:
        rows = baselines.run(seed, progress)
    _campaign("baselines", rows)


@main.command(name="table")
def print_table() -> None:
    """Print one table of all methods, from what they kept."""
    console.print(methods.table(_folder()))


def _folder() -> Path:
    folder: Path = click.get_current_context().find_root().obj
    return folder


def _print(title: str, found: Iterable[Mapping[str, object]], *columns: str) -> None:
    console.print(make_table(title, columns, map(itemgetter(*columns), found)))


def _keep(name: str, **found: object) -> None:
    keep(name, _folder(), **found)


def _present(stores: Iterable[str]) -> Iterator[str]:
    """Those that can be started here; one that cannot is an error, once all others had their turn."""
    yield from (store for store in stores if not why_not(store))
    _unless((f"{store} ({reason})" for store in stores if (reason := why_not(store))), "not attacked")


def _unless(unseen: Iterable[str], what: str) -> None:
    if listed := ", ".join(unseen):
        raise click.ClickException(f"{what}: {listed}")


def _campaign(name: str, rows: list[Row], problems: Sequence[Verdict] = (), **besides: object) -> None:
    for each in problems[:20]:
        console.print(f"BROKEN {each.task}: {'; '.join(each.problems)}")
    _keep(name, rows=rows, **besides)
    console.print(summarize(rows))
    ours = [row for row in rows if row.system == OURS]
    broken = [row for row in ours if row.violations or row.stuck or row.unexplained]
    if broken:
        raise click.ClickException(f"{name}: {sum(row.violations for row in broken)} violations; see the table")
    blind = [row.store for row in rows if row.system in {CONTROL, PLAIN} and not row.violations]
    _unless(blind, f"{name}: the zeros prove nothing, as no violation was seen on")


@contextmanager
def _show_progress(label: str) -> Iterator[Callable[[object], None]]:
    """Takes how many tasks are done since the last call, or news in a line; what is broken stays on the screen."""
    done = 0
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(label, total=None)

        def tell(news: object) -> None:
            nonlocal done
            done += news if isinstance(news, int) else 0
            if str(news).startswith("BROKEN"):
                progress.console.print(news)
            progress.update(task, description=f"{label}: {f'{done:,}' if isinstance(news, int) else news}")

        yield tell


def _count(items: Iterable[A], label: str) -> Iterator[A]:
    with _show_progress(label) as tell:
        for item in items:
            tell(1)
            yield item


def _in_processes(work: Callable[..., A], label: str, *given: Iterable[Any]) -> Iterator[A]:
    # Fresh ones: a hook around a fork would swallow the exception of a signal, and this campaign would go on for ever.
    fresh = get_context("spawn")
    with ProcessPoolExecutor(mp_context=fresh, initializer=tether.end_with_parent) as pool, ExitStack() as stack:
        # Or the pool waits for what they are at.
        stack.callback(lambda: list(map(methodcaller("kill"), active_children())))
        yield from _count(pool.map(work, *given), label)


def _way_to_two(program: Program) -> str:
    """How what is not enough repeats an effect."""
    try:
        explore(program, deliveries=2, faults=1)
    except Violation as violation:
        return str(violation)
    raise click.ClickException(f"{program.name}: no way to a second effect was found, so the explorer is blind")


if __name__ == "__main__":
    sys.exit(main())
