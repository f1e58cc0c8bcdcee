"""Somebody else's exception at every line of the library: a soft time limit, an exit, a timeout of gevent's.

A signal handler raises wherever the main thread is. So for each kind of body the lines are counted that one call runs,
and the call is made again with a strike at each. Whatever it hit, no renewal is left, the next call is protected, and
the strike is raised unless the outcome had been recorded.
"""

import dis
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from celery import Celery

import celery_idempotent
from celery_idempotent import AtMostOnce, IdempotentTask, Policy, current_attempt, idempotent
from celery_idempotent.engine.claim import Claim, new_nonce
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.protocol.operation import abandoned
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.jobs import Progress
from lab.proof.mutants import Mutant
from lab.proof.table import CONTROL, Row
from lab.proof.verdicts import OUTCOMES, Remembered, Result, Verdict, rows_of

_PACKAGE = str(Path(celery_idempotent.__file__).parent)

_ROOM = re.compile(f"{re.escape(_PACKAGE)}/(?!stores/memory)[a-z]+/")
"""Errors and texts belong to no room, and are also asked by Celery, when the delivery is over. The store in memory
stands for a server, whose writes no signal of ours divides."""


class Limit(Exception):
    """Stands for ``SoftTimeLimitExceeded``, which code that catches every ``Exception`` also catches."""


class Exit(BaseException):
    """Stands for ``SystemExit``, ``KeyboardInterrupt``, and gevent's ``Timeout``."""


class _Striker:
    """Counts the lines of the package that run, and raises at one of them."""

    def __init__(self, at: int = 0, strike: type[BaseException] = Limit) -> None:
        self.lines, self.place, self._at, self._strike = 0, "", at, strike

    def strike(self, call: Callable[[str], Any], order: str) -> BaseException | None:
        """What the call raised, its traceback kept as somebody's report would."""
        sys.settrace(self._trace_call)
        try:
            call(order)
        except BaseException as error:  # noqa: BLE001 - it is looked at
            return error
        finally:
            sys.settrace(None)
        return None

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._trace_line if _ROOM.match(frame.f_code.co_filename) else None

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "line" or frame.f_lasti in _exits(frame.f_code):
            return self._trace_line
        self.lines += 1
        if self.lines == self._at:
            sys.settrace(None)
            self.place = f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
            raise self._strike
        return self._trace_line


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


class Kind:
    """A kind of call over a store of its own: a body that gets the order, and how many effects are promised."""

    def __init__(self, body: Callable[["Kind", str], Any], most: int = 2, *, is_task: bool = True, **policy: Any):
        self.store, self.most, self.effects = MemoryStore(), most, Counter[str]()

        def charge(order: str) -> Any:
            return body(self, order)

        self.call: Callable[[str], Any]
        if not is_task:
            guarded: Any = idempotent(Policy("order", **policy), store=self.store, name="charge")(charge)
            self._key, self.call = guarded.idempotency_key_for, guarded
            return
        app = Celery("strikes", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(idempotency_store=self.store, task_acks_late=True, task_reject_on_worker_lost=True)
        options: Any = {"base": IdempotentTask, "idempotent": Policy("order", **policy), "shared": False}
        task: Any = app.task(name="charge", **options)(charge)
        self._key, self.call = task.idempotency_key_for, lambda order: task.apply((order,)).get(propagate=True)

    def charge(self, order: str) -> str:
        self.effects[order] += 1
        return "charged"

    def record(self, order: str) -> Record | None:
        return self.store.get(self._key(order))

    def again(self, order: str) -> str:
        """How a clean call ends after the last lease."""
        record = self.record(order)
        if record is not None and record.status is Status.IN_PROGRESS:
            self.store.swap(abandoned(record, self.store.now(), new_nonce()), record.revision)
        try:
            return str(self.call(order))
        except Exception as error:  # noqa: BLE001 - it is told
            return repr(error)


def _raises(kind: Kind, order: str) -> None:
    kind.charge(order)
    raise Remembered(order)


def _step(kind: Kind, order: str) -> Any:
    return current_attempt().step("charge", lambda step: kind.charge(order))


KINDS: dict[str, Callable[[], Kind]] = {
    "returns": lambda: Kind(Kind.charge),
    "refused": lambda: Kind(Kind.charge, most=1, on_takeover="refuse"),
    "raises": lambda: Kind(_raises, remember=(Remembered,)),
    "step": lambda: Kind(_step),
    "refused step": lambda: Kind(_step, most=1, effects={"charge": AtMostOnce()}),
    "function": lambda: Kind(Kind.charge, is_task=False),
}


def _never_over(right: Any, self: Claim, *args: Any, **options: Any) -> None:
    right(self, *args, **{**options, "is_underway": lambda: True})


UNENDED = Mutant("liveness is a flag", "a signal that strikes before an exit sets it", Claim, "__init__", _never_over)
"""What this campaign is there to notice."""


def attack(name: str, every: int = 1) -> Iterator[Verdict]:
    """What became of the call of that kind with a strike at every line, or at every so many."""
    kind, striker = KINDS[name](), _Striker()
    for warm in range(3):
        _Striker().strike(kind.call, f"warm {warm}")
    striker.strike(kind.call, "unharmed")
    for strike in (Limit, Exit):
        for at in range(1, striker.lines + 1, every):
            here = _Striker(at, strike)
            raised = here.strike(kind.call, order := f"{strike.__name__} at {at}")
            if here.place:  # or it was a shorter way than before
                yield _judge(kind, f"{name}, {strike.__name__} at {here.place}", order, raised)


def _judge(kind: Kind, task: str, order: str, raised: BaseException | None) -> Verdict:
    problems, record, effects = [], kind.record(order), kind.effects[order]
    if heartbeat.in_flight:
        problems.append(f"{heartbeat.in_flight} claims are renewed for ever")
        heartbeat._beats.clear()
    is_recorded, error = record is not None and record.status in OUTCOMES, raised
    while error is not None and not isinstance(error, Limit | Exit):
        error = error.__cause__
    if not (is_recorded or error):
        problems.append(f"the strike was swallowed: {raised!r}")
    ended = [kind.again(order) for _ in range(3)]
    record, made = kind.record(order), kind.effects[order]
    status = record.status if record else None
    if status in {None, Status.IN_PROGRESS, Status.RELEASED}:
        problems.append(f"the next calls ran unprotected: {status}, {ended}")
    if made > (effects if is_recorded else kind.most):
        problems.append(f"{made} effects, {effects} when it was struck")
    if not made and status not in {Status.UNKNOWN, Status.FAILED}:
        problems.append(f"no effect: {ended}")
    return Verdict(
        task=task,
        promise="at most once" if kind.most == 1 else "at least once",
        deliveries=4,
        faults={"strike": 1},
        effects=made,
        unknown=status is Status.UNKNOWN and not made,
        failed=status is Status.FAILED and not made,
        problems=tuple(problems),
    )


def run(progress: Progress, every: int = 1) -> Result:
    """Attack every kind of call, and one with the mend undone."""
    verdicts, rows = [], []
    for name in KINDS:
        began, found = time.monotonic(), list(attack(name, every))
        verdicts += found
        rows += _rows(found, name, began)
        progress(1)
    with UNENDED.applied():
        began = time.monotonic()
        rows += _rows(list(attack("function")), "function", began, system=CONTROL)
    return Result(verdicts, rows)


def _rows(found: Sequence[Verdict], name: str, began: float, **named: str) -> list[Row]:
    campaign, seconds = "a strike at every line", time.monotonic() - began
    return rows_of(found, store=f"memory, {name}", campaign=campaign, seconds=seconds, **named)
