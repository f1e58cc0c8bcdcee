"""Somebody else's exception at every line of the library: a soft time limit, an exit, a timeout of gevent's.

A signal handler raises wherever the main thread is. So for each kind of body the lines are counted that one call runs,
and the call is made again with a strike at each. Whatever it hit, no renewal is left, the next call is protected, and
the strike is raised unless the outcome had been recorded.
"""

import asyncio
import dis
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partialmethod
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from celery import Celery
from sqlalchemy import Column, MetaData, String, Table, create_engine, func, insert, select

import celery_idempotent
from celery_idempotent import AtMostOnce, IdempotentTask, Policy, clock, current_attempt, idempotent
from celery_idempotent.engine import loops
from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.protocol.operation import Operation, abandoned
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.table import CONTROL, Row

_PATIENCE = 5.0
"""Seconds for a thread to end."""

_PACKAGE = str(Path(celery_idempotent.__file__).parent)

_ROOM = re.compile(f"{re.escape(_PACKAGE)}/(?!stores/memory)[a-z]+/")
"""Errors and texts belong to no room, and are also asked by Celery, when the delivery is over. The store in memory
stands for a server, whose writes no signal of ours divides."""


class Limit(Exception):
    """Stands for ``SoftTimeLimitExceeded``, which code that catches every ``Exception`` catches, too."""


class Exit(BaseException):
    """Stands for ``SystemExit``, ``KeyboardInterrupt``, and gevent's ``Timeout``."""


STRIKES = (Limit, Exit)


class Declined(Exception):
    """What a body raises that is no outcome; and one that is remembered."""


class Spent(Declined):
    """A failure that is remembered."""


