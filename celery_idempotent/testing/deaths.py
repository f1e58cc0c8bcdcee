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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

from celery_idempotent.testing.scenarios import WorkerDied

When = Literal["before", "after"]

_PATIENCE = 1.0
"""Seconds that a dead thread stands still at most: the next delivery may wait for what it holds."""

_HANGS = 60.0
"""Seconds after which a delivery is given up."""

_POINTS = 100_000
"""After so many, only first passes are kept: loops have many."""

_YIELD = dis.opmap["YIELD_VALUE"]
_EXITS = dis.opmap["WITH_EXCEPT_START"]
_FOREIGN = (*(sysconfig.get_paths()[each] for each in ("purelib", "platlib", "stdlib")), str(Path(__file__).parents[1]))


class Statement(NamedTuple):
    """A statement of a function, from its first line to its last; of a compound one its head."""

    path: str
    line: int
    last: int
    #: The function: a lambda may stand in the midst of a line of another.
    scope: str


class Point(NamedTuple):
    """One side of a statement, at which a worker may die, at the pass of that number."""

    statement: Statement
    when: When
    number: int


class Source:
    """The code whose lines are the author's: the packages or files that ``names`` import or lie at."""

    def __init__(self, *names: str) -> None:
        self._roots = tuple(each for name in names for each in _places(name))
        self._is_ours: dict[CodeType, bool] = {}

    def has(self, code: CodeType) -> bool:
        """Whether the author wrote it, and it runs in each delivery: the body of a module runs in one."""
        if code not in self._is_ours:
            path = code.co_filename
            is_below = any(path == root or path.startswith(f"{root}/") for root in self._roots)
            self._is_ours[code] = is_below and code.co_name != "<module>" and not _is_foreign(path, self._roots)
        return self._is_ours[code]


def _places(name: str) -> Iterator[str]:
    if "/" in name or name.endswith(".py"):
        yield from {str(Path(name).absolute()), str(Path(name).resolve())}
        return
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) or (find_spec(name) if module is None else None)
    folders = getattr(spec, "submodule_search_locations", None)
    yield from folders or [
        path for path in [getattr(module, "__file__", None) or getattr(spec, "origin", None)] if path
    ]


def _is_foreign(path: str, roots: tuple[str, ...]) -> bool:
    """Whether the file is of an installed package, of Python or of this library, unless it was asked for."""
    return any(path.startswith(f"{place}/") and not any(root.startswith(place) for root in roots) for place in _FOREIGN)


