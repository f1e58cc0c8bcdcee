"""The published page: what was attacked, how often a promise broke, beside what else broke under the same fire.

A page has few figures. All of them, and what they were taken from, are tables beside it (CSV).
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.svg import Axis, Bars, bars
from lab.proof.storm import steady
from lab.proof.table import CONTROL, FOLDER, PLAIN, Row, cells, columns, read

__all__ = ["recoveries", "storms", "write"]

Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: its columns, and its rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def as_markdown(self) -> str:
        """For a page or a terminal."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return (
            "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
        )

    def save(self, path: Path) -> None:
        """As CSV, which GitHub shows as a table."""
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self.header, *self.rows])


_INTRODUCTION = """# Reliability

This page is for whoever decides whether to trust the library with money: how it was attacked, how often it broke its
promise, and what else broke under the same fire.

- A **violation** is an operation whose effects, record or answers break its policy's promise: a second charge, none at
  all, two callers told different results, a result reported without an effect.
- A zero proves nothing by itself. Every attack has a **control** beside it, which must fail: a broken variant of the
  library, a store that may forget, or plain Celery.
- After no violation in *n* operations, the true rate is below 3/*n* with 95 % confidence.
"""

_WHAT_IT_IS_NOT = """## What this does not show

- DynamoDB is an emulator (MiniStack) that keeps its data in memory: nothing here ran on AWS.
- Redis (Valkey) and the SQL databases ran as one server each, set to be durable: nothing here is about a fail-over.
- A killed server is not a power failure. Each was seen to sync its file before it answers
  ([test](../../tests/proof/test_synced.py)); disks that lie are not covered.
- On Redis as a broker, kombu loses a message that a killed worker is fetching: workers were killed while they wait.
"""


def write(folder: Path = FOLDER) -> Path:
    """Write the page, its pictures and its tables from all that was kept; the page's path."""
    rows = read(folder)
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    sheets = _sheets(rows, kept)
    for name, sheet in sheets.items():
        sheet.save(folder / f"{name}.csv")
    parts = [
        _INTRODUCTION,
        *_multitude(kept),
        *_peers(folder, rows),
        *_others(rows, kept),
        *_deaths(folder, kept.get("recovery", {})),
        _WHAT_IT_IS_NOT,
        _data(sheets),
    ]
    page = folder / "README.md"
    page.write_text("\n".join(parts))
    return page


def _sheets(rows: Sequence[Row], kept: Mapping[str, Data]) -> dict[str, Sheet]:
    """All that was measured, by the name of its file."""
    sheets = {
        "campaigns": Sheet(columns(), [cells(row) for row in rows]),
        "every-fault": _every_fault(kept),
        "interleavings": _explorations(kept.get("explorer", {}).get("explorations", [])),
        "mutants": _mutants(kept.get("mutants", {}).get("mutants", [])),
        "broken-stores": _broken_stores(kept.get("oracle", {}).get("broken stores", [])),
        "recovery": _recoveries(kept.get("recovery", {}).get("recoveries", [])),
        "storm": _storms(kept.get("storm", {}).get("storms", [])),
    }
    return {name: sheet for name, sheet in sheets.items() if sheet.rows}


_MULTITUDE = """## Faults at every write

Up to three deliveries of each operation ran at once, on the production code and, but for memory, a real server, by a
plan drawn from a seed. A write is lost, unanswered, doubled, overtaken, or lands after the operation ended; a worker
dies before, during or after it, or is cut off; a lease ends early, whether its worker is dead or alive. Only
operations that a fault struck are counted. The controls are four broken variants of the library and a task without
it. The first run found a mistake on Redis, where a late first try set a lease back; these figures are from after it
was mended.
"""


def _multitude(kept: Mapping[str, Data]) -> Iterable[str]:
    found = {name: each["rows"] for name, each in kept.items() if name.startswith("multitude_")}
    if not found:
        return
    largest_first = sorted(found, key=lambda name: -_total(_ours(found[name]), "faulted"))
    lines = [_under_every_fault(found[name], _as_of(kept[name])) for name in largest_first]
    lines.append(_together("all but memory", [found[name] for name in found if name != "multitude_memory"]))
    lines.append(_together("all", found.values()))
    header = ("store", "faulted operations", "violations", "true rate below", "controls seen", "as of")
    yield _MULTITUDE
    yield Sheet(header, lines).as_markdown()


