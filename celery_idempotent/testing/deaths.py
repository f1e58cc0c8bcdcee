"""A worker's death at a line of its author's code, acted by a thread that stands still there.

An exception at the line would unwind the body, and its ``finally`` blocks and handlers would run: a killed process runs
none. So the thread waits at the line until the effects are counted, or for a second. Then it is unwound, since it holds
connections, locks and transactions that a server or the kernel would have taken from a dead process. On that way it
leaves ``with`` blocks of other people's code, so that a transaction is rolled back, and executes nothing of its
author's.

One way for all versions of Python: :func:`sys.settrace` sees the lines of its own thread alone, and leaves the tools of
:mod:`sys.monitoring`, coverage and debuggers of other threads alone.
"""

import ast
import dis
import functools
import gc
import linecache
import sys
import sysconfig
import threading
from asyncio import BaseEventLoop
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from celery_idempotent.testing.scenarios import Deliveries, DeliveryResult, Message, WorkerDied

When = Literal["before", "after"]

_PATIENCE = 1.0
"""Seconds that a dead thread stands still at most: the next delivery may wait for what it holds."""

_HANGS = 60.0
"""Seconds after which a delivery is given up."""

_POINTS = 100_000
"""After so many, only first passes are kept: loops have many."""

_YIELDS = {dis.opmap["YIELD_VALUE"], dis.opmap["RESUME"]}
"""Where a frame is that is suspended: from Python 3.13 on, at the instruction that resumes it."""

_EXITS = dis.opmap["WITH_EXCEPT_START"]
_FOREIGN = (*(sysconfig.get_paths()[each] for each in ("purelib", "platlib", "stdlib")), str(Path(__file__).parents[1]))


class Statement(NamedTuple):
    """A statement of a function, from its first line to its last; of a compound one its head."""

    path: str
    line: int
    last: int
    is_with: bool
    #: The function: a lambda may stand in the midst of a line of another.
    scope: str


class Point(NamedTuple):
    """One side of a statement, at which a worker may die, at the pass of that number."""

    statement: Statement
    when: When
    number: int


def authors(*names: str) -> Callable[[CodeType], bool]:
    """Whether code is the author's, whose packages or files ``names`` are, and is executed in each delivery.

    The body of a module is executed in one. Of what is installed, of Python and of this library only that is the
    author's which was asked for.
    """
    places = [place for name in names for place in _places(name)]
    foreign = [each for each in _FOREIGN if not any(place.startswith(each) for place in places)]

    @functools.cache
    def has_written(code: CodeType) -> bool:
        path = code.co_filename
        return code.co_name != "<module>" and _is_below(path, places) and not _is_below(path, foreign)

    return has_written


def _is_below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _places(name: str) -> Iterable[str]:
    if "/" in name or name.endswith(".py"):
        return {str(Path(name).absolute()), str(Path(name).resolve())}
    with suppress(ImportError):
        module = import_module(name)
        return getattr(module, "__path__", None) or filter(None, [getattr(module, "__file__", None)])
    return ()


