"""The published page: prose that says how to read it, and tables made from what the campaigns kept."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lab.proof.storm import steady
from lab.proof.table import FOLDER, as_markdown, read

__all__ = ["recoveries", "storms", "write"]

_INTRODUCTION = """# Reliability

How this library was attacked, and what came of it. Everything here is made by `python -m lab.proof table` from the JSON
files beside it, which the campaigns wrote; seeds and versions stand in them. To do it again: `make prove`, and
`make soak MINUTES=15 SEED=20261121 STORE=postgres`.

A zero proves nothing without something that is not zero beside it. So there are broken variants of the library that
must be noticed, and other systems under the same fire.
"""

_INTERLEAVINGS = """
## Every interleaving

`lab/proof/explorer.py` drives the production decision table, claim and delivery, not a model of them, through every
interleaving of a few deliveries of one operation. At every step the world may kill a delivery before its request is
sent or with the request on the way (it lands at any later time, or never), lose a reply or a request, put the store out
of reach, or end the running lease. Worlds that were seen before are not explored twice.

Deliveries are all alike. So each of them may be a message of its own, or the same message that a broker gives again
because the worker's parent died while the body lives on: the worlds are the same, and a test says so. Who knows for
certain that a child is dead can end its lease, which any step may do, over the dead and over the living.

In every world: no final state changes, except that the owner of what became UNKNOWN may record its outcome; the fencing
token grows with every claim; an attempt ends only its own claim; an outcome is given up only to somebody who took over;
what may run again is given up only after `max_takeovers`; all reported results are equal; nothing is reported done
without an effect; under `refuse` there is at most one effect; a clean delivery afterwards always gets an answer that
fits; and if nobody was hindered, somebody ran.

"Most effects" over 1 is what `rerun` means: an attempt died, or slept through its lease, after its effect. For a step
under `refuse`, a step whose receiver honours its key, a fenced step, a commit and a transaction it must be 1. There a
call to the receiver, too, may be lost with its caller or land at any later time. Two controls are half a fenced step
each: a fencing token alone, and a probe alone. The explorer must find the way to two effects, and does.

Some programs do more:

- *Retrying*: the body has its effect by a step whose receiver honours its key, writes into its own argument, and asks
  for a retry. The library's own task makes the identities of the two messages, and they are one: one record, one
  effect, whether the key is derived from all arguments or from a path.
