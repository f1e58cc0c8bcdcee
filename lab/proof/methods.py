"""All methods in one table, from the files they keep: what each tried, which controls it noticed, and what broke.

A control is broken on purpose or lacks the library, so a promise must break there, or an effect come twice.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from lab.proof.table import CONTROL, OURS, PLAIN, make_table

Kept = Mapping[str, Any]


class Found(NamedTuple):
    """What one file says; whether each control was noticed."""

    tried: int
    broken: int
    controls: list[bool]


def _in_specification(kept: Kept) -> Found:
    whole = [each for each in kept["checks"] if not each["mistake"]]
    controls = [bool(each["broken"]) for each in kept["checks"] if each["mistake"]]
    return Found(sum(each["states"] for each in whole), sum(bool(each["broken"]) for each in whole), controls)


def _in_traces(kept: Kept) -> Found:
    lines, rejected = (sum(each[what] for each in kept["judged"]) for what in ("lines", "rejected"))
    return Found(lines, rejected, [bool(each["rejected"]) for each in kept["controls"]])


def _in_explorer(kept: Kept) -> Found:
    return Found(sum(each["states"] for each in kept["explorations"]), 0, list(map(bool, kept["controls"].values())))


def _in_mutants(kept: Kept) -> Found:
    noticed = [bool(each["by"]) for each in kept["mutants"]]
    return Found(len(noticed), 0, noticed)


def _in_oracle(kept: Kept) -> Found:
    steps = sum(each["runs"] * each["steps"] for each in kept["followed"])
    return Found(steps, 0, [bool(each["noticed"]) for each in kept["broken stores"]])


def _in_recovery(kept: Kept) -> Found:
    ours = [each for each in kept["recoveries"] if each["system"] == OURS]
    return Found(sum(each["operations"] for each in ours), sum(each["wrong"] for each in ours), [])


def _in_rows(kept: Kept) -> Found:
    ours, controls = list[Kept](), defaultdict[tuple[str, str], int](int)
    for row in kept["rows"]:
        if row["system"] == OURS:
            ours.append(row)
        else:
            is_peer = row["system"] not in {CONTROL, PLAIN}
            controls[row["system"], row["store"]] += row["effects_2" if is_peer else "violations"]
    broken = sum(row["violations"] + row["stuck"] + row["unexplained"] for row in ours)
    noticed = list(kept.get("mistakes", {}).values()) or [seen > 0 for seen in controls.values()]
    return Found(sum(row["faulted"] for row in ours), broken, noticed)


METHODS: Mapping[str, tuple[str, str, Callable[[Kept], Found]]] = {
    "specification": ("specification", "states", _in_specification),
    "traces": ("traces", "requests", _in_traces),
    "explorer": ("explorer", "worlds", _in_explorer),
    "mutants": ("mutants", "mutants", _in_mutants),
    "oracle": ("oracle", "steps", _in_oracle),
    "crash sweep": ("crash_sweep_*", "faulted operations", _in_rows),
    "crash sweep of effects": ("effects_*", "faulted operations", _in_rows),
    "strikes": ("strikes", "struck calls", _in_rows),
    "faults": ("faults_*", "faulted operations", _in_rows),
    "fail-over": ("failover", "faulted operations", _in_rows),
    "fleet": ("fleet", "faulted operations", _in_rows),
    "soak": ("soak_*", "faulted operations", _in_rows),
    "recovery": ("recovery", "operations", _in_recovery),
    "beside peers": ("baselines", "faulted operations", _in_rows),
}
"""By name, which files a method keeps, what it counts, and how one of its files is read."""


def read(folder: Path) -> Iterator[tuple[str, int, str, str, str, int]]:
    """A row for each method that kept something: what was tried and at which commits, controls, what broke."""
    for name, (files, unit, found_in) in METHODS.items():
        documents = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{files}.json"))]
        found = list(map(found_in, documents))
        tried, broken = sum(each.tried for each in found), sum(each.broken for each in found)
        controls = [noticed for each in found for noticed in each.controls]
        commits = ", ".join(dict.fromkeys(each["versions"]["commit"] for each in documents))
        if documents:
            yield name, tried, unit, commits, f"{sum(controls)} / {len(controls)}", broken


def table(folder: Path) -> Table:
    """For a terminal."""
    columns = ("method", "tried", "of", "commit", "controls noticed", "broken")
    return make_table("Every method, and what it found", columns, read(folder), alarm=True)