class _Striker:
    """Counts the lines of the package that run, and raises at one of them."""

    def __init__(self, at: int = 0, strike: type[BaseException] = Limit) -> None:
        self.lines = 0
        self.place = ""
        self._at = at
        self._strike = strike

    def __enter__(self) -> "_Striker":
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if _ROOM.match(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "line" or frame.f_lasti in _exits(frame.f_code):
            return self._line
        self.lines += 1
        if self.lines == self._at:
            sys.settrace(None)
            self.place = f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
            raise self._strike
        return self._line


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Where a ``with`` block is left: a line for a tracer, and no place where the interpreter looks for signals.

    It looks after calls, on entering a function and on jumping back, so a lock that is written in C is always let go.
    Nor does it look in the NOP that a ``try:`` is, which is not even a part of the blocks around it.
    """
    instructions = list(dis.get_instructions(code))
    begins = [at for at, each in enumerate(instructions) if each.starts_line]
    lines, entered, idle = {}, set[int](), set[int]()
    for begin, end in zip(begins, [*begins[1:], len(instructions)], strict=True):
        names = [each.opname for each in instructions[begin:end]]
        lines[instructions[begin].offset] = instructions[begin].positions.lineno  # type: ignore[union-attr]
        if names[0] == "NOP":
            idle.add(instructions[begin].offset)
        if "BEFORE_WITH" in names or "BEFORE_ASYNC_WITH" in names:
            entered.add(instructions[begin].offset)
    withs = {lines[offset] for offset in entered}
    return frozenset(offset for offset, line in lines.items() if line in withs and offset not in entered) | idle


class Stage:
    """One app, its store, and what happened in the world: how often each order was charged."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.app = Celery("strikes", broker="memory://", backend="cache+memory://")
        self.app.conf.update(idempotency_store=store, task_acks_late=True, task_reject_on_worker_lost=True)
        self.effects: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.count: Callable[[str], int] = self.effects.__getitem__
        """How often an order was charged."""

    def charge(self, order: str) -> str:
        self.effects[order] += 1
        return "charged"


@dataclass(frozen=True)
class Kind:
    """A kind of call: what makes one for an order, its key, and how many effects are promised at most.

    ``call`` returns or raises as the delivery ended. ``before`` is what the order has been through by then.
    """

    stage: Stage
    key: Callable[[str], str]
    call: Callable[[str], Any]
    most: int = 2
    before: Callable[[str], object] = lambda order: None
    is_protected: bool = True


def _of_task(stage: Stage, body: Callable[..., Any], most: int = 2, **policy: Any) -> Kind:
    """A task whose body gets the order."""

    def run(self: Any, order: str) -> Any:
        return body(order)

    options = {"name": "charge", "shared": False, "idempotent": Policy("order", **policy)}
    task: Any = stage.app.task(base=IdempotentTask, bind=True, **options)(run)
    is_protected = policy.get("mode") != "observe"
    return Kind(
        stage, task.idempotency_key_for, _applied(task, lambda order: (order,)), most, is_protected=is_protected
    )


def _applied(task: Any, arguments: Callable[[str], tuple[Any, ...]], **options: Any) -> Callable[[str], Any]:
    def call(order: str) -> Any:
        result = task.apply(arguments(order), **options).result
        if isinstance(result, BaseException):
            raise result
        return result

    return call


def _raises(stage: Stage) -> Kind:
    def raises(order: str) -> None:
        stage.charge(order)
        raise Spent(order)

    return _of_task(stage, raises, remember=(Spent,))


def _releases(stage: Stage) -> Kind:
    def releases(order: str) -> str:
        if order not in stage.seen:
            stage.seen.add(order)
            raise Declined(order)
        return stage.charge(order)

    return _of_task(stage, releases)


def _step(stage: Stage, **policy: Any) -> Kind:
    def step(order: str) -> Any:
        return current_attempt().step("charge", lambda step: stage.charge(order))

    return _of_task(stage, step, **policy)


def _fenced_step(stage: Stage) -> Kind:
    def fenced_step(order: str) -> Any:
        return current_attempt().fenced_step(
            "charge",
            fence=lambda step: None,
            probe=lambda step: "charged" if stage.effects[order] else None,
            act=lambda step: stage.charge(order),
        )

    return _of_task(stage, fenced_step, most=1)


def _commit(stage: Stage) -> Kind:
    def commit(order: str) -> Any:
        return current_attempt().commit("charged", [{"order": order}])

    store: Any = stage.store
    stage.count = lambda order: sum(each["order"] == order for each in store.committed)
    return _of_task(stage, commit, most=1)


def _transaction(stage: Stage) -> Kind:
    ledger = Table("ledger", MetaData(), Column("charged", String(40)))
    url = f"sqlite:///{tempfile.mkdtemp()}/strikes.db"
    engine = create_engine(url)

    def count(order: str) -> int:
        with engine.begin() as connection:
            asked = select(func.count()).where(ledger.c.charged == order)
            return connection.execute(asked).scalar_one()

    def transaction(order: str) -> Any:
        with current_attempt().transaction() as tx:
            tx.execute(insert(ledger).values(charged=order))
            return tx.done("charged")

    stage = Stage(open_store(url + "?timeout=0.1"))
    stage.count = count
    stage.store.provision()
    ledger.create(engine)
    return _of_task(stage, transaction, most=1)


def _of_function(stage: Stage, function: Any) -> Kind:
    guarded: Any = idempotent(Policy("order"), store=stage.store, name="function")(function)
    return Kind(stage, guarded.idempotency_key_for, guarded)


def _coroutine(stage: Stage) -> Kind:
    @idempotent(Policy("order"), store=stage.store)
    async def coroutine(order: str) -> str:
        await asyncio.sleep(0)
        return stage.charge(order)

    async def call(order: str) -> str:
        try:
            return await coroutine(order)
        finally:
            sys.settrace(None)
            await asyncio.to_thread(_join_deliveries)  # while the loop goes on

    guarded: Any = coroutine
    return Kind(stage, guarded.idempotency_key_for, lambda order: asyncio.run(call(order)))


def _join_deliveries() -> None:
    """Wait until the delivery has ended; who awaited it may have been struck."""
    for thread in threading.enumerate():
        if thread.name == "celery-idempotent":
            thread.join(_PATIENCE)
            if thread.is_alive():
                raise AssertionError("a delivery waits for a call that nobody makes")


def _item(stage: Stage) -> Kind:
    kind = _of_task(stage, stage.charge)
    task = stage.app.tasks["charge"]

    def call(order: str) -> Any:
        # The same message each time, as a redelivery is.
        return _applied(task.map([order]), lambda order: (), task_id=f"map of {order}")(order)

    return replace(kind, call=call)


def _recursing(stage: Stage, again: Callable[[str], Any]) -> Callable[[str], Any]:
    """A body that calls itself twice, through what guards it."""
    running: list[str] = []

    def recursion(order: str) -> Any:
        if len(running) == 2:
            return stage.charge(order)
        running.append(order)
        try:
            return again(order)
        finally:
            running.pop()

    return recursion


def _recursion(stage: Stage) -> Kind:
    kind: Kind = _of_function(stage, _recursing(stage, lambda order: kind.call(order)))
    return kind


def _claim(stage: Stage, order: str) -> None:
    """Another delivery has it in flight."""
    task = stage.app.tasks["charge"]
    identity = task.idempotency_identity((order,), {}, headers={}, task_id="")
    names = {"task": task.name, "task_id": "another", "worker": ""}
    claim(stage.store, Operation(identity=identity, policy=task.idempotency_policy, **names))


def _takeover(stage: Stage) -> Kind:
    kind = _of_task(stage, stage.charge)

    def before(order: str) -> None:
        _claim(stage, order)
        _end_lease(kind, order)

    return replace(kind, before=before)


def _replay(stage: Stage) -> Kind:
    kind = _of_task(stage, stage.charge)
    return replace(kind, before=kind.call, most=1)


def _deadline(stage: Stage) -> Kind:
    def deadline(order: str) -> str:
        if current_attempt().number == 1:
            passed[0] += 100
            current_attempt().ensure_owned()
        return stage.charge(order)

    passed = [0]
    clock.monotonic = lambda: time.monotonic() + passed[0]
    return _of_task(stage, deadline, deadline=90)


KINDS: dict[str, Callable[[Stage], Kind]] = {
    "returns": lambda stage: _of_task(stage, stage.charge),
    "refused": lambda stage: _of_task(stage, stage.charge, most=1, on_takeover="refuse"),
    "observed": lambda stage: _of_task(stage, stage.charge, most=99, mode="observe"),
    "raises": _raises,
    "releases": _releases,
    "step": _step,
    "refused step": lambda stage: _step(stage, most=1, effects={"charge": AtMostOnce()}),
    "fenced step": _fenced_step,
    "commit": _commit,
    "transaction": _transaction,
    "function": lambda stage: _of_function(stage, stage.charge),
    "coroutine": _coroutine,
    "item": _item,
    "recursion": _recursion,
    "recursive task": lambda stage: _of_task(stage, _recursing(stage, lambda order: stage.app.tasks["charge"](order))),
    "conflict": lambda stage: replace(_of_task(stage, stage.charge), before=lambda order: _claim(stage, order)),
    "takeover": _takeover,
    "replay": _replay,
    "deadline": _deadline,
}


@dataclass
class Found:
    """What a campaign found for one kind of call; ``effects`` says how often that many were had."""

    kind: str
    lines: int
    most: int
    problems: list[str] = field(default_factory=list)
    effects: Counter[int] = field(default_factory=Counter)
    unknown: int = 0
    failed: int = 0


def attack(name: str, every: int = 1) -> Found:
    """Make the call of that kind with a strike at every line, or at every so many."""
    loops._LOOK_EVERY = 0.01
    kind = KINDS[name](Stage(MemoryStore()))
    for warm in range(3):
        _struck(kind, f"warm {warm}", _Striker())
    striker = _Striker()
    _struck(kind, "unharmed", striker)
    found = Found(name, striker.lines, kind.most)
    for strike in STRIKES:
        for at in range(1, striker.lines + 1, every):
            here = _Striker(at, strike)
            for problem in _judged(kind, f"{strike.__name__} at {at}", here, found):
                found.problems.append(f"{name}, {strike.__name__} at {here.place}: {problem}")
    return found


def _struck(kind: Kind, order: str, striker: _Striker) -> BaseException | None:
    """What the call raised, its traceback kept as somebody's report would."""
    kind.before(order)
    try:
        with striker:
            kind.call(order)
    except BaseException as error:  # noqa: BLE001 - it is looked at
        return error
    return None


def _judged(kind: Kind, order: str, striker: _Striker, found: Found) -> Iterator[str]:
    raised = _struck(kind, order, striker)
    if not striker.place:
        return  # a shorter way than before
    if heartbeat.in_flight:
        yield f"{heartbeat.in_flight} claims are renewed for ever"
        heartbeat._beats.clear()
    record = kind.stage.store.get(kind.key(order))
    is_recorded = record is not None and record.status in {Status.COMPLETED, Status.FAILED}
    if not (is_recorded or _is_of(raised, STRIKES)):
        yield f"the strike was swallowed: {raised!r}"
    effects = kind.stage.count(order)
    ended = [_ended(kind, order) for _ in range(3)]
    del raised
    record = kind.stage.store.get(kind.key(order))
    if record is None:
        yield f"nothing recorded: {ended}"
        return
    made = kind.stage.count(order)
    found.effects[made] += 1
    found.unknown += not made and record.status is Status.UNKNOWN
    found.failed += not made and record.status is Status.FAILED
    if record.status in {Status.IN_PROGRESS, Status.RELEASED} and kind.is_protected:
        yield f"the next calls ran unprotected: {record.status}, {ended}"
    if made > (effects if is_recorded and kind.is_protected else kind.most):
        yield f"{made} effects, {effects} when it was struck"
    if not made and record.status not in {Status.UNKNOWN, Status.FAILED}:
        yield f"no effect: {ended}"


def _is_of(error: BaseException | None, types: tuple[type[BaseException], ...]) -> bool:
    while error is not None:
        if isinstance(error, types):
            return True
        error = error.__cause__
    return False


def _ended(kind: Kind, order: str) -> str:
    """How a clean call ends after the last lease."""
    try:
        _end_lease(kind, order)
        return str(kind.call(order))
    except Exception as error:  # noqa: BLE001 - it is told
        return repr(error)


def _end_lease(kind: Kind, order: str) -> None:
    store = kind.stage.store
    record = store.get(kind.key(order))
    if record is not None and record.status is Status.IN_PROGRESS:
        store.swap(abandoned(record, store.now(), new_nonce()), record.revision)


def run(progress: Callable[[int], None], every: int = 1) -> tuple[list[Row], list[str]]:
    """Attack every kind of call, and one with the mend undone; the rows, and what was found."""
    rows, problems = [], []
    for name in KINDS:
        began = time.monotonic()
        found = attack(name, every)
        problems += found.problems
        rows.append(_row("celery-idempotent", found, began))
        progress(1)
    began = time.monotonic()
    with switched_off():
        rows.append(_row(CONTROL, attack("function"), began))
    return rows, problems


@contextmanager
def switched_off() -> Iterator[None]:
    """Liveness as a flag, which an exit sets that a signal can interrupt: what this campaign is there to notice."""
    with mock.patch.object(Claim, "__init__", partialmethod(_never_over, Claim.__init__)):
        yield


def _never_over(self: Claim, init: Callable[..., None], *args: Any, **options: Any) -> None:
    init(self, *args, **{**options, "is_underway": lambda: True})


def _row(system: str, found: Found, began: float) -> Row:
    struck = found.effects.total()
    return Row(
        system=system,
        store=f"memory, {found.kind}" if found.kind != "transaction" else "SQLite, transaction",
        promise="at most once" if found.most == 1 else "at least once",
        campaign="a strike at every line",
        tasks=struck,
        faulted=struck,
        deliveries=4 * struck,
        faults={"strikes": struck},
        effects_0=found.effects[0] - found.unknown - found.failed,
        effects_1=found.effects[1],
        effects_2=sum(count for effects, count in found.effects.items() if effects > 1),
        unknown=found.unknown,
        violations=len(found.problems),
        seconds=time.monotonic() - began,
    )
