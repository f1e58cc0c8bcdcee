"""The published page: prose that says how to read it, and tables made from what the campaigns kept."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from proof.table import FOLDER, as_markdown, read

__all__ = ["write"]

_INTRODUCTION = """# Reliability

How this library was attacked, and what came of it. Everything here is made by `python -m proof table` from the JSON
files beside it, which the campaigns wrote; seeds and versions stand in them. To do it again: `make prove` (minutes)
and `make soak MINUTES=15 SEED=20261121`.

A zero proves nothing without something that is not zero beside it. So there are broken variants of the library that
must be noticed, and other systems under the same fire.
"""

_INTERLEAVINGS = """
## Every interleaving

`proof/explorer.py` drives the production decision table, attempt and guard, not a model of them, through every
interleaving of a few deliveries of one key. At every step the world may kill a delivery before its request is sent or
with the request on the way (it lands at any later time, or never), lose a reply or a request, put the store out of
reach, or end the running lease. Worlds that were seen before are not explored twice.

In every world: no final state changes; the fencing token grows with every claim; an attempt ends only its own claim;
all reported results are equal; nothing is reported done without an effect; under `refuse` there is at most one
effect; a clean delivery afterwards always gets an answer that fits; and if nobody was hindered, somebody ran.

"Most effects" over 1 is what `rerun` means: an attempt died, or slept through its lease, after its effect.
"""

_MUTANTS = """
## Mistakes that are noticed

Each row is a change to the production code, of a kind that was seen in a published library or made on the way here. It
must be noticed by the explorer, the store contract or the property tests; a survivor fails the build.
"""

_CAMPAIGNS = """
## Campaigns

Real processes and real stores over HTTP. Effects are counted in a ledger without unique constraint.

- **Crash sweep**: SIGKILL at every point of an attempt and at pairs of points, then at every system call that talks to
  the store, with no hook in the code. Two clean deliveries follow.
- **Faults**: requests that fail before or after they were applied, are delayed, doubled, held and delivered late,
  throttled or reset; each operation, each promise, then pairs and random sequences, with concurrent deliveries.
- **Soak**: real prefork workers on SQS with a short visibility timeout and duplicates published on purpose, while
  processes are killed and frozen, clocks are moved and the store is cut off.
- **Baselines**: one load under the same kills, redeliveries and frozen workers, on other systems.

"Violations" are tasks whose effects break the row's promise. The bound is the rule of three: with none in n faulted
tasks, the rate is below 3/n with 95 % confidence, for faults of these kinds on these servers.
"""

_LIMITS = """
## What this does not show

The server is an emulator, MiniStack (the store's contract and property tests also pass on DynamoDB Local): nothing
here ran on AWS. The explorer's worlds have one effect for each delivery. MiniStack keeps its data in memory, so it was
paused and cut off, never restarted. Power failures, and disks that lie, are the store's business.
"""


def write(folder: Path = FOLDER) -> Path:
    """Write the page from all that was kept; its path."""
    parts = [
        _INTRODUCTION,
        _INTERLEAVINGS,
        _explorations(_kept(folder / "explorer.json").get("explorations", [])),
        _MUTANTS,
        _mutants(_kept(folder / "mutants.json").get("mutants", [])),
        _CAMPAIGNS,
        as_markdown(read(folder)),
        _LIMITS,
    ]
    page = folder / "README.md"
    page.write_text("\n".join(parts))
    return page


def _kept(path: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return kept


def _explorations(found: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("program", "deliveries", "faults", "worlds", "steps", "most effects", "kinds of fault met"),
        (
            (
                each["program"],
                each["deliveries"],
                each["faults"],
                f"{each['states']:,}",
                f"{each['transitions']:,}",
                each["most effects"],
                len(each["faults reached"]),
            )
            for each in found
        ),
    )


def _mutants(found: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("mistake", "its like was seen in", "noticed by", "as"),
        ((each["name"], each["seen in"], each["by"] or "**nobody**", each["evidence"]) for each in found),
    )


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