- *Struck*: an exception of somebody else's, such as a soft time limit, is raised in any write: before it is sent,
  during it (it lands at any later time), or after it, and that twice in one world. A body that came to its end has its
  outcome recorded before its delivery ends with that exception. (The third in one write is taken for the store's own.)
- *Forgetful store*: what is not finished is forgotten at any moment, as by a fail-over to a copy that is behind. A
  delivery without another beside it has one body and one effect and reports it, for every kind of effect, though the
  store forgets twice; only a transaction that was open is lost with its server, has no effect and reports none. If
  another delivery comes meanwhile, the first claim after the loss wins, and nothing is written without a condition.
  There a bare effect and a step happen twice, under `refuse`, too: the record was all that knew of the first. A commit,
  a transaction, a fenced step, and a step whose receiver honours its key do not. For that, a fenced step needs the
  store's clock to go on: two claims of one millisecond, one of them on its way while the store forgets the other, have
  one token. An *outcome* that is forgotten is not among these worlds: the operation is then a new one.
- *1 takeover*: after `max_takeovers` the operation is UNKNOWN, and its last owner may still complete it.
- *Excusing*: a body uses `before_effects()` as it must not: it raises another exception after its effect, or enters the
  block too late. Under `refuse` neither runs again.
- *Unreadable*: an answer that cannot be read runs no body, with `on_outage="run"`, either. """

_MUTANTS = """
## Mistakes that are noticed

Each row is a change to the production code, of a kind that was seen in a published library or made on the way here. It
must be noticed by the explorer, the store contract or the property tests; a survivor fails the build, and so does a
change that nothing would call.
"""

_STORES = """
## Every store

A state machine (`lab/proof/machine.py`) drives each store, on a real server, through claims, renewals, endings, lost
messages, late writes, forgotten records and moving clocks, and compares every reply and the stored record with an
oracle that knows nothing of stores.
"""

_BROKEN_STORES = """
Each row below is one of these stores with a mistake put into its own script or statements. The state machine, racing
threads or the crash sweep must notice it; a survivor fails the build. Every store also passes the contract for stores,
`celery_idempotent.testing.StoreContract`.
"""

_CAMPAIGNS = """
## Campaigns

Real processes and real servers. Effects are counted in a ledger without a unique constraint.

- **Crash sweep**: SIGKILL at every point of an attempt and at pairs of points, then at every system call that talks to
  the store (SQLite: that writes, syncs or locks a file), with no hook in the code. Two clean deliveries follow.
  Functions, awaited functions and HTTP requests are killed alike in `tests/proof`.
- **Effects**: SIGKILL at every point of a step, a fenced step, a commit in DynamoDB and a transaction in SQL, and at
  pairs of points, with receivers that do what they are asked as often as they are asked. Where results are objects,
  each that the record points to is looked at after every delivery. The *negative control* passes
  its fencing token on and does nothing else.
- **Store killed and restarted**: threads execute tasks while the store's server is killed by SIGKILL, again and again,
  and started on its data. No worker dies, so any effect that is repeated was forgotten by the store. The rows called
  *negative control* are the same campaign over a server with one setting that makes it forgetful: they must break
  their promise. That is what the warning at the start of a worker is about.
- **Faults**: requests to DynamoDB that fail before or after they were applied, are delayed, doubled, held and delivered
  late, throttled or reset; each operation, each promise, then pairs and random sequences, with concurrent deliveries.
  Publishers announce operations first, and leases are ended for owners that are taken for dead and live.
- **Soak**: real prefork workers on SQS, Redis or RabbitMQ, with duplicates published on purpose, and a visibility
  timeout of 4 s, so that messages must be held. Half of the operations come from a publisher that publishes once, and
  two beats run one schedule with a tick every 5 s. Meanwhile processes are killed and frozen, beats and the publisher
  too, clocks are moved, the store is cut off, and its server is killed and restarted. No tick may be left out. The
  *negative control* is a task of plain Celery in the same workers.
- **Baselines**: one load under the same kills, redeliveries and frozen workers, on other systems.

"Violations" are tasks whose effects break the row's promise. The bound is the rule of three: with none in n faulted
tasks, the rate is below 3/n with 95 % confidence, for faults of these kinds on these servers.
"""

_RECOVERY = """
## How long a death is felt

`python -m lab.proof recovery`: a body is killed by SIGKILL before its effect. The time is from the kill to the effect,
by whoever ran it next. A worker has four pool processes. Redis keeps the records itself, those of SQS are in DynamoDB.
Both give the messages of a dead worker again after 6 s; Redis is looked through for them every second.

A *machine* that died is a worker that took itself for one of another machine: nobody can tell that its processes are
gone. The time includes the start of the next worker, and so does that of a worker. Where a lease must be waited for, it
is 10 s instead of the default of 60, to bound the measurement; it runs from the last renewal, up to a third of it
before the kill. There no effect may come before that lease is over: the table has the smallest distance from its end
that was found, the grace of 1 s included. "Claims name no process" is this library as it was before they did, and as it
is where `/proc` tells nothing.

Plain Celery asks nobody and runs again whatever comes back: there a worker that is slow and not dead has its effect
twice. With it, a pool process that died is noticed after up to five seconds, when Celery looks for it again.
"""

_STORMS = """
## A thousand duplicates of one running body

`python -m lab.proof storm`: one body runs, and duplicates of its message come while it does, all at once. Four workers
with two processes each take them, ask the store for each, and postpone it. Requests are counted on the wire between the
workers and the store, renewals of the lease included, in windows of ten seconds from the body's begin. The crowd
arrives as fast as the workers take it, and each of it has some questions to ask early on. Steady is the mean of the
last third of the body; it is to stay under 60 requests per second.

Where *delays* do not grow (`backoff_max=1`), the same workers ask as often as they and the servers can: only where that
is more than 60 do the other rows say something. So the Redis of these rows keeps nothing on disk. SQS and DynamoDB are
an emulator in Python, MiniStack, each in a process of its own, which is slower than the crowd.

A duplicate may ask twice, and once for every doubling of the time for which the body runs: that is the bound. The
answer is what was recorded, and its time is from the body's end.
"""

_LIMITS = """
## What this does not show

DynamoDB is an emulator, MiniStack (the store's contract and property tests also pass on DynamoDB Local): nothing here
ran on AWS. It keeps its data in memory, so it was paused and cut off, never restarted. Redis is Valkey; it and the SQL
databases ran as one server each, with `appendfsync always` and their durable defaults, so nothing here is about a
fail-over to a replica, and the cluster of three masters was never reshaped.

A server killed by SIGKILL is not a power failure: what the operating system holds for the disk survives it. So
`tests/proof/test_synced.py` watches the system calls of each server, and of a process that uses SQLite: it syncs its
file before it answers. Disks that lie are not covered.

The explorer's worlds have one effect for each delivery. It knows no heartbeat of its own: a body that renews stands for
it. On Redis the soak kills a worker while it waits for a message: kombu loses the one that a killed worker is fetching,
which no library can undo. Soaks that name no broker were on SQS, with a visibility timeout of 10 s, and without beats,
a publisher that publishes once, and a control.
"""


def write(folder: Path = FOLDER) -> Path:
    """Write the page from all that was kept; its path."""
    parts = [
        _INTRODUCTION,
        _INTERLEAVINGS,
        _explorations(_kept(folder / "explorer.json").get("explorations", [])),
        _MUTANTS,
        _mutants(_kept(folder / "mutants.json").get("mutants", [])),
        _STORES,
        _followed(_kept(folder / "oracle.json").get("followed", [])),
        _BROKEN_STORES,
        _broken_stores(_kept(folder / "oracle.json").get("broken stores", [])),
        _CAMPAIGNS,
        as_markdown(read(folder)),
        _RECOVERY,
        recoveries(_kept(folder / "recovery.json").get("recoveries", [])),
        _STORMS,
        storms(_kept(folder / "storm.json").get("storms", [])),
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


def _followed(found: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("store", "runs", "steps of each", "differences"),
        ((each["store"], f"{each['runs']:,}", each["steps"], 0) for each in found),
    )


def _broken_stores(found: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ("store", "mistake", "noticed by"),
        ((each["store"], each["flaw"], ", ".join(each["noticed"]) or "**nobody**") for each in found),
    )


def recoveries(found: Iterable[Mapping[str, Any]]) -> str:
    """The table of deaths and what they cost."""
    return _table(
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
        (
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
        ),
    )


def storms(found: Iterable[Mapping[str, Any]]) -> str:
    """The table of crowds that ask for one body."""
    return _table(
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
        (
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
        ),
    )


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
