"""The pictures of docs/benchmarks, drawn from the results that are saved there: `python -m lab.benchmarks.plots`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.growth import CALLS, FLAT
from lab.benchmarks.svg import Axis, Bars, Lines, Panel, bars, lines

__all__ = ["Picture", "draw", "save"]

Data = Mapping[str, Any]

STORM = Path(__file__).resolve().parents[2] / "docs" / "reliability" / "storm.json"
"""What ``python -m lab.proof storm`` has measured."""

_CPU = Axis("CPU time of the client for a call, microseconds (median)")
_RATE = Axis("tasks per second (median)")
_CALLS = ("new key", "duplicate")


@dataclass(frozen=True, slots=True)
class Picture:
    """A file, and what is to be read below it.

    Args:
        name: Of the file, without its ending.
        title: What it shows.
        svg: The file's text.
        caption: What was measured, and how to read it.
    """

    name: str
    title: str
    svg: str
    caption: str


def draw(results: Data, storm: Data | None) -> Iterator[Picture]:
    """The pictures of all sections that ``results`` has, and of the storm.

    Args:
        results: What ``results.json`` holds.
        storm: What ``storm.json`` holds; None: it is not there.
    """
    by_number = {each["title"].partition(".")[0]: each["data"] for each in results["sections"]}
    for number, picture in _PICTURES:
        if number in by_number:
            yield picture(by_number[number])
    if storm is not None:
        yield _storm(storm)


def _stores(data: Data) -> Picture:
    costs = data["cpu_us"]
    rows = [name for name in costs["new key"] if not name.endswith(_BARE)]
    series = {
        f"{call}, {who}": [_median(costs[call].get(f"{row}{suffix}")) for row in rows]
        for call in _CALLS
        for who, suffix in (("library", ""), ("driver alone", _BARE))
    }
    return Picture(
        "cpu-stores",
        "CPU per call, by store",
        bars(Bars("CPU per call, by store", _CPU, rows, series)),
        "A new key is a claim and a completion, a duplicate is one replay. *Driver alone* sends the same requests"
        " with keys ready made: the difference of two neighbours is the library's own share. User and system time"
        " of the client; on SQLite the engine is in it.",
    )


_BARE = ", bare client"


def _peers_on_dynamodb(data: Data) -> Picture:
    rows = list(data["new key"])
    series = {call: [_median(data[call][row]["cpu_us"]) for row in rows] for call in _CALLS}
    return Picture(
        "cpu-dynamodb",
        "CPU per call on DynamoDB, beside boto3 and Powertools",
        bars(Bars("CPU per call on DynamoDB", _CPU, rows, series)),
        "All contenders in one run, the calls of a round in random order. *Bare boto3* replays the library's own "
        "requests and does nothing else; Powertools has its cache off and sends smaller items.",
    )


def _own(data: Data) -> Picture:
    names = list(data["cpu_us"])
    return Picture(
        "own-code",
        "The library's own code beside a plain task",
        bars(
            Bars(
                "One message through Celery's tracer",
                Axis("CPU time, microseconds (median)"),
                names,
                {"CPU": [_median(data["cpu_us"][name]) for name in names]},
            )
        ),
        "one empty task through Celery's tracer, with the records in the worker's memory: all that is above the "
        "plain task is the library.",
    )


def _workers(data: Data) -> Picture:
    rows = list(data["executed_per_s"])
    return Picture(
        "workers-stores",
        "A worker on each store",
        bars(
            Bars(
                "Empty tasks per second of one worker, by store",
                _RATE,
                rows,
                {"executed": [_median(data["executed_per_s"][row]) for row in rows]},
            )
        ),
        "`celery worker` with two processes, a Redis of its own as the broker, and an empty task: the worst case,"
        " as any work of yours is added to all rows alike. All servers share two cores; DynamoDB is an emulator "
        "in Python.",
    )


def _aws(data: Data) -> Picture:
    rows = {"plain Task": data["plain_per_s"], "IdempotentTask": data["idempotent_per_s"]}
    return Picture(
        "workers-sqs",
        "A worker on SQS and DynamoDB",
        bars(
            Bars(
                "Empty tasks per second of one worker, SQS and DynamoDB",
                _RATE,
                list(rows),
                {"executed": [_median(each) for each in rows.values()]},
            )
        ),
        "the same with SQS as the broker and DynamoDB as the store; both are emulators on the same two cores.",
    )


def _peers(data: Data) -> Picture:
    rounds = data["rounds"]
    wanted = {"published": "publish", "executed": "execute", "end_to_end": "publish and execute"}
    return Picture(
        "workers-peers",
        "celery-once and celery-singleton on the same Redis",
        bars(
            Bars(
                "Empty tasks per second, one Redis for all",
                _RATE,
                list(rounds),
                {what: [_median(each[rate]) for each in rounds.values()] for rate, what in wanted.items()},
            )
        ),
        "The others lock while publishing and unlock after execution. The library does nothing while publishing "
        "and sends its two requests at execution. So *publish and execute* compares like with like. The others do"
        " not recover, replay or fence.",
    )


def _growth(data: Data) -> Picture:
    panels = [Panel(call, {name: _by_size(sizes, call) for name, sizes in data["calls"].items()}) for call in CALLS]
    return Picture(
        "growth",
        "Growth",
        lines(
            Lines(
                "Time of a call in a large store, to that in the smallest",
                Axis("records in the store", is_log=True),
                Axis("time on the clock, times the smallest"),
                panels,
                limit=FLAT,
            )
        ),
        "A line at 1 is what is wanted: a call takes as long in a store of a million records as in one of a "
        f"thousand. Below the dashed line, at {FLAT}, it counts as flat. A line ends where the store could not be "
        "filled further in reasonable time.",
    )


def _by_size(sizes: Data, call: str) -> list[tuple[float, float]]:
    return [(float(size), _of(each[call]["wall_to_smallest"])) for size, each in sizes.items()]


def _memory(data: Data) -> Picture:
    points = [(float(tasks), size / 1e6) for tasks, size in data["resident_bytes"].items()]
    return Picture(
        "memory",
        "Memory of a worker",
        lines(
            Lines(
                "Resident size of one process",
                Axis("tasks that it has run"),
                Axis("resident size, MB"),
                [Panel("", {"resident": points})],
            )
        ),
        "a new key for every task, every tenth delivered twice. A flat line is what is wanted: nothing is kept in"
        " the worker.",
    )


def _storm(data: Data) -> Picture:
    storms = data["storms"]
    panels = [
        Panel(broker, {_storm_name(each): _windows(each) for each in storms if each["broker"] == broker})
        for broker in dict.fromkeys(each["broker"] for each in storms)
    ]
    duplicates, body = storms[0]["duplicates"], storms[0]["body"]
    return Picture(
        "storm",
        "A storm of duplicates",
        lines(
            Lines(
                f"{duplicates:,} duplicates of one running body",
                Axis("seconds since the body began"),
                Axis("requests to the store, per second"),
                panels,
            )
        ),
        f"{duplicates:,} duplicates come while one body runs for {body:.0f} s, on four workers with two processes "
        "each. Each asks the store, is postponed, and asks again after a delay that doubles, so the line falls "
        "once the crowd has arrived. Where *delays do not grow*, nothing is saved: it is the control. From "
        "[storm.json](../reliability/storm.json).",
    )


def _storm_name(storm: Data) -> str:
    return "control: delays do not grow" if storm["control"] else f"lease {storm['lease']} s"


def _windows(storm: Data) -> list[tuple[float, float]]:
    window = storm["body"] / len(storm["per second"])
    return [((index + 0.5) * window, each) for index, each in enumerate(storm["per second"])]


def _median(found: Data | None) -> float | None:
    return None if found is None else _of(found)


def _of(found: Data) -> float:
    return float(found["median"])


_PICTURES: Sequence[tuple[str, Callable[[Data], Picture]]] = (
    ("5", _stores),
    ("2", _peers_on_dynamodb),
    ("8", _own),
    ("5", _workers),
    ("4", _aws),
    ("6", _peers),
    ("9", _growth),
    ("10", _memory),
)
"""By the number of the section that they are drawn from, in the order of the page."""


def save(folder: Path, storm: Path = STORM) -> None:
    """Draw the pictures of ``folder``'s results into it, with a page that shows and explains them."""
    results = json.loads((folder / "results.json").read_text())
    pictures = list(draw(results, json.loads(storm.read_text()) if storm.exists() else None))
    for each in pictures:
        (folder / f"{each.name}.svg").write_text(each.svg)
    (folder / "README.md").write_text(_page(results, pictures))