@functools.cache
def _lines(path: str) -> dict[int, tuple[int, int, bool]]:
    """The statement at each line of a file: its first line, its last, and whether it is a ``with``.

    A compound one has no line in its body, and a file that is not Python's, such as a template, has no statements.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(
            node, ast.Try | ast.TryStar
        ):
            parts = [each for each in ast.walk(node) if isinstance(each, ast.stmt | ast.expr | ast.pattern)]
            first, last = min(each.lineno for each in parts), max(each.end_lineno or 0 for each in parts)
            body: list[ast.stmt] = getattr(node, "body", [])
            span = first, last, isinstance(node, ast.With | ast.AsyncWith)
            found.update(dict.fromkeys(range(first, body[0].lineno if body else last + 1), span))
    return found


_STARTERS = {
    each.__code__ for each in (threading.Thread.start, ThreadPoolExecutor.submit, BaseEventLoop.run_in_executor)
}


class _Unwinding(WorkerDied, GeneratorExit):
    """Passes by generators that are closed on the way without a word, as their own end does."""


class MortalThread(threading.Thread):
    """Executes a delivery in a process's place: to its end, or to its death at ``fatal``.

    Its lines are seen where ``is_authors`` tells which.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        message: Message,
        is_authors: Callable[[CodeType], bool] | None,
        fatal: Point | None,
    ) -> None:
        super().__init__(daemon=True, name="a worker that may die")
        self._deliveries = deliveries
        self._message = message
        self._fatal = fatal
        self._is_authors = is_authors or (lambda code: False)
        self._is_traced = is_authors is not None
        self._entered: dict[FrameType, dict[Statement, int]] = {}
        self._passes: Counter[Statement] = Counter()
        self._ending: Future[DeliveryResult] = Future()
        self._end = threading.Event()
        self.is_dead = False
        #: What was come by, in order.
        self.points: list[Point] = []
        #: Where the author starts threads: in them nobody dies.
        self.threads: list[str] = []

    def start_and_wait(self) -> DeliveryResult:
        """How the delivery ended, or that its worker died."""
        self.start()
        if not wait([self._ending], _HANGS).done:
            at = "{0.path}:{0.line}".format(self.points[-1].statement) if self.points else "its task"
            raise TimeoutError(f"a delivery has not ended within {_HANGS:.0f} s, at {at}; does it wait for a dead one?")
        return self._ending.result()

    def unwind(self) -> None:
        """Have the dead thread let go of what it holds, and wait a moment for it."""
        self._end.set()
        self.join(_PATIENCE)

    def run(self) -> None:
        if self._is_traced:
            sys.settrace(self._call_frame)
        try:
            ending = self._deliveries.deliver_once(self._message)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            if not self.is_dead:
                self._ending.set_exception(error)
        else:
            if not self.is_dead:
                self._ending.set_result(ending)
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            self._entered.clear()
        if self.is_dead:
            gc.collect(1)  # with its frames go sessions, connections and locks

    def _call_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._is_authors(frame.f_code):
            return self._trace
        caller = frame.f_back
        if frame.f_code in _STARTERS:
            while caller is not None and not self._is_authors(caller.f_code):
                caller = caller.f_back
            if caller is not None:
                self.threads.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.is_dead:
            statement = _statement_at(frame)
            if event == "line" and not (statement and statement.is_with):
                self._refuse(frame)
        elif event == "line":
            self._leave(frame, frame.f_lineno)
            self._enter(frame, _statement_at(frame))
        elif event == "return" and frame.f_code.co_code[frame.f_lasti] not in _YIELDS:  # a yield comes back
            self._leave(frame, 0)
            self._entered.pop(frame, None)
        return self._trace

    def _leave(self, frame: FrameType, line: int) -> None:
        """Come by the ends of all statements of ``frame`` that ``line`` is not in."""
        entered = self._entered.get(frame, {})
        for statement in reversed(list(entered)):
            if not statement.line <= line <= statement.last:
                self._come_by(Point(statement, "after", entered.pop(statement)), frame)

    def _enter(self, frame: FrameType, statement: Statement | None) -> None:
        entered = self._entered.setdefault(frame, {})
        if statement and statement not in entered:  # a head is come by again at the end of its block, or of a pass
            self._passes[statement] += 1
            self._come_by(Point(statement, "before", self._passes[statement]), frame)
            entered[statement] = self._passes[statement]

    def _come_by(self, point: Point, frame: FrameType) -> None:
        if point == self._fatal:
            self._die(frame)
        if point.number == 1 or len(self.points) < _POINTS:
            self.points.append(point)

    def _die(self, frame: FrameType) -> None:
        self.is_dead = True
        self._deliveries.store.bury()
        self._ending.set_result(DeliveryResult("DIED", WorkerDied()))
        self._end.wait(_PATIENCE)
        statement = _statement_at(frame)
        if statement and statement.is_with and statement in self._entered.get(frame, ()):
            sys.setprofile(self._forbid)  # an exception at the end of a block comes too late for its manager
        else:
            self._refuse(frame)

    def _refuse(self, frame: FrameType) -> None:
        """Raise here, and see to it that nothing of the author's is executed on the way out.

        A trace function that raises is taken away, and so is a profile function: the other one is left.
        """
        sys.settrace(self._call_frame)
        frame.f_trace = self._trace
        sys.setprofile(self._forbid)
        raise _Unwinding

    def _forbid(self, frame: FrameType, event: str, argument: Any) -> None:
        """Let the author's code call nothing but ``__exit__``, and tell that of an exception."""
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or caller is None or not self._is_authors(caller.f_code):
            return
        if caller.f_code.co_code[caller.f_lasti] == _EXITS or frame in self._entered:  # a generator, that is closed
            return
        if leave := _called_exit(frame, event, argument):
            with suppress(BaseException):
                sys.call_tracing(leave, (_Unwinding, _Unwinding(), None))
        self._refuse(caller)


def _called_exit(frame: FrameType, event: str, argument: Any) -> Any:
    """The bound ``__exit__`` that is called, if it is one."""
    if event == "c_call":
        return argument if argument.__name__ == "__exit__" else None
    first = next(iter(frame.f_locals.values()), None)
    leave = getattr(first[0] if isinstance(first, tuple) and first else first, "__exit__", None)
    return leave if getattr(leave, "__code__", None) is frame.f_code else None


def _statement_at(frame: FrameType) -> Statement | None:
    path = frame.f_code.co_filename
    span = _lines(path).get(frame.f_lineno)
    return Statement(path, *span, frame.f_code.co_qualname) if span else None


@contextmanager
def without_unraisable() -> Iterator[None]:
    """Within the block, Python does not tell of generators and coroutines that end with a dead thread."""
    tell = sys.unraisablehook

    def hook(raised: Any) -> None:
        if not isinstance(raised.object, CoroutineType | GeneratorType | FunctionType):
            tell(raised)

    with patch.object(sys, "unraisablehook", hook):
        yield
        gc.collect()
