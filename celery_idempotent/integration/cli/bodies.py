"""Read the source of tasks for what makes a duplicate another operation. Nothing of it runs."""

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product
from os.path import relpath
from types import FunctionType, ModuleType
from typing import Any

from celery import Celery, Task
from celery.local import Proxy

from celery_idempotent.integration.binding import is_builtin, is_protected
from celery_idempotent.protocol.keys import WHOLE_CALL

_VOLATILE = re.compile(  # what is another value in another call or attempt; a text's hash is, in another process
    r"((?:uuid\.uuid[1467]|os\.urandom|builtins\.(?:hash|id)|time\.(?:time|monotonic|perf_counter)(?:_ns)?|"
    r"datetime\.(?:datetime\.(?:now|utcnow|today)|date\.today)|random\.(?!Random|seed)\w+|celery\.(?:utils\.)?uuid|"
    r"secrets\.(?!compare)\w+|django\.utils\.(?:timezone\.(?:now|localdate)|crypto\.get_random_string))\(\)|"
    r"attempt\.(?:number|fencing_token))"
)
_Names = dict[str, str]
_Selectors = dict[tuple[str, int, str], dict[str, str]]  # by module, line and name of a function: by option, the task


class ModuleSource:
    """The source of a module, which need not be imported, and its findings by line; ``tasks`` has names by path."""

    def __init__(
        self, text: str, module: str, package: str, tasks: _Names, whole: set[str], live: _Names, selectors: _Selectors
    ) -> None:
        self.findings: set[tuple[int, str]] = set()
        self._lines, self._module, self._package, self._live = text.split("\n"), module, package, live
        self._tasks, self._whole, self._selectors = tasks, whole, selectors
        self._within, self._owner, self._in_transaction = module, "", False
        self._names = dict(live)
        self._visit(ast.parse(text))

    def _visit(self, node: ast.AST) -> None:
        outer = self._within, self._owner, self._in_transaction, self._names
        match node:
            case ast.ClassDef(name=name):
                self._within, self._names = f"{self._within}.{name}", dict(self._names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._enter(node, getattr(node, "name", "<lambda>"))
            case ast.With(items=items) | ast.AsyncWith(items=items):
                self._in_transaction |= any(self._path(each.context_expr) == "attempt.transaction()" for each in items)
            case ast.Call(func=ast.Attribute(value=owner, attr=method)):
                self._check(node, self._path(owner), method)
        for each in ast.iter_child_nodes(node):
            self._visit(each)
        self._within, self._owner, self._in_transaction, self._names = outer
        self._names |= self._bound(node) | (self._live if self._within == self._module else {})  # which knows better

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, name: str) -> None:
        line = min(each.lineno for each in [node, *getattr(node, "decorator_list", [])])
        for option, task in self._selectors.get((self._module, line, name), {}).items():
            text = f"in {option}= makes a duplicate {'run again' if option == 'key' else 'raise KeyReused'}; compute it"
            self._look(ast.iter_child_nodes(node), f"{text} from the arguments alone", task, is_exact=True)
        self._owner = self._tasks.get(f"{self._within}.{name}", self._owner or name)
        self._within += f".{name}.<locals>"
        self._in_transaction = False  # what is defined in a block need not run in it
        self._names = dict(self._names)

    def _check(self, call: ast.Call, owner: str, method: str) -> None:
        named = {each.arg: each.value for each in call.keywords}
        if self._in_transaction and method in ("delay", "apply_async", "send_task"):
            self._add(call, f"{method}() publishes even if the transaction rolls back; write tx.send(task, ...)")
        if owner == "attempt" and method in ("step", "astep", "fenced_step", "send", "effect_key"):
            text = f"in the name for {method}() makes the next attempt repeat the effect; name it after the item, as in"
            self._look(call.args[:1] or [named.get("name", call)], f"{text} f'line-{{item.id}}'", is_exact=True)
        if method == "send":  # of an attempt, a transaction or the outbox
            owner = next(filter(self._tasks.get, map(self._path, call.args[:2])), "")
        elif method == "apply_async":
            owner = "" if "idempotency_key" in named else owner
            named = {each: named[each] for each in named if each in ("args", "kwargs")}
        task = self._tasks.get(owner, "")
        if task in self._whole and method in ("delay", "apply_async", "s", "si", "send"):
            text = "in the arguments, which are the key, makes each call another operation; name what identifies it:"
            self._look([*call.args, *named.values()], f"{text} Policy(key=...)", task)

    def _look(self, nodes: Iterable[ast.AST], text: str, task: str = "", is_exact: bool = False) -> None:
        """Find what is another value each time; where the value has to be ``is_exact``, also each day."""
        for node in nodes:
            if found := _VOLATILE.match(path := self._path(node)):
                # Whoever passes a day wants one operation a day.
                if is_exact or not re.search(r"\.(date|localdate|year|month|day|isocalendar|strftime)\b", path):
                    self._add(node, f"{found[1].removeprefix('builtins.')} {text}", task)
            elif is_exact or not isinstance(node, ast.Compare | ast.Lambda):  # whether a time is over changes once
                self._look(ast.iter_child_nodes(node), text, task, is_exact)

    def _add(self, node: Any, text: str, task: str = "") -> None:
        if not re.search(r"#.*\bidempotency: ok\b", self._lines[node.lineno - 1]):
            self.findings.add((node.lineno, f"{task or self._owner or self._module}: {text}"))

    def _path(self, node: ast.AST) -> str:
        """What an expression is, as in ``uuid.uuid4().hex`` or ``attempt.step()``; empty if the source does not say."""
        match node:
            case ast.Name(id=name):
                return self._names.get(name, f"builtins.{name}")
            case ast.Attribute(value=value, attr=name):
                return f"{path}.{name}" if (path := self._path(value)) else ""
            case ast.Call(func=ast.Name(id="str" | "int"), args=[value]):
                return self._path(value)
            case ast.Call(func=function) if path := self._path(function):
                return "attempt" if re.fullmatch(r"celery_idempotent\.(.+\.)?current_attempt", path) else f"{path}()"
        return ""

    def _bound(self, node: ast.AST) -> _Names:
        """The names that a node sets, and what they are then."""
        match node:
            case ast.Import(names=names):
                return {each.asname or each.name: each.name for each in names}
            case ast.ImportFrom(names=names, module=module, level=level):
                parents = self._package.split(".")[: 1 - level or None] if level else []
                origin = "".join(f"{each}." for each in [*parents, module] if each)
                return {each.asname or each.name: f"{origin}{each.name}" for each in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                return {name: f"{self._within}.{name}"}
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                return {name: "attempt" if name == "attempt" else ""}
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                set_here = [each.id for each in targets if isinstance(each, ast.Name)]
                return {each: self._path(value) or self._names[each] for each in set_here}
        return {}


def findings(app: Celery) -> list[str]:
    """What the modules of the app's tasks, and the functions of their policies, do wrong; nothing without source."""
    tasks = {each.name: each for each in app.tasks.values() if not is_builtin(type(each))}
    bodies = {name: inspect.unwrap(each.run) for name, each in tasks.items()}
    names = {f"{body.__module__}.{body.__qualname__}": name for name, body in bodies.items()}
    names |= dict(zip(tasks, tasks, strict=True))
    policies = {name: each.idempotency_policy for name, each in tasks.items() if is_protected(each)}
    whole = {name for name, policy in policies.items() if policy.key == WHOLE_CALL}
    selectors: _Selectors = {}
    for name, option in product(policies, ("key", "fingerprint")):
        function = inspect.unwrap(getattr(policies[name], option))
        if code := getattr(function, "__code__", None):
            selectors.setdefault((function.__module__, code.co_firstlineno, code.co_name), {})[option] = name
    found: set[tuple[str, int, str]] = set()
    for name in {each.__module__ for each in bodies.values()} | {module for module, _, _ in selectors}:
        with suppress(KeyError, OSError, RecursionError, SyntaxError, TypeError, ValueError):  # there is no source
            module, text = sys.modules[name], inspect.getsource(sys.modules[name])
            source = ModuleSource(text, name, module.__package__ or "", names, whole, dict(_live(module)), selectors)
            found |= {(relpath(inspect.getfile(module)), *each) for each in source.findings}
    return [f"{file}:{line}: {text}" for file, line, text in sorted(found)]


def _live(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The tasks, functions and classes among a module's globals; other libraries' lazy objects stay asleep."""
    for name, value in vars(module).items():
        if issubclass(type(value), Task | Proxy):
            yield name, str(getattr(value, "name", ""))
        elif issubclass(type(value), FunctionType | type):
            yield name, f"{value.__module__}.{value.__qualname__}"
