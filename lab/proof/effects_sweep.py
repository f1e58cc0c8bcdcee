"""Real processes, killed by SIGKILL at every point of every kind of effect.

Each kind has a receiver that does what it is asked, as often as it is asked, by its own rules: a ledger without
memory, an API that honours keys, an index that checks fences, a table in DynamoDB, a table in the SQL store's own
database. What happened is counted there and nowhere else.

Some kinds keep every result as an object, also of a step. After each delivery, whether it died or not, each object that
the record points to must be there and be what was written.
"""

import fcntl
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import boto3
from sqlalchemy import Column, MetaData, String, Table, func, insert, select

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import ResultLost
from celery_idempotent.protocol.contents import ContentLost, Slot, contents_of
from celery_idempotent.protocol.effects import AtMostOnce
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.store import CommittingStore, OutboxMessage, Store, Transaction, TransactionalStore
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.objects import LargeResults, ObjectStore, open_large_results
from celery_idempotent.stores.objects.folder import FolderObjects
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.wrappers import Offloading
from lab.embedded.aws import REGION
from lab.folders import temporary_folder
from lab.proof.crash_sweep import LaterStore, Ledger, Points, live_and_end, warm
from lab.proof.fleet import Progress
from lab.proof.table import CONTROL, Row
from lab.proof.targets import TARGETS, start
from lab.proof.verdicts import CODEC, Promise, Told, operation, tell

__all__ = ["CAMPAIGN", "Kind", "Sweep", "kinds_of", "run", "sweep"]

CAMPAIGN = "SIGKILL at every point of an effect"


class Kind(StrEnum):
    """A kind of effect; the last is often taken for enough, and is judged as if it were."""

    AT_LEAST_ONCE = "step"
    AT_MOST_ONCE = "step under refuse"
    KEYED = "step with a key"
    FENCED = "fenced step"
    COMMIT = "commit"
    TRANSACTION = "transaction"
    LARGE_RESULT = "step and result as objects"
    LARGE_COMMIT = "commit of an object"
    LARGE_TRANSACTION = "transaction with an object"
    TOKEN_ALONE = "fencing token alone"

    @property
    def is_large(self) -> bool:
        """Whether results are kept as objects."""
        return self in {Kind.LARGE_RESULT, Kind.LARGE_COMMIT, Kind.LARGE_TRANSACTION}

    def allows(self, effects: int, unknown: bool) -> bool:
        """Whether that many effects keep the promise, once clean deliveries have ended."""
        match self:
            case Kind.AT_LEAST_ONCE:
                return effects >= 1
            case Kind.AT_MOST_ONCE:
                return effects == 1 or (unknown and effects == 0)
            case _:
                return effects == 1


def kinds_of(store: str) -> tuple[Kind, ...]:
    """The kinds of effect that a store of that name can serve."""
    kinds = [Kind.AT_LEAST_ONCE, Kind.AT_MOST_ONCE, Kind.KEYED, Kind.FENCED, Kind.TOKEN_ALONE]
    kinds += [Kind.LARGE_RESULT]
    kinds += [Kind.COMMIT, Kind.LARGE_COMMIT] if store == "dynamodb" else []
    kinds += [Kind.TRANSACTION, Kind.LARGE_TRANSACTION] if store in {"postgres", "mariadb", "sqlite"} else []
    return tuple(kinds)


class _DyingTransaction:
    """A transaction whose commit is two points."""

    def __init__(self, transaction: Transaction, points: Points) -> None:
        self._transaction = transaction
        self._points = points

    @property
    def connection(self) -> Any:
        return self._transaction.connection

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self._points.reach("before the record is written in the transaction")
        return self._transaction.swap(new, expected)

    def enqueue(self, message: OutboxMessage) -> None:
        self._transaction.enqueue(message)

    def commit(self) -> None:
        self._points.reach("before the commit")
        self._transaction.commit()
        self._points.reach("committed, reply not read")

    def rollback(self) -> None:
        self._transaction.rollback()


