"""Real processes, killed by SIGKILL at every point of an attempt and of every kind of effect, over a real store.

A point is before and after each thing that store, body and receiver do: every point, every pair of points. Another
sweep has no hook at all: ``strace`` kills the process at its n-th system call of a kind, for every n until the attempt
ends normally. After the kills come two clean deliveries past the lease.

What happened is counted by receivers that do what they are asked, as often as they are asked, by their own rules: a
ledger without a unique constraint, an API that honours keys, an index that checks fences, a table of the store's own.

A delivery that is to die is a fork of a warm parent, which goes on using the same store, as a worker's parent may.
A client of DynamoDB costs more than all the rest of a delivery: there it is another one, made before the fork, which
had no connection then.
"""

import gc
import itertools
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from sqlalchemy import Column, MetaData, NullPool, String, Table, create_engine, func, insert, make_url, select

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim, effect_key
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.events import Event
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.protocol.effects import AtMostOnce
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import StoreWrapper
from lab.folders import temporary_folder
from lab.ledger import Ledger
from lab.ledger import Row as Fact
from lab.proof import verdicts
from lab.proof.flaws import FLAWS
from lab.proof.jobs import Progress, Report, fan_out
from lab.proof.recorder import record_if_wanted
from lab.proof.table import CONTROL, Row
from lab.proof.targets import TARGETS, start
from lab.proof.verdicts import CODEC, FINAL, PROMISES, Promise, Result, Seen, Told, Verdict, operation

_SLACK = 11_000
"""Milliseconds beyond a lease: so much that no two processes' guesses at a server's clock differ by it."""


class Kind(StrEnum):
    """What a body does; the last is often taken for enough, and is judged as if it were."""

    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"
    EXACTLY_ONCE = "exactly once"
    STEP = "step"
    REFUSED_STEP = "step under refuse"
    KEYED_STEP = "step with a key"
    FENCED_STEP = "fenced step"
    COMMIT = "commit"
    TRANSACTION = "transaction"
    TOKEN_ALONE = "fencing token alone"

    @cached_property
    def promise(self) -> Promise:
        if self.is_bare:
            return PROMISES[self]
        most = None if self is Kind.STEP else 1
        return Promise(self, "rerun", most, keyed=self is Kind.KEYED_STEP, doubtful=self is Kind.REFUSED_STEP)

    @property
    def is_bare(self) -> bool:
        """Whether the body has its effect without a step."""
        return self in PROMISES


BARE = tuple(each for each in Kind if each.is_bare)
EFFECTS = tuple(each for each in Kind if not each.is_bare)
_FENCED = {Kind.FENCED_STEP, Kind.TOKEN_ALONE}
_IN_TABLE = {Kind.COMMIT: {"dynamodb"}, Kind.TRANSACTION: {"postgres", "mariadb", "sqlite"}}
"""Kinds that the store itself counts, by the stores that can."""


def kinds_of(store: str) -> tuple[Kind, ...]:
    return tuple(each for each in EFFECTS if store in _IN_TABLE.get(each, {store}))


@dataclass(frozen=True, slots=True)
class Kill:
    """One delivery that dies at its n-th point or system call, and comes after the lease before it, or at once."""

    at: int
    late: bool = True
    call: str | None = None

    def __str__(self) -> str:
        return f"{'late' if self.late else 'early'} delivery killed at {self.call or 'point'} {self.at}"


@dataclass(frozen=True, slots=True)
class Task:
    """One task and how it is attacked."""

    kind: Kind
    kills: tuple[Kill, ...]
    renews: bool = False

    def __str__(self) -> str:
        return ", ".join([self.kind, "renewing" if self.renews else "plain", *map(str, self.kills)])


class Points:
    """Counts the points that a delivery reaches, notes what it does, and dies at the point it was told."""

    def __init__(self, ledger: Ledger, kill_at: int | None) -> None:
        self._ledger = ledger
        self._kill_at = kill_at
        self._reached = 0

    def note(self, what: str, **details: Any) -> None:
        self._ledger.append(Fact(what=what, **details))

    def reach(self, name: str) -> None:
        """Count the point called ``name``; this process may end here."""
        self._reached += 1
        if self._reached == self._kill_at:
            self.note("killed", point=name)
            os.kill(os.getpid(), signal.SIGKILL)