@functools.cache
def _lines(path: str) -> dict[int, tuple[int, int]]:
    """The first and the last line of the statement at each line of a file; a compound one has none in its body."""
    found: dict[int, tuple[int, int]] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(
            node, ast.Try | ast.TryStar
        ):
            start = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            start = min([start, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            body: list[ast.stmt] = getattr(node, "body", [])
            last = (body[-1] if isinstance(node, ast.match_case) else node).end_lineno or start
            found.update((line, (start, last)) for line in range(start, body[0].lineno if body else last + 1))
    return found


def _manager_of(frame: FrameType, line: int) -> Any:
    """The manager of a block, where the source has a name for it: ``with lock:``, ``with connect() as connection:``."""
    for node in ast.walk(_tree(frame.f_code.co_filename)):
        if isinstance(node, ast.With) and node.lineno == line:
            for each in (node.items[-1].optional_vars, node.items[-1].context_expr):
                known = {**frame.f_globals, **frame.f_locals}
                if isinstance(each, ast.Name) and hasattr(type(known.get(each.id)), "__exit__"):
                    return known[each.id]
    return None


@functools.cache
def _heads_of_with(path: str) -> frozenset[int]:
    return frozenset(each.lineno for each in ast.walk(_tree(path)) if isinstance(each, ast.With | ast.AsyncWith))


def _tree(path: str) -> ast.Module:
    """The source of a file; nothing of one that is not Python's, such as a template that claims to be executed."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


_STARTERS = {
    each.__code__ for each in (threading.Thread.start, ThreadPoolExecutor.submit, BaseEventLoop.run_in_executor)
}


class _Unwinding(WorkerDied, GeneratorExit):
    """Passes by generators that are closed on the way without a word, as their own end does."""


class MortalThread(threading.Thread):
    """Executes ``call`` in a process's place: to its end, or to its death right before or after ``statement``."""

    def __init__(
        self,
        call: Callable[[], Any],
        source: Source | None = None,
        fatal: Point | None = None,
        on_death: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(daemon=True, name="a worker that may die")
        self._call = call
        self._source = source
        self._fatal = fatal
        self._on_death = on_death
        self._entered: dict[FrameType, dict[Statement, int]] = {}
        self._managers: dict[tuple[FrameType, int], Any] = {}
        self._passes: Counter[Statement] = Counter()
        self._settled, self._end = threading.Event(), threading.Event()
        self.is_dead = False
        self.result: Any = None
        self.error: BaseException | None = None
        #: What was come by, in order.
        self.points: list[Point] = []
        #: Where the author starts threads, by path and line: in them nobody dies.
        self.threads: dict[tuple[str, int], None] = {}

    def start_and_wait(self) -> None:
        """Until it has ended or died."""
        self.start()
        if not self._settled.wait(_HANGS):
            where = f"{self.points[-1].statement.path}:{self.points[-1].statement.line}" if self.points else "its task"
            raise TimeoutError(
                f"a delivery has not ended within {_HANGS:.0f} s, at {where}; does it wait for a dead one?"
            )

    def unwind(self) -> None:
        """Have the dead thread let go of what it holds, and wait a moment for it."""
        self._end.set()
        self.join(_PATIENCE)

    def run(self) -> None:
        """See :meth:`threading.Thread.run`."""
        if self._source is not None:
            sys.settrace(self._call_frame)
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self.error = error
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            self._entered.clear()
            self._managers.clear()
            self._settled.set()
        if self.is_dead:
            self.result = self.error = None  # with whose frames go sessions, connections and locks
            gc.collect(1)

    def _call_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        caller = frame.f_back
        if frame.f_code.co_name == "__enter__" and caller is not None and self._is_authors(caller.f_code):
            self._managers[caller, caller.f_lineno] = frame.f_locals[frame.f_code.co_varnames[0]]
        if self._is_authors(frame.f_code):
            return self._trace
        if frame.f_code in _STARTERS:
            while caller is not None and not self._is_authors(caller.f_code):
                caller = caller.f_back
            if caller is not None:
                self.threads.setdefault((caller.f_code.co_filename, caller.f_lineno))
        return None

    def _is_authors(self, code: CodeType) -> bool:
        return self._source is not None and self._source.has(code)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if self.is_dead:
            if event == "line" and line not in _heads_of_with(path):
                self._refuse()
            return self._trace
        if event == "return" and not _is_suspended(frame):
            self._leave(frame, 0)
            self._entered.pop(frame, None)
            self._managers = {key: each for key, each in self._managers.items() if key[0] is not frame}
        if event == "line":
            self._leave(frame, line)
            if span := _lines(path).get(line):
                self._enter(frame, Statement(path, *span, frame.f_code.co_qualname))
        return self._trace

    def _enter(self, frame: FrameType, statement: Statement) -> None:
        entered = self._entered.setdefault(frame, {})
        if statement not in entered:  # a head is come by again at the end of its block, or of a pass
            self._passes[statement] += 1
            self._come_by(Point(statement, "before", self._passes[statement]), frame)
            entered[statement] = self._passes[statement]

    def _leave(self, frame: FrameType, line: int) -> None:
        """Come by the ends of all statements of ``frame`` that ``line`` is not in."""
        entered = self._entered.get(frame, {})
        for statement in reversed(list(entered)):
            if not statement.line <= line <= statement.last:
                self._come_by(Point(statement, "after", entered.pop(statement)), frame)

    def _come_by(self, point: Point, frame: FrameType) -> None:
        if point == self._fatal:
            self._die(frame)
        if point.number == 1 or len(self.points) < _POINTS:
            self.points.append(point)

    def _die(self, frame: FrameType) -> None:
        self.is_dead = True
        self._on_death()
        self._settled.set()
        self._end.wait(_PATIENCE)
        head = frame.f_lineno in _heads_of_with(frame.f_code.co_filename) and frame.f_lineno
        if not any(each.line == head for each in self._entered.get(frame, ())):
            self._refuse()
        # At the end of a ``with`` block an exception comes too late for its manager. One that is written in C and has
        # no name ends by itself now.
        manager = self._managers.get((frame, head)) or _manager_of(frame, head)
        if manager is not None:
            self._leave_block(manager)
            self._refuse()

    def _leave_block(self, manager: Any) -> None:
        """Roll back what is not the author's; a generator of his ends with its frame."""
        leave = type(manager).__exit__
        code = getattr(getattr(manager, "gen", None), "gi_code", None) or getattr(leave, "__code__", None)
        if code is None or not self._is_authors(code):
            with suppress(BaseException):
                leave(manager, _Unwinding, _Unwinding(), None)

    def _refuse(self) -> None:
        """Raise here, and see to it that nothing of the author's is called on the way out.

        A trace function that raises is taken away, and so is a profile function: each puts the other back first.
        """
        sys.setprofile(self._forbid)
        raise _Unwinding

    def _forbid(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or caller is None or not self._is_authors(caller.f_code):
            return
        if frame.f_code.co_filename == __file__:
            return
        if caller.f_code.co_code[caller.f_lasti] != _EXITS:
            sys.settrace(self._call_frame)
            caller.f_trace = self._trace
            raise _Unwinding


def _is_suspended(frame: FrameType) -> bool:
    """Whether a generator or coroutine only yields: it comes back into the statement."""
    return frame.f_code.co_code[frame.f_lasti] == _YIELD


@contextmanager
def unraised() -> Iterator[None]:
    """Within the block, Python does not tell of generators and coroutines that end with a dead thread."""
    tell = sys.unraisablehook

    def hook(raised: Any) -> None:
        if not isinstance(raised.object, CoroutineType | GeneratorType | FunctionType):
            tell(raised)

    with patch.object(sys, "unraisablehook", hook):
        yield
        gc.collect()