def _under_every_fault(rows: Sequence[Data], as_of: str) -> tuple[str, ...]:
    ours, controls = _ours(rows), [row for row in rows if row["system"] == CONTROL]
    faulted, violations = _total(ours, "faulted"), _total(ours, "violations")
    seen = f"{sum(row['violations'] > 0 for row in controls)} of {len(controls)}"
    return ours[0]["store"], f"{faulted:,}", str(violations), _bound(faulted, violations), seen, as_of


def _together(label: str, campaigns: Iterable[Sequence[Data]]) -> tuple[str, ...]:
    ours = [row for rows in campaigns for row in _ours(rows)]
    faulted, violations = _total(ours, "faulted"), _total(ours, "violations")
    return f"**{label}**", f"**{faulted:,}**", f"**{violations}**", _bound(faulted, violations), "", ""


def _ours(rows: Iterable[Data]) -> list[Data]:
    return [row for row in rows if row["system"] == "celery-idempotent"]


def _total(rows: Iterable[Data], name: str) -> int:
    return sum(row[name] for row in rows)


def _bound(faulted: int, violations: int) -> str:
    return "" if violations or not faulted else f"1 in {faulted // 3:,}"


def _as_of(document: Data) -> str:
    commit: str = document.get("versions", {}).get("commit", "")
    return commit


_PEERS = """## Beside plain Celery and its peers

Ten operations for each fault, on real workers, in one run: how many had their effect **twice**. The message is sent
twice, or the body outlives the broker's visibility timeout; its process is killed before or after the effect, or
stopped for longer than any lease. The last four rows are this library. `rerun`, the default, repeats an effect after a
death unless its receiver honours a *key*. `refuse` repeats nothing: {unknown} operations ended UNKNOWN, for a person.
"""

_FAULTS = {
    "published or delivered twice": "sent twice",
    "body outlives the visibility timeout": "outlives visibility",
    "child killed before the effect": "killed before",
    "child killed after the effect": "killed after",
    "child stopped before the effect, longer than any lease": "stopped",
}


def _peers(folder: Path, rows: Sequence[Row]) -> Iterable[str]:
    met: dict[str, dict[str, int]] = {}
    for row in rows:
        fault, _, used = row.campaign.partition(" (")
        if fault in _FAULTS:
            met.setdefault(_contender(row, used), {})[fault] = row.effects_2
    if not met:
        return
    header = ("twice, of 10", *_FAULTS.values())
    unknown = sum(row.unknown for row in rows if row.campaign.partition(" (")[0] in _FAULTS)
    yield _PEERS.format(unknown=unknown)
    yield Sheet(
        header, [(name, *(found.get(fault, "") for fault in _FAULTS)) for name, found in met.items()]
    ).as_markdown()
    series = {"operations": [float(sum(found.values())) for found in met.values()]}
    axis = Axis("operations with a second effect, of 50")
    (folder / "peers.svg").write_text(bars(Bars("Second effects under five faults", axis, list(met), series)))


def _contender(row: Row, used: str) -> str:
    if row.system != "celery-idempotent":
        return row.system.removesuffix(", acks_late").removesuffix(" in a task").rstrip("0123456789. ")
    if row.promise == "at most once":
        return "refuse"
    return f"rerun{', a key' if 'key' in used else ', ensure_owned()' if used else ''}"


_OTHERS = """## Other attacks
"""

_ATTACKS: Sequence[tuple[str, str, str]] = (
    ("crash_sweep_", "worker killed at every point, pair of points, system call", "broken stores, below"),
    ("effects_", "the same within steps, commits, transactions", "fencing token alone"),
    ("durability_", "store killed and restarted, again and again", "servers that may forget"),
    ("faults", "HTTP requests to DynamoDB lost, late, torn, throttled", "broken library, in its tests"),
    ("soak_", "workers and beats killed, stopped, skewed, cut off", "plain Celery"),
)