class _LaterStore(StoreWrapper):
    """A store on a clock that is ahead."""

    def __init__(self, store: Store, ahead: int) -> None:
        super().__init__(store)
        self._ahead = ahead

    def now(self) -> int:
        return self.store.now() + self._ahead


class _DyingStore(_LaterStore):
    """One whose every write is two points, and which notes what the write did."""

    def __init__(self, store: Any, ahead: int, points: Points) -> None:
        super().__init__(store, ahead)
        self._inner, self._points, self._token = store, points, 0

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._written(new, lambda: self.store.swap(new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        return self._written(new, lambda: self._inner.swap_with(new, expected, writes))

    def begin(self, using: Any = None) -> Any:
        self._points.reach("before the transaction begins")
        return _DyingTransaction(self._inner.begin(using), self._points)

    def _written(self, new: Record, write: Callable[[], Record | None]) -> Record | None:
        name = self._name(new)
        self._points.reach(f"before the {name}")
        stored = write()
        won = stored is not None and stored.revision == new.revision
        self._points.note("swap", task=name, attempt=won)
        if won and new.status is Status.IN_PROGRESS and new.fencing_token != self._token:
            self._token = new.fencing_token
            self._points.note("claimed", token=new.fencing_token)
        if stored is not None and stored.status in FINAL:
            self._points.note("final", reference=verdicts.snapshot(stored), key=stored.status)
        self._points.reach(f"{name} {'stored' if won else 'refused'}, reply not read")
        return stored

    def _name(self, new: Record) -> str:
        if new.status is not Status.IN_PROGRESS:
            return {Status.COMPLETED: "completion", Status.UNKNOWN: "giving up"}.get(new.status, "ending")
        if new.fencing_token != self._token:
            return "takeover claim" if new.takeovers else "claim"
        return "checkpoint" if new.steps else "renewal"


class _DyingTransaction:
    """A transaction whose commit is two points."""

    def __init__(self, transaction: Any, points: Points) -> None:
        self._points = points
        self.connection, self._transaction = transaction.connection, transaction
        self.enqueue, self.rollback = transaction.enqueue, transaction.rollback

    def swap(self, new: Record, expected: str | None) -> Any:
        self._points.reach("before the record is written in the transaction")
        return self._transaction.swap(new, expected)

    def commit(self) -> None:
        self._points.reach("before the commit")
        self._transaction.commit()
        self._points.note("swap", task="completion", attempt=1)
        self._points.reach("committed, reply not read")


class _DynamoDBTable:
    """Counts in an item: an update adds one."""

    def __init__(self, store: DynamoDBStore) -> None:
        self._store, self._table = store, f"effects-{uuid4().hex}"
        store._connected().create_table(
            TableName=self._table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        )

    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        add = {"UpdateExpression": "ADD effects :one", "ExpressionAttributeValues": {":one": 1}}
        handle.commit("done", [{"Update": {"TableName": self._table, "Key": {"key": key}, **add}}])

    def count(self, key: str) -> int:
        asked: Any = {"TableName": self._table, "Key": {"key": {"S": key}}, "ConsistentRead": True}
        found = self._store._connected().get_item(**asked)
        return int(found["Item"]["effects"]["N"]) if "Item" in found else 0


class _SQLTable:
    """One row for each effect, without a unique constraint."""

    def __init__(self, url: str) -> None:
        self._table = Table(f"effects_{uuid4().hex}", MetaData(), Column("key", String(200)))
        # Nothing that is open may cross the forks.
        self._engine = create_engine(make_url(url).set(query={}), poolclass=NullPool)
        self._table.create(self._engine)

    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        with handle.transaction() as transaction:
            transaction.execute(insert(self._table).values(key=key))
            transaction.done("done")

    def count(self, key: str) -> int:
        with self._engine.connect() as connection:
            asked = select(func.count()).select_from(self._table).where(self._table.c.key == key)
            return int(connection.execute(asked).scalar_one())


class _Index:
    """Entries under a lock that the kernel releases when its holder is killed; it checks fences."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path)

    def raise_fence(self, token: int) -> None:
        self._ledger.append(Fact(what="fence", token=token))

    def find(self) -> str | None:
        return "done" if self.count() else None

    def add(self, token: int) -> str:
        with self._ledger.locked():
            if token < max((row.token for row in self._ledger.rows() if row.what == "fence"), default=0):
                raise PermissionError("fenced off")
            self._ledger.append(Fact(what="entry"))
        return "done"

    def count(self) -> int:
        return sum(row.what == "entry" for row in self._ledger.rows())


class _Attacker:
    """Delivers tasks in forks of itself and kills them; it makes the clean deliveries itself.

    A survivor in the same process costs a tenth of a fork. Its heartbeat is its own: a fork inherits its lock and
    never touches it.
    """

    def __init__(self, url: str, folder: Path, flaw: str) -> None:
        record_if_wanted(url)
        opened = open_store(url)
        opened.provision()
        self._own_store = FLAWS[flaw](opened)
        self._store = FLAWS[flaw](_warm(url)) if isinstance(opened, DynamoDBStore) else self._own_store
        self._own_heartbeat, self._folder = Heartbeat(), folder
        self._ledger, self._read = Ledger(folder / "ledger"), 0
        self._table: Any = None
        if isinstance(opened, DynamoDBStore):
            self._table = _DynamoDBTable(opened)
        elif isinstance(opened, SQLStore):
            self._table = _SQLTable(url)
        gc.collect()
        gc.freeze()  # the children then touch no garbage collector's header, and fewer pages are copied

    def attack(self, task: Task) -> tuple[Verdict, bool]:
        """One task's verdict, and whether all its kills struck."""
        key, ahead = f"{task.kind}:{uuid4().hex}", 0
        lease = task.kind.promise.policy.lease_ms + _SLACK
        histories: list[list[Fact]] = []
        for kill in (*task.kills, Kill(0), Kill(0)):
            ahead += lease * kill.late
            self._deliver(task, key, len(histories), ahead, kill)
            rows, self._read = self._ledger.since(self._read)
            histories.append(rows)
        struck = [any(row.what == "killed" for row in rows) for rows in histories[: len(task.kills)]]
        return _judged(task, histories, self._count(task.kind, key, histories)), all(struck)

    def _deliver(self, task: Task, key: str, number: int, ahead: int, kill: Kill) -> None:
        points = Points(self._ledger, kill.at if kill.at and not kill.call else None)

        def deliver(store: Store, heartbeat: Heartbeat) -> None:
            # Without a hook nobody notes how far it came.
            dying: Any = _LaterStore(store, ahead) if kill.call else _DyingStore(store, ahead, points)
            delivered = operation(key, task.kind.promise, number)

            def observe(event: Event) -> None:
                points.note("event", task=event.name)

            delivery = Delivery(delivered, dying, CODEC, heartbeat, ControlFlow(), observe)
            told = verdicts.tell(delivery, lambda claim: self._body(task, key, points, claim))
            points.reach("everything done, not acknowledged")
            points.note("told", task=told.how, reference=told.value or "")

        if not kill.at:
            deliver(self._own_store, self._own_heartbeat)
            return
        gate, opener = os.pipe()

        def wait_and_deliver() -> None:
            os.close(opener)
            os.read(gate, 1)
            deliver(self._store, Heartbeat())

        child = os.fork() or _live_and_end(wait_and_deliver)
        os.close(gate)
        tracer = _trace(child, kill.call, kill.at) if kill.call else None
        os.close(opener)
        if tracer:
            tracer.communicate()
        _, ended = os.waitpid(child, 0)
        if kill.call and os.WIFSIGNALED(ended):
            points.note("killed", point=f"{kill.call} {kill.at}")
        elif ended and not os.WIFSIGNALED(ended):
            raise RuntimeError(f"delivery {number} of {task} ended with status {ended}")

    def _body(self, task: Task, key: str, points: Points, claim: Claim | None) -> str:
        assert claim is not None
        receipt = effect_key(claim.key, "charge") if task.kind.promise.keyed else uuid4().hex

        def noted(name: str, act: Callable[[Any], Any]) -> Callable[[Step | None], Any]:
            def call(step: Step | None) -> Any:
                points.reach(f"before {name}")
                answer = act(step)
                points.reach(f"after {name}")
                return answer

            return call

        effect = noted("the effect", lambda step: points.note("effect", reference=step.key if step else receipt))
        if task.kind.is_bare:
            points.reach("the body begins")
            for act in (claim.renew, partial(effect, None), claim.renew) if task.renews else (partial(effect, None),):
                act()
            return receipt
        handle = ProtectedAttempt(
            claim, CODEC, effects={"effect": AtMostOnce()} if task.kind is Kind.REFUSED_STEP else None
        )
        index = self._index(key)
        if task.kind in _IN_TABLE:
            self._table.commit(key, handle)
        elif task.kind in _FENCED:
            handle.fenced_step(
                "effect",
                fence=noted("the fence", lambda step: index.raise_fence(step.fencing_token)),
                probe=lambda step: index.find() if task.kind is Kind.FENCED_STEP else None,
                act=noted("the effect", lambda step: index.add(step.fencing_token)),
            )
        else:
            handle.step("effect", effect)
        return "done"

    def _index(self, key: str) -> _Index:
        return _Index(self._folder / f"index-{key.rpartition(':')[2]}")

    def _count(self, kind: Kind, key: str, histories: Iterable[Sequence[Fact]]) -> int:
        if kind in _IN_TABLE:
            return int(self._table.count(key))
        if kind in _FENCED:
            return self._index(key).count()
        receipts = [row.reference for rows in histories for row in rows if row.what == "effect"]
        return len(set(receipts) if kind.promise.keyed else receipts)


def _live_and_end(deliver: Callable[[], None]) -> NoReturn:
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
    traced = ("-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={nth}")
    tracer = subprocess.Popen(["strace", "-f", "-p", str(child), *traced], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        os.kill(child, signal.SIGKILL)
        raise RuntimeError(f"strace: {said}")
    return tracer


def _warm(url: str) -> DynamoDBStore:
    """A DynamoDB that forks of this process may use at little cost."""
    store = DynamoDBStore.from_url(url)
    client = store._connected()
    client.close()  # its sockets, not the client: the first request of each child opens its own
    return DynamoDBStore(store.table, client=lambda: client)


def _judged(task: Task, histories: list[list[Fact]], effects: int) -> Verdict:
    """What must follow from the points at which deliveries died, against what the ledger says."""
    rows = [row for history in histories for row in history]

    def of(what: str) -> list[Fact]:
        return [row for row in rows if row.what == what]

    def stored(history: list[Fact]) -> bool:
        return any(row.what == "swap" and row.task == "completion" and row.attempt for row in history)

    def left(what: str) -> int:
        """How many deliveries came so far, and did not live to complete."""
        return sum(any(row.what == what for row in history) and not stored(history) for history in histories)

    is_traced = any(kill.call for kill in task.kills)  # nobody noted how far it came
    told = [Told(row.task, row.reference) for row in of("told")]
    finals = of("final")
    again = left("effect")
    seen = Seen(
        promise=task.kind.promise,
        effects=effects,
        told=told,
        clean=told[-2:],
        status=Status(finals[-1].key) if finals else None,
        tokens=[row.token for row in of("claimed")],
        excused=again if task.kind.is_bare and task.kind is not Kind.EXACTLY_ONCE else None,
        may_be_unknown=is_traced or not task.kind.is_bare or bool(left("claimed")),
    )
    problems, points = list(verdicts.breaches(seen)), Counter(row.point for row in of("killed"))
    if len({row.reference for row in finals}) > 1:
        problems.append("a final state was changed")
    if task.kind is Kind.AT_LEAST_ONCE and not is_traced and effects != 1 + again:
        problems.append(f"the body had its effect {effects} times, and {again} deliveries died after it")
    if task.kind is Kind.AT_MOST_ONCE and not is_traced and left("claimed") and not seen.unknown:
        problems.append("a claim was abandoned, and somebody ran again")
    return Verdict(
        task=str(task),
        promise=task.kind,
        deliveries=len(histories),
        faults=points,
        reached=points,
        effects=effects,
        unknown=seen.unknown,
        unexplained=seen.unknown and not seen.may_be_unknown,
        stuck=seen.stuck,
        takeovers=sum(row.task == "taken_over" for row in of("event")),
        problems=tuple(problems),
    )


_Attack = Callable[[Task], bool]
"""Attacks and reports; whether all kills struck."""


def _everywhere(
    attack: _Attack, task: Task, share: int = 0, of: int = 1, *, late: bool = True, then: Sequence[bool] = ()
) -> None:
    """Kill one more delivery at every point until one survives; with each of them ``then`` another, late or early."""
    for at in itertools.count(1 + share, of):
        struck = replace(task, kills=(*task.kills, Kill(at, late)))
        if not attack(struck):
            break
        for each in then:
            _everywhere(attack, struck, late=each)


def _system_calls(attack: _Attack, kinds: Iterable[Kind], calls: Sequence[str], share: int, of: int) -> None:
    """Every system call by which an attempt talks to the store or to its ledger."""
    for kind, call in list(itertools.product(kinds, (*calls, "write")))[share::of]:
        for nth in itertools.count(1):
            if not attack(Task(kind, (Kill(nth, call=call),))):
                break


def why_no_ptrace() -> str | None:
    """Why processes cannot be traced here, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(["strace", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"ptrace is not permitted: {probe.stderr.strip()}"


def sweep(
    how: str,
    kinds: Sequence[str] = BARE,
    *,
    progress: Progress = lambda done: None,
    processes: int = 2,
    target: str = "dynamodb",
    url: str | None = None,
    flaw: str = "none",
) -> Result:
    """Run one sweep of bodies of these kinds, with a flaw of :data:`lab.proof.flaws.FLAWS`.

    It is ``"brief"`` (every point once), ``"singles"`` (with and without renewals), ``"points"`` (singles and pairs) or
    ``"system calls"``.
    """
    found: list[Verdict] = []
    with ExitStack() as stack:
        place = url or stack.enter_context(start(target))
        began = time.monotonic()
        given: dict[str, Any] = {"how": how, "kinds": kinds, "target": target, "url": place, "flaw": flaw}
        for verdict in fan_out(_work, processes, **given):
            found.append(verdict)
            progress(1)
    campaign = "SIGKILL at every system call" if how == "system calls" else "SIGKILL at every point"
    rows = verdicts.rows_of(
        found,
        store=TARGETS[target].label,
        campaign=campaign if set(kinds) <= set(BARE) else f"{campaign} of an effect",
        seconds=round(time.monotonic() - began, 1),
    )
    rows = [replace(row, system=CONTROL) if row.promise == Kind.TOKEN_ALONE else row for row in rows]
    return Result(found, rows)


def run(target: str, progress: Progress, how: str) -> list[Row]:
    """One sweep of bare bodies; then every system call, where that can be traced."""
    rows = sweep(how, target=target, progress=progress).rows
    if why_no_ptrace() is None:
        rows += sweep("system calls", target=target, progress=progress).rows
    return rows


def _work(
    report: Report, share: int, of: int, *, how: str, kinds: Sequence[str], target: str, url: str, flaw: str
) -> None:
    wanted = [Kind(each) for each in kinds]
    with temporary_folder() as folder:
        attacker = _Attacker(url, folder, flaw)

        def attack(task: Task) -> bool:
            verdict, struck = attacker.attack(task)
            report(verdict)
            return struck

        if how == "system calls":
            _system_calls(attack, wanted, TARGETS[target].calls, share, of)
            return
        for kind in wanted:
            then = () if how != "points" else (True, False) if kind.is_bare else (True,)
            for renews in (True,) if how == "brief" else (False, True) if kind.is_bare else (False,):
                _everywhere(attack, Task(kind, (), renews), share, of, then=then)