def _page(results: Data, pictures: Sequence[Picture]) -> str:
    shown = [each for each in pictures if each.name in _SHOWN]
    linked = [each for each in pictures if each.name not in _SHOWN]
    lines = [_INTRODUCTION.format(cpu=results["environment"]["CPU"], date=results["environment"]["Date"])]
    for each in shown:
        lines += [f"## {each.title}", "", f"![{each.title}]({each.name}.svg)", "", each.caption, ""]
    if linked:
        lines += [
            "## More pictures",
            "",
            *(f"- [{each.title}]({each.name}.svg)" for each in linked),
            "",
        ]
    missed = [goal for section in results["sections"] for goal in section.get("goals", ()) if not goal["reached"]]
    lines += [
        _SHORTFALLS.format(missed=len(missed), goals=sum(len(each.get("goals", ())) for each in results["sections"]))
    ]
    lines += ["| goal | wanted | measured |", "| --- | --- | --- |"]
    return "\n".join([*lines, *("| {what} | {wanted} | {measured} |".format(**each) for each in missed)]) + "\n"


_SHOWN = ("cpu-stores", "cpu-dynamodb", "workers-peers", "growth")
"""The others are worth a link: to show them all would be five screens."""

_INTRODUCTION = """# Benchmarks

This page says what the library costs, beside the bare driver and beside its peers. Read the pictures as comparisons:
what one shows was measured in one run, the contenders in turn, with the servers on the same machine ({cpu}, {date}).
Absolute times are this machine's; ratios carry over.

`make bench` measures and draws all of it. All figures: [results.csv](results.csv); goals: [goals.csv](goals.csv); how
each was measured: [results.json](results.json).
"""

_SHORTFALLS = """## What falls short

Of {goals} goals, {missed} were missed. Most are throughput beside celery-once and celery-singleton, which lock and keep
no outcome. A listing on Redis goes through all records.
"""


if __name__ == "__main__":
    save(STORM.parents[1] / "benchmarks")
