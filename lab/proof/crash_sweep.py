"""Real processes, killed by SIGKILL at every point of an attempt, over a real store.

Two sweeps. The first names its points: the store given to the delivery and the body die before and after each
thing they do; every point, every pair of points, then random sequences. The second has no hook at all:
``strace`` kills the process at its n-th system call of a kind, for every n until the attempt ends normally.

After the kills come two clean deliveries past the lease. What happened is read from an append-only ledger
without a unique constraint, and compared with what must follow from the points at which processes died.

A delivery that is to die is a fork of a warm parent, which goes on using the same store, as a worker's parent may.
A client of DynamoDB costs more than all the rest of a delivery: there it is another one, made before the fork, which
had no connection then.
"""

import gc
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn
from uuid import uuid4

from celery_idempotent.engine.claim import Claim, effect_key
from celery_idempotent.engine.events import Event
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import StoreWrapper
from lab.proof.flaws import FLAWS
from lab.proof.fleet import Progress, fan_out, job, report
from lab.proof.table import Row
from lab.proof.targets import TARGETS, start
from lab.proof.verdicts import FINAL, PROMISES, Promise, Tally, Told, Verdict, breaches, operation, snapshot
from lab.proof.ways import WAYS

__all__ = ["LaterStore", "Ledger", "Points", "Result", "live_and_end", "run", "sweep", "warm", "why_no_ptrace"]

CAMPAIGN = "SIGKILL at every point"
CAMPAIGN_SYSTEM_CALLS = "SIGKILL at every system call"

_MOST_KILLS = 4
_POINTS = 10
"""Bounds of random sequences: kills of one task, and how far into a delivery they reach."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One delivery that dies.

    Args:
        at: The point, counted from 1 in the order in which the delivery reaches them.
        late: Whether it comes after the lease before it is over, or at once.
        call: The system call to count instead of points.
    """

    at: int
    late: bool = True
    call: str | None = None

    def __str__(self) -> str:
        return f"{'late' if self.late else 'early'} delivery killed at {self.call or 'point'} {self.at}"


@dataclass(frozen=True, slots=True)
class Task:
    """One task and how it is attacked.

    Args:
        promise: How the library is used.
        renews: Whether the body renews its lease before and after its effect, as the heartbeat does.
        kills: The deliveries that die, in order.
        early: Whether a clean delivery comes before the lease of the last one is over.
    """

    promise: Promise
    renews: bool
    kills: tuple[Kill, ...]
    early: bool = False

    def __str__(self) -> str:
        parts = [self.promise.name, "renewing" if self.renews else "plain", *map(str, self.kills)]
        return ", ".join([*parts, "early clean delivery"] if self.early else parts)