def _others(rows: Sequence[Row], kept: Mapping[str, Data]) -> Iterable[str]:
    lines = []
    for prefix, attack, control in _ATTACKS:
        documents = [each for name, each in kept.items() if name.startswith(prefix)]
        if documents:
            lines.append((attack, *_summed(documents, control)))
    if lines:
        header = ("attack", "faulted operations", "violations", "violations of the control", "as of")
        yield _OTHERS
        yield Sheet(header, lines).as_markdown()
    yield "\n".join(_without_faults(kept)).replace("\n\n-", "\n-")


def _summed(documents: Sequence[Data], control: str) -> tuple[object, ...]:
    met = [row for each in documents for row in each["rows"]]
    ours, broken = _ours(met), [row for row in met if row["system"] in (CONTROL, PLAIN)]
    if broken:
        control += f": {_total(broken, 'violations'):,} of {_total(broken, 'tasks'):,}"
    as_of = ", ".join(sorted({_as_of(each) for each in documents}))
    return f"{_total(ours, 'faulted'):,}", _total(ours, "violations"), control, as_of


def _without_faults(kept: Mapping[str, Data]) -> Iterable[str]:
    explored = kept.get("explorer", {})
    if found := explored.get("explorations", []):
        yield _EXPLORED.format(
            programs=len(found), worlds=sum(each["states"] for each in found), as_of=_as_of(explored)
        )
    mutants, stores = kept.get("mutants", {}).get("mutants", []), kept.get("oracle", {}).get("broken stores", [])
    if mutants:
        yield _ON_PURPOSE.format(
            noticed=sum(bool(each["by"]) for each in mutants),
            mutants=len(mutants),
            noticed_stores=sum(bool(each["noticed"]) for each in stores),
            stores=len(stores),
            as_of=_as_of(kept["mutants"]),
            stores_as_of=_as_of(kept.get("oracle", {})),
        )
    if storms := kept.get("storm", {}).get("storms", []):
        most = max(each["questions"]["max"] for each in storms if not each["control"])
        yield _CROWD.format(duplicates=storms[0]["duplicates"], most=most, as_of=_as_of(kept["storm"]))


_EXPLORED = """\
- **Every interleaving**: {programs} programs of two or three deliveries went through all orders of their steps and
  faults, {worlds:,} worlds, and no rule broke ({as_of}).
"""

_ON_PURPOSE = """\
- **Mistakes on purpose**: {noticed} of {mutants} broken variants of the library ({as_of}) and {noticed_stores} of
  {stores} broken stores ({stores_as_of}) were noticed ([list](mutants.csv)).
"""

_CROWD = """\
- **A crowd**: {duplicates:,} duplicates of one running body asked the store at most {most} times each, and the body ran
  once ([picture](../benchmarks/storm.svg), {as_of}).
"""

_DEATHS = """## How long a death is felt

From a SIGKILL to the operation's outcome ([figures](recovery.csv), {as_of}). A worker knows of its own dead pool
processes and of earlier workers on its machine, and ends their leases. Of another machine's it cannot know: there the
lease, 10 s here, is waited for. *Before* is the same library with claims that name no process. Plain Celery waits for
nothing, and repeats effects.
"""

_SYSTEMS = {
    "celery-idempotent": "ours",
    "celery-idempotent, claims name no process": "before",
    "plain Celery, acks_late, reject_on_worker_lost": "plain Celery",
}


def _deaths(folder: Path, kept: Data) -> Iterable[str]:
    found = kept.get("recoveries", [])
    if not found:
        return
    deaths = list(dict.fromkeys(each["death"] for each in found))
    places = [(death, broker) for death in deaths for broker in dict.fromkeys(each["broker"] for each in found)]
    felt = {(_SYSTEMS[each["system"]], each["death"], each["broker"]): each["p50"] for each in found}
    series = {system: [felt.get((system, *place)) for place in places] for system in _SYSTEMS.values()}
    names = [f"{death.partition(',')[0]}, {broker}" for death, broker in places]
    chart = Bars("From a death to the outcome", Axis("seconds (median)"), names, series)
    (folder / "recovery.svg").write_text(bars(chart))
    yield _DEATHS.format(as_of=_as_of(kept))
    peers = "![Second effects under five faults, by system](peers.svg)\n" if (folder / "peers.svg").exists() else ""
    yield f"![From a death to the outcome, in seconds](recovery.svg)\n{peers}"