class _DyingStore(LaterStore):
    """A store whose every write is two points."""

    def __init__(self, store: Store, ahead: int, points: Points) -> None:
        super().__init__(store, ahead)
        self._points = points

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._dying(new, lambda: self.store.swap(new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        assert isinstance(self.store, CommittingStore)
        committing = self.store
        return self._dying(new, lambda: committing.swap_with(new, expected, writes))

    def begin(self, using: Any = None) -> Transaction:
        assert isinstance(self.store, TransactionalStore)
        self._points.reach("before the transaction begins")
        return _DyingTransaction(self.store.begin(using), self._points)

    def _dying(self, new: Record, swap: Callable[[], Record | None]) -> Record | None:
        name = _NAMES.get(new.status, "ending") if new.status is not Status.IN_PROGRESS or new.steps else "claim"
        self._points.reach(f"before the {name}")
        stored = swap()
        self._points.reach(f"{name} stored, reply not read")
        return stored


class _DyingObjects:
    """Objects whose every request is two points."""

    def __init__(self, objects: ObjectStore, points: Points) -> None:
        self._objects = objects
        self._points = points

    def put(self, name: str, data: bytes) -> None:
        self._points.reach("before the object is written")
        self._objects.put(name, data)
        self._points.reach("object written, reply not read")

    def get(self, name: str) -> bytes:
        self._points.reach("before the object is read")
        data = self._objects.get(name)
        self._points.reach("object read")
        return data

    def delete(self, name: str) -> None:
        raise AssertionError


_NAMES = {Status.IN_PROGRESS: "checkpoint", Status.COMPLETED: "completion", Status.UNKNOWN: "giving up"}


class _Receivers(Protocol):
    """Where effects are had and counted."""

    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        """Have the effect together with the record."""

    def count(self, key: str) -> int:
        """How many effects there are."""


class _NoTable:
    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        raise AssertionError

    def count(self, key: str) -> int:
        raise AssertionError


class _DynamoDBTable:
    """Counts in an item: an update adds one."""

    def __init__(self, store: DynamoDBStore) -> None:
        self._store = store
        self._table = f"effects-{uuid4().hex}"
        store._connected().create_table(
            TableName=self._table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        )

    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        add = {
            "TableName": self._table,
            "Key": {"key": key},
            "UpdateExpression": "ADD #effects :one",
            "ExpressionAttributeNames": {"#effects": "effects"},
            "ExpressionAttributeValues": {":one": 1},
        }
        handle.commit("done", [{"Update": add}])

    def count(self, key: str) -> int:
        found = self._store._connected().get_item(TableName=self._table, Key={"key": {"S": key}}, ConsistentRead=True)
        return int(found["Item"]["effects"]["N"]) if "Item" in found else 0


class _SQLTable:
    """One row for each effect, without a unique constraint."""

    def __init__(self, store: SQLStore) -> None:
        self._store = store
        self._table = Table(
            f"effects_{uuid4().hex}", MetaData(), Column("key", String(200)), Column("nonce", String(40))
        )
        transaction = store.begin()
        self._table.create(transaction.connection)
        transaction.connection.commit()
        transaction.rollback()

    def commit(self, key: str, handle: ProtectedAttempt) -> None:
        with handle.transaction() as transaction:
            transaction.execute(insert(self._table).values(key=key, nonce=uuid4().hex))
            transaction.done("done")

    def count(self, key: str) -> int:
        transaction = self._store.begin()
        found = transaction.connection.execute(
            select(func.count()).select_from(self._table).where(self._table.c.key == key)
        ).scalar_one()
        transaction.rollback()
        return int(found)


class _Index:
    """Entries in a file, guarded by a lock that the kernel releases when its holder is killed; it checks fences."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "index.json"

    def raise_fence(self, key: str, token: int) -> None:
        self._change(key, lambda entry: entry.update(fence=max(entry["fence"], token)))

    def find(self, key: str) -> str | None:
        found: list[str] = []
        self._change(key, lambda entry: found.extend(entry["effects"]))
        return found[0] if found else None

    def add(self, key: str, token: int) -> str:
        def added(entry: dict[str, Any]) -> None:
            if token < entry["fence"]:
                raise PermissionError("fenced off")
            entry["effects"].append("done")

        self._change(key, added)
        return "done"

    def count(self, key: str) -> int:
        found: list[str] = []
        self._change(key, lambda entry: found.extend(entry["effects"]))
        return len(found)

    def _change(self, key: str, change: Callable[[dict[str, Any]], None]) -> None:
        path = self._path.with_name(key.rpartition(":")[2])
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.read(descriptor, 1 << 16)
            entry = json.loads(text) if text else {"fence": 0, "effects": []}
            change(entry)
            new = json.dumps(entry).encode()
            os.pwrite(descriptor, new, 0)  # it only grows, so one write leaves no tail
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """What one process does."""

    kind: Kind
    key: str
    number: int
    ahead: int

    def under(
        self,
        store: Store,
        points: Points,
        ledger: Ledger,
        index: _Index,
        table: _Receivers,
        objects: ObjectStore,
    ) -> Told:
        dying: Any = _DyingStore(store, self.ahead, points)
        if self.kind.is_large:
            dying = Offloading(dying, LargeResults(_DyingObjects(objects, points), over=0))
        delivery = Delivery(
            operation(self.key, _PROMISE, self.number),
            dying,
            CODEC,
            Heartbeat(),
            ControlFlow(),
            lambda event: None,
        )

        def body(attempt: Claim | None) -> str:
            assert attempt is not None
            effects = {"effect": AtMostOnce()} if self.kind is Kind.AT_MOST_ONCE else None
            self._have_effect(ProtectedAttempt(attempt, CODEC, effects=effects), points, ledger, index, table)
            return "done"

        try:
            told = tell(delivery, body)
        except ResultLost:
            told = Told("ResultLost")  # which the judge takes for stuck
        points.reach("everything done, not acknowledged")
        return told

    def _have_effect(
        self, handle: ProtectedAttempt, points: Points, ledger: Ledger, index: _Index, table: _Receivers
    ) -> None:
        def noted(name: str, act: Callable[[Step], Any]) -> Callable[[Step], Any]:
            def call(step: Step) -> Any:
                points.reach(f"before {name}")
                answer = act(step)
                points.reach(f"after {name}")
                return answer

            return call

        effect = noted("the effect", lambda step: ledger.append("effect", receipt=step.key))
        fence = noted("the fence", lambda step: index.raise_fence(self.key, step.fencing_token))
        act = noted("the effect", lambda step: index.add(self.key, step.fencing_token))
        match self.kind:
            case Kind.AT_LEAST_ONCE | Kind.KEYED | Kind.AT_MOST_ONCE | Kind.LARGE_RESULT:
                handle.step("effect", effect)
            case Kind.FENCED:
                handle.fenced_step("effect", fence=fence, probe=lambda step: index.find(self.key), act=act)
            case Kind.TOKEN_ALONE:
                handle.fenced_step("effect", fence=fence, probe=lambda step: None, act=act)
            case Kind.COMMIT | Kind.TRANSACTION | Kind.LARGE_COMMIT | Kind.LARGE_TRANSACTION:
                table.commit(self.key, handle)


_PROMISE = Promise("at least once", "rerun")
"""Of the body as a whole; each kind of effect has its own."""

_LEASE = Policy().lease_ms + 11_000
"""Milliseconds; so much more than a lease that no two processes' guesses at a server's clock differ by it."""


@dataclass(slots=True)
class Sweep:
    """What became of the tasks of one kind.

    Args:
        kind: Of effect.
        tasks: How many were attacked.
        effects: How many tasks had that many effects.
        unknown: How many ended UNKNOWN.
        points: How often which point was died at.
        problems: What broke a promise; empty is good.
    """

    kind: Kind
    tasks: int = 0
    deliveries: int = 0
    effects: Counter[int] = field(default_factory=Counter)
    unknown: int = 0
    points: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Attacker:
    def __init__(self, url: str, folder: Path) -> None:
        self._own = open_store(url)
        self._own.provision()
        self._store: Store = warm(url) if isinstance(self._own, DynamoDBStore) else open_store(url)
        self._ledger = Ledger(str(folder / "ledger"))
        self._index = _Index(folder)
        self._receipts: list[str] = []
        self._table: _Receivers = _NoTable()
        self._objects: ObjectStore = _folder(folder)
        if isinstance(self._own, DynamoDBStore):
            self._table = _DynamoDBTable(self._own)
            self._objects = _bucket(self._own)
        elif isinstance(self._own, SQLStore):
            self._table = _SQLTable(self._own)
            self._own.close()  # nothing that is open may cross the forks

    def attack(self, found: Sweep, kills: Sequence[int]) -> bool:
        """Deliver one task in processes that die at ``kills``, then twice in some that live; whether all died."""
        key, ahead, struck = f"proof:1:{uuid4().hex}", 0, []
        self._receipts.clear()
        for number, kill in enumerate((*kills, None, None)):
            rows, told = self._deliver(_Delivery(found.kind, key, number, ahead), kill)
            died = [row["at"] for row in rows if row["fact"] == "killed"]
            found.points.update(died)
            found.deliveries += 1
            struck += [bool(died)] if kill else []
            self._receipts += [row["receipt"] for row in rows if row["fact"] == "effect"]
            if found.kind.is_large:
                found.problems += [f"{each} after deaths at points {kills}" for each in self._dangling(key)]
            ahead += _LEASE
        found.tasks += 1
        self._judge(found, key, kills, told)
        return all(struck)

    def _dangling(self, key: str) -> Iterator[str]:
        """What the record points to, and is not there or not what was written."""
        record = self._own.get(key)
        if isinstance(self._own, SQLStore):
            self._own.close()  # nothing that is open may cross the forks
        offloading = Offloading(self._own, LargeResults(self._objects, over=0))
        for name, encoded in contents_of(record) if record else ():
            try:
                offloading.unpack(encoded, Slot(key, "result", name))
            except ContentLost as error:
                yield f"the record points to what is not there ({error})"

    def _judge(self, found: Sweep, key: str, kills: Sequence[int], told: str | None) -> None:
        count = self._count(found.kind, key)
        unknown = told == "OutcomeUnknown"
        found.effects[count] += 1
        found.unknown += unknown
        if not found.kind.allows(count, unknown):
            found.problems.append(f"{count} effects after deaths at points {kills}")
        if told != "finished" and not (unknown and found.kind is Kind.AT_MOST_ONCE):
            found.problems.append(f"stuck after deaths at points {kills}: {told}")

    def _count(self, kind: Kind, key: str) -> int:
        match kind:
            case Kind.KEYED | Kind.LARGE_RESULT:
                return len(set(self._receipts))
            case Kind.FENCED | Kind.TOKEN_ALONE:
                return self._index.count(key)
            case Kind.COMMIT | Kind.TRANSACTION | Kind.LARGE_COMMIT | Kind.LARGE_TRANSACTION:
                count = self._table.count(key)
                self._own.close()
                return count
            case _:
                return len(self._receipts)

    def _deliver(self, delivery: _Delivery, kill: int | None) -> tuple[list[dict[str, Any]], str | None]:
        def live() -> None:
            points = Points(self._ledger, kill)
            told = delivery.under(self._store, points, self._ledger, self._index, self._table, self._objects)
            self._ledger.append("told", how=told.how)

        child = os.fork() or live_and_end(live)
        _, ended = os.waitpid(child, 0)
        rows = self._ledger.read()
        if os.WIFEXITED(ended) and os.WEXITSTATUS(ended):
            raise RuntimeError(f"delivery {delivery} ended with status {os.WEXITSTATUS(ended)}")
        return rows, next((row["how"] for row in rows if row["fact"] == "told"), None)


def _folder(folder: Path) -> ObjectStore:
    place = folder / "objects"
    place.mkdir()
    return FolderObjects(place)


def _bucket(store: DynamoDBStore) -> ObjectStore:
    """A bucket on the same server."""
    name = f"objects-{uuid4().hex}"
    url = f"s3://test:test@{name}?endpoint={store._connected().meta.endpoint_url}&region={REGION}"
    session = boto3.session.Session("test", "test", region_name=REGION)
    session.client("s3", endpoint_url=store._connected().meta.endpoint_url).create_bucket(Bucket=name)
    return open_large_results(url).objects


_MOST_POINTS = 40


def sweep(url: str, kinds: Sequence[Kind], *, pairs: bool, progress: Progress | None = None) -> list[Sweep]:
    """Attack the store at ``url`` at every point of each kind of effect, and at ``pairs`` of points.

    Args:
        url: Of an empty store.
        kinds: Of effects.
        pairs: Whether a second delivery dies, too, at each of its points.
        progress: Called with the number of tasks that are done.
    """
    found = [Sweep(kind) for kind in kinds]
    with temporary_folder() as folder:
        attacker = _Attacker(url, folder)
        for each in found:
            for _ in _kills(partial(attacker.attack, each), pairs):
                if progress:
                    progress(1)
    return found


def _kills(attack: Callable[[Sequence[int]], bool], pairs: bool) -> Iterator[tuple[int, ...]]:
    """Where processes were killed: at each point until one survives, and then for each at a second one."""
    for first in itertools.takewhile(lambda point: attack([point]), range(1, _MOST_POINTS)):
        yield (first,)
        if pairs:
            for second in itertools.takewhile(partial(_second, attack, first), range(1, _MOST_POINTS)):
                yield first, second


def _second(attack: Callable[[Sequence[int]], bool], first: int, second: int) -> bool:
    return attack([first, second])


def run(store: str, progress: Progress, *, pairs: bool) -> list[Row]:
    """All kinds of effect on a store of that name, at every point and, if asked for, every pair of points."""
    with ExitStack() as stack:
        site = stack.enter_context(start(store))
        began = time.monotonic()
        found = sweep(site.url, kinds_of(store), pairs=pairs, progress=progress)
        seconds = time.monotonic() - began
    return [
        Row(
            system="celery-idempotent" if each.kind is not Kind.TOKEN_ALONE else CONTROL,
            store=TARGETS[store].label,
            promise=str(each.kind),
            campaign=CAMPAIGN,
            tasks=each.tasks,
            faulted=each.tasks,
            deliveries=each.deliveries,
            faults=dict(each.points.most_common()),
            effects_0=each.effects[0] - each.unknown if each.effects[0] > each.unknown else 0,
            effects_1=each.effects[1],
            effects_2=sum(times for count, times in each.effects.items() if count > 1),
            unknown=each.unknown,
            violations=len(each.problems),
            seconds=round(seconds, 1),
        )
        for each in found
    ]