class Ledger:
    """An append-only file: one line per fact, written by processes that may die after any of them."""

    def __init__(self, path: str) -> None:
        self._end = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._start = os.open(path, os.O_RDONLY)

    def append(self, fact: str, **details: Any) -> None:
        """Write one line in one system call."""
        os.write(self._end, json.dumps({"fact": fact, **details}).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines written since the last call."""
        data = b"".join(iter(lambda: os.read(self._start, 1 << 16), b""))
        return [json.loads(line) for line in data.splitlines()]


class Points:
    """Counts the points that a delivery reaches, and dies at the one it was told."""

    def __init__(self, ledger: Ledger, kill_at: int | None) -> None:
        self.ledger = ledger
        self._kill_at = kill_at
        self._reached = 0

    def reach(self, name: str) -> None:
        """Count the point called ``name``; this process may end here."""
        self._reached += 1
        if self._reached == self._kill_at:
            self.ledger.append("killed", at=name)
            os.kill(os.getpid(), signal.SIGKILL)


class LaterStore(StoreWrapper):
    """A store whose clock is ahead, so that nobody waits for a lease."""

    def __init__(self, store: Store, ahead: int) -> None:
        super().__init__(store)
        self._ahead = ahead

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`."""
        return self.store.now() + self._ahead


class _DyingStore(LaterStore):
    """A store whose every swap is two points, and which notes what the swap did."""

    def __init__(self, store: Store, ahead: int, points: Points) -> None:
        super().__init__(store, ahead)
        self._points = points
        self._token = 0

    def swap(self, new: Record, expected: str | None) -> Record | None:
        name = self._name(new)
        self._points.reach(f"before the {name}")
        stored = self.store.swap(new, expected)
        won = stored is not None and stored.revision == new.revision
        self._points.ledger.append("swap", name=name, won=won)
        if won and new.status is Status.IN_PROGRESS and new.fencing_token != self._token:
            self._token = new.fencing_token
            self._points.ledger.append("claimed", token=new.fencing_token, attempt=new.attempts)
        if stored is not None and stored.status in FINAL:
            self._points.ledger.append("final", record=snapshot(stored), status=stored.status)
        self._points.reach(f"{name} {'stored' if won else 'refused'}, reply not read")
        return stored

    def _name(self, new: Record) -> str:
        if new.status is not Status.IN_PROGRESS:
            return {Status.COMPLETED: "completion", Status.UNKNOWN: "giving up"}.get(new.status, "ending")
        return "renewal" if new.fencing_token == self._token else "takeover claim" if new.takeovers else "claim"


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What one forked process does."""

    key: str
    number: int
    task: Task
    ahead: int
    way: str

    def under(self, store: Store, points: Points, heartbeat: Heartbeat) -> None:
        def observe(event: Event) -> None:
            points.ledger.append("event", name=event.name)

        delivered = operation(self.key, self.task.promise, self.number)
        told = WAYS[self.way](delivered, store, heartbeat, observe, self._body(points))
        points.reach("everything done, not acknowledged")
        points.ledger.append("told", how=told.how, value=told.value)

    def _body(self, points: Points) -> Callable[[Claim | None], str]:
        def body(attempt: Claim | None) -> str:
            assert attempt is not None
            points.reach("the body begins")
            self._renew(attempt)
            points.reach("before the effect")
            receipt = effect_key(attempt.key, "charge") if self.task.promise.keyed else uuid4().hex
            points.ledger.append("effect", receipt=receipt, token=attempt.fencing_token)
            points.reach("after the effect")
            self._renew(attempt)
            return receipt

        return body

    def _renew(self, attempt: Claim) -> None:
        if self.task.renews:
            attempt.renew()


class _Attacker:
    """Delivers tasks in forks of itself and kills them; it makes the clean deliveries itself.

    A survivor in the same process costs a tenth of a fork. Its heartbeat is its own: a fork inherits its lock and
    never touches it.
    """

    def __init__(self, url: str, ledger: Ledger, flaw: str, way: str) -> None:
        opened = open_store(url)
        opened.provision()
        self._own_store = FLAWS[flaw](opened)
        self._store = FLAWS[flaw](warm(url)) if isinstance(opened, DynamoDBStore) else self._own_store
        self._own_heartbeat = Heartbeat()
        self._ledger = ledger
        self._way = way
        self.kills = 0
        self.points: Counter[str] = Counter()
        gc.collect()
        gc.freeze()  # the children then touch no garbage collector's header, and fewer pages are copied

    def attack(self, task: Task) -> tuple[Verdict, bool]:
        """One task's verdict, and whether all its kills struck."""
        key, ahead = f"proof:1:{uuid4().hex}", 0
        lease = task.promise.policy.lease_ms + 1_001
        histories: list[list[dict[str, Any]]] = []

        def deliver(kill: Kill | None) -> bool:
            rows = self._deliver(_Delivery(key, len(histories), task, ahead, self._way), kill)
            histories.append(rows)
            return any(row["fact"] == "killed" for row in rows)

        struck = []
        for kill in task.kills:
            ahead += lease * kill.late
            struck.append(deliver(kill))
        if task.early:
            deliver(None)
        for _ in range(2):
            ahead += lease
            deliver(None)
        return _Audit(task, histories).verdict(), all(struck)

    def _deliver(self, delivery: _Delivery, kill: Kill | None) -> list[dict[str, Any]]:
        if kill is None:
            points = Points(self._ledger, None)
            delivery.under(_DyingStore(self._own_store, delivery.ahead, points), points, self._own_heartbeat)
            return self._ledger.read()
        child = self._child_under_strace(delivery, kill) if kill.call else self._child(delivery, kill)
        _, ended = os.waitpid(child, 0)
        rows = self._ledger.read()
        if kill.call and os.WIFSIGNALED(ended):
            rows.append({"fact": "killed", "at": f"{kill.call} {kill.at}"})
        killed = [row["at"] for row in rows if row["fact"] == "killed"]
        self.kills += len(killed)
        self.points.update(killed)
        if not killed and ended:
            raise RuntimeError(f"delivery {delivery} ended with status {ended}")
        return rows

    def _child(self, delivery: _Delivery, kill: Kill) -> int:
        points = Points(self._ledger, kill.at)
        store = _DyingStore(self._store, delivery.ahead, points)
        child = os.fork()
        return child or live_and_end(lambda: delivery.under(store, points, Heartbeat()))

    def _child_under_strace(self, delivery: _Delivery, kill: Kill) -> int:
        """A child with the bare store, which begins when ``strace`` holds it."""
        gate, opener = os.pipe()
        points = Points(self._ledger, None)
        store = LaterStore(self._store, delivery.ahead)

        def deliver() -> None:
            os.close(opener)
            os.read(gate, 1)
            delivery.under(store, points, Heartbeat())

        child = os.fork() or live_and_end(deliver)
        os.close(gate)
        assert kill.call is not None
        tracer = _trace(child, kill.call, kill.at)
        os.close(opener)
        tracer.communicate()
        return child


def live_and_end(deliver: Callable[[], None]) -> NoReturn:
    """A forked child never returns into its parent's code, whatever happens."""
    ended = 1
    try:
        deliver()
        ended = 0
    except BaseException:  # noqa: BLE001 - the parent sees the status and stops
        traceback.print_exc()
    finally:
        os._exit(ended)


def _trace(child: int, call: str, nth: int) -> "subprocess.Popen[str]":
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(child), "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={nth}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        os.kill(child, signal.SIGKILL)
        raise RuntimeError(f"strace: {said}")
    return tracer


def warm(url: str) -> DynamoDBStore:
    """A DynamoDB that forks of this process may use at little cost."""
    store = DynamoDBStore.from_url(url)
    client = store._connected()
    client.close()  # its sockets, not the client: the first request of each child opens its own
    return DynamoDBStore(store.table, client=lambda: client)


class _Audit:
    """What must follow from the points at which deliveries died, against what the ledger says."""

    def __init__(self, task: Task, histories: list[list[dict[str, Any]]]) -> None:
        self.task = task
        self.histories = histories
        self.rows = [row for rows in histories for row in rows]
        self.effects = self._facts("effect")
        self.told = [Told(row["how"], row["value"]) for row in self._facts("told")]
        self.finals = self._facts("final")

    def verdict(self) -> Verdict:
        status = self.finals[-1]["status"] if self.finals else "nothing final"
        count = len({row["receipt"] for row in self.effects}) if self.task.promise.keyed else len(self.effects)
        return Verdict(
            task=str(self.task),
            promise=self.task.promise.name,
            deliveries=len(self.histories),
            faults=dict(Counter(row["at"] for row in self._facts("killed"))),
            effects=count,
            unknown=status == Status.UNKNOWN,
            unexplained=status == Status.UNKNOWN and not self._explains(status),
            stuck=not self._ends_well(self.told[-2].how),
            takeovers=sum(row["name"] == "taken_over" for row in self._facts("event")),
            requests=len(self._facts("swap")),
            problems=tuple(self._problems(count, status)),
        )

    def _problems(self, count: int, status: str) -> Iterator[str]:
        yield from breaches(self.task.promise, self.told, count, (row["token"] for row in self._facts("claimed")))
        if self.told[-1] != self.told[-2] or not self._ends_well(self.told[-1].how):
            yield f"clean deliveries were told {self.told[-2:]}"
        if len({row["record"] for row in self.finals}) > 1:
            yield "a final state was changed"
        if self.task.promise.on_takeover == "rerun":
            again = sum(self._died_after_its_effect(rows) for rows in self.histories)
            # Of a traced delivery it is not known whether its completion was stored.
            if len(self.effects) not in ({1, 1 + again} if self._is_traced() else {1 + again}):
                yield f"the body had its effect {len(self.effects)} times, and {again} deliveries died after it"
        if not self._explains(status):
            yield f"ended {status}, which does not follow from where processes died"

    def _ends_well(self, how: str) -> bool:
        return how == "finished" or (how == "OutcomeUnknown" and self.task.promise.on_takeover == "refuse")

    def _died_after_its_effect(self, rows: list[dict[str, Any]]) -> bool:
        return any(row["fact"] == "effect" for row in rows) and not self._stored(rows, "completion")

    def _explains(self, status: str) -> bool:
        """Whether the operation had to end so."""
        refuses = self.task.promise.on_takeover == "refuse"
        if self._is_traced():  # nobody noted how far it came
            return status == Status.COMPLETED or (refuses and status == Status.UNKNOWN)
        return status == (Status.UNKNOWN if refuses and self._abandoned() else Status.COMPLETED)

    def _abandoned(self) -> bool:
        """Whether a delivery claimed the key and did not live to complete it."""
        return any(
            any(row["fact"] == "claimed" for row in rows) and not self._stored(rows, "completion")
            for rows in self.histories
        )

    def _is_traced(self) -> bool:
        return any(kill.call for kill in self.task.kills)

    @staticmethod
    def _stored(rows: list[dict[str, Any]], name: str) -> bool:
        return any(row["fact"] == "swap" and row["name"] == name and row["won"] for row in rows)

    def _facts(self, fact: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["fact"] == fact]


def _programs(promises: Iterable[Promise] = tuple(PROMISES.values())) -> list[tuple[Promise, bool]]:
    return [(promise, renews) for promise in promises for renews in (False, True)]


_Attack = Callable[[Task], bool]
"""Attacks and reports; whether all kills struck."""


def _singles(attack: _Attack, share: int, of: int, promises: Sequence[Promise]) -> None:
    """Every point, with and without a clean delivery before the lease is over."""
    _kill_at_every_point(attack, share, of, itertools.product(_programs(promises), (False, True)))


def _briefly(attack: _Attack, share: int, of: int, promises: Sequence[Promise]) -> None:
    """Every point once under each promise: bodies that renew reach all there are."""
    _kill_at_every_point(attack, share, of, [((promise, True), False) for promise in promises])


def _kill_at_every_point(
    attack: _Attack, share: int, of: int, programs: Iterable[tuple[tuple[Promise, bool], bool]]
) -> None:
    for (promise, renews), early in programs:
        for at in itertools.count(1 + share, of):
            if not attack(Task(promise, renews, (Kill(at),), early)):
                break


def _pairs(attack: _Attack, share: int, of: int, promises: Sequence[Promise]) -> None:
    """Every point of the first delivery with every point of the second, before and after the lease is over."""
    for (promise, renews), late in itertools.product(_programs(promises), (True, False)):
        for first in itertools.count(1 + share, of):
            for second in itertools.count(1):
                if not attack(Task(promise, renews, (Kill(first), Kill(second, late)))):
                    break
            if second == 1 and not attack(Task(promise, renews, (Kill(first),))):
                break


def _random_task(seed: int, number: int) -> Task:
    rng = random.Random(f"{seed}:{number}")
    promise, renews = rng.choice(_programs())
    kills = tuple(Kill(rng.randint(1, _POINTS), rng.random() < 0.7) for _ in range(rng.randint(1, _MOST_KILLS)))
    return Task(promise, renews, kills, rng.random() < 0.3)


def _system_calls(attack: _Attack, share: int, of: int, promises: Sequence[Promise], calls: Sequence[str]) -> None:
    """Every system call by which an attempt talks to the store or to its ledger."""
    programs = [(promise, call) for promise in promises for call in (*calls, "write")]
    for promise, call in programs[share::of]:
        for nth in itertools.count(1):
            if not attack(Task(promise, False, (Kill(nth, call=call),))):
                break


def why_no_ptrace() -> str | None:
    """Why processes cannot be traced here, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(["strace", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"ptrace is not permitted: {probe.stderr.strip()}"


@dataclass(frozen=True, slots=True)
class Result:
    """What a sweep found.

    Args:
        tally: The verdicts.
        rows: Their sum, by promise.
        kills: How many processes died.
        seconds: Wall time.
        cpu: Seconds of processor time of the attackers and their children, without the server.
        points: How often each point was died at.
    """

    tally: Tally
    rows: list[Row]
    kills: int
    seconds: float
    cpu: float
    points: Mapping[str, int]


def sweep(
    kind: str,
    *,
    tasks: int = 0,
    seed: int = 0,
    progress: Progress = lambda done: None,
    processes: int = 2,
    target: str = "dynamodb",
    url: str | None = None,
    flaw: str = "none",
    promises: Sequence[str] = tuple(PROMISES),
    way: str = "delivery",
) -> Result:
    """Run one sweep.

    Args:
        kind: ``"brief"`` (every point once), ``"singles"``, ``"points"`` (singles, pairs, and random sequences
            until ``tasks`` are done) or ``"system calls"``.
        tasks: How many tasks; a sweep that has to be complete is completed.
        seed: Of the random sequences.
        progress: Called as tasks are done.
        processes: How many attackers.
        target: The kind of store, by its name in :data:`lab.proof.targets.TARGETS`.
        url: The store to use; default: a new one.
        flaw: What is broken on purpose, by its name in :data:`lab.proof.flaws.FLAWS`.
        promises: Which are attacked, by their names; random sequences take them all.
        way: How bodies are delivered, by its name in :data:`lab.proof.ways.WAYS`.
    """
    tally, kills, cpu, points = Tally(), 0, 0.0, Counter[str]()
    with ExitStack() as stack:
        place = url or stack.enter_context(start(target)).url
        started = time.monotonic()
        common = {
            "kind": kind,
            "tasks": tasks,
            "seed": seed,
            "url": place,
            "calls": TARGETS[target].calls,
            "flaw": flaw,
            "promises": promises,
            "way": way,
        }
        for found in fan_out("lab.proof.crash_sweep", common, processes):
            if "promise" in found:
                tally.add(Verdict.from_json(found))
                progress(1)
            else:
                kills, cpu = kills + found["kills"], cpu + found["cpu"]
                points.update(found["points"])
        seconds = time.monotonic() - started
    campaign = CAMPAIGN_SYSTEM_CALLS if kind == "system calls" else CAMPAIGN
    store, used_seed = TARGETS[target].label, seed if kind == "points" else None
    rows = tally.rows(store=store, campaign=campaign, seconds=seconds, seed=used_seed)
    return Result(tally, rows, kills, seconds, cpu, points)


def run(target: str, tasks: int, seed: int, progress: Progress) -> list[Row]:
    """Both sweeps; the second is left out where processes cannot be traced.

    Args:
        target: The kind of store.
        tasks: How many tasks the first one attacks at least; none: only single kills.
        seed: Of its random sequences.
        progress: Called as tasks are done.
    """
    kind = "points" if tasks else "singles"
    rows = sweep(kind, target=target, tasks=tasks, seed=seed, progress=progress).rows
    if why_no_ptrace() is None:
        rows += sweep("system calls", target=target, progress=progress).rows
    return rows


def _work(given: Mapping[str, Any]) -> None:
    """In a worker process: attack this share of the tasks."""
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        attacker = _Attacker(given["url"], Ledger(os.path.join(folder, "ledger")), given["flaw"], given["way"])

        def attack(task: Task) -> bool:
            nonlocal done
            verdict, struck = attacker.attack(task)
            report(verdict.to_json())
            done += 1
            return struck

        share, of = given["share"], given["of"]
        promises = [PROMISES[name] for name in given["promises"]]
        if given["kind"] == "system calls":
            _system_calls(attack, share, of, promises, given["calls"])
        elif given["kind"] == "brief":
            _briefly(attack, share, of, promises)
        else:
            _singles(attack, share, of, promises)
        if given["kind"] == "points":
            _pairs(attack, share, of, promises)
            for number in itertools.count(share, of):
                if done >= given["tasks"] / of:
                    break
                attack(_random_task(given["seed"], number))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    report({"kills": attacker.kills, "cpu": cpu, "points": attacker.points})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(job())