def _data(sheets: Mapping[str, Sheet]) -> str:
    return _DATA.format(listed=", ".join(f"[{name}]({name}.csv)" for name in sheets))


_DATA = """## All figures, and how to repeat them

As CSV: {listed}. The JSON files beside them are what the campaigns wrote, with versions and seeds. *As of* is the
commit that was attacked; for results from before 2026-11-23, the one that published them. To repeat them: `make prove`,
`make soak MINUTES=15 SEED=20261121 STORE=postgres` and `python -m lab.proof multitude --faulted 100000`.
"""


def _every_fault(kept: Mapping[str, Data]) -> Sheet:
    found = [
        (name.removeprefix("multitude_"), *struck.split(" at ", 1), times)
        for name, each in kept.items()
        for struck, times in each.get("reached", {}).items()
    ]
    return Sheet(("store", "fault", "write", "times"), found)


def _explorations(found: Iterable[Data]) -> Sheet:
    names = ("program", "deliveries", "faults", "states", "transitions", "most effects")
    header = ("program", "deliveries", "faults", "worlds", "steps", "most effects", "kinds of fault met")
    return Sheet(header, [(*(each[name] for name in names), len(each["faults reached"])) for each in found])


def _mutants(found: Iterable[Data]) -> Sheet:
    header = ("mistake", "its like was seen in", "noticed by", "as")
    return Sheet(header, [(each["name"], each["seen in"], each["by"] or "nobody", each["evidence"]) for each in found])


def _broken_stores(found: Iterable[Data]) -> Sheet:
    return Sheet(
        ("store", "mistake", "noticed by"),
        [(each["store"], each["flaw"], ", ".join(each["noticed"]) or "nobody") for each in found],
    )


def recoveries(found: Iterable[Data]) -> str:
    """The table of deaths and what they cost, for a terminal."""
    return _recoveries(found).as_markdown()


def _recoveries(found: Iterable[Data]) -> Sheet:
    return Sheet(
        (
            "killed",
            "system",
            "broker",
            "lease",
            "kills",
            "operations",
            "p50, s",
            "p95, s",
            "max, s",
            "least after the lease, s",
            "conflicts",
        ),
        [
            (
                each["death"],
                each["system"],
                each["broker"],
                "" if each["lease"] is None else f"{each['lease']} s",
                each["kills"],
                each["operations"],
                *(f"{each[name]:.2f}" for name in ("p50", "p95", "max")),
                "" if each["after lease"] is None else f"{each['after lease']:.2f}",
                each["conflicts"],
            )
            for each in sorted(found, key=lambda each: (each["death"] != "pool process", each["death"][0] == "m"))
        ],
    )


def storms(found: Iterable[Data]) -> str:
    """The table of crowds that ask for one body, for a terminal."""
    return _storms(found).as_markdown()


def _storms(found: Iterable[Data]) -> Sheet:
    return Sheet(
        (
            "broker",
            "lease",
            "delays",
            "duplicates",
            "body",
            "bodies run",
            "requests/s, by window",
            "requests/s, steady",
            "questions per duplicate, mean (bound), max",
            "answered after the end, p50 / p95 / max",
        ),
        [
            (
                each["broker"],
                f"{each['lease']} s",
                "do not grow" if each["control"] else "grow",
                f"{each['duplicates']:,}",
                f"{each['body']:g} s",
                each["runs"],
                ", ".join(f"{rate:.0f}" for rate in each["per second"]),
                f"{steady(each['per second']):.1f}",
                f"{each['questions']['mean']:.1f} ({each['bound']:.1f}), {each['questions']['max']}",
                " / ".join(f"{each['late'][name]:.1f} s" for name in ("p50", "p95", "max")),
            )
            for each in found
        ],
    )
