"""Where the package sends people from its errors, warnings and loud log lines: read from the source."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docutils.nodes import make_id

import celery_idempotent
from celery_idempotent import errors
from celery_idempotent.contrib.http import semantics
from celery_idempotent.engine.events import EventName
from celery_idempotent.stores.sql.statements import UnreadableRow
from tests.support.documents import DOCS

PACKAGE = Path(celery_idempotent.__file__).parent
PAGES = DOCS / "troubleshooting"
UNTOLD = "..."
"""What stands for a text that cannot be told from the source."""


class Module:
    """One file of the package."""

    def __init__(self, path: Path) -> None:
        self.where = str(path.relative_to(PACKAGE))
        self.name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        self.tree = ast.parse(path.read_text())
        # ast.walk goes from the outside to the inside, so the innermost function stays.
        self._inside = {
            each: node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for each in ast.walk(node)
            if each is not node
        }

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """The calls of functions and methods of these names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                yield node

    def texts(self, node: ast.expr, at: ast.AST) -> Iterator[str]:
        """What an expression of the function around ``at`` can be: by its callers, loops and assignments."""
        match node:
            case ast.Constant(value=str(value)):
                yield value
            case ast.JoinedStr(values=[ast.Constant(value=first), *_]):
                yield f"{first!s}{UNTOLD}"
            case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Attribute(attr=name)), ast.Constant(value=end)]):
                yield from (f"{each}{end!s}" for each in _of_subclasses(name))
            case ast.IfExp(body=one, orelse=other):
                yield from (*self.texts(one, at), *self.texts(other, at))
            case ast.Name(id=name) if at in self._inside:
                yield from self._named(name, self._inside[at], at)
            case ast.Name(id=name):
                yield str(getattr(importlib.import_module(self.name), name, UNTOLD))
            case _:
                yield UNTOLD

    def _named(self, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, at: ast.AST) -> Iterator[str]:
        parameters = (*function.args.args, *function.args.kwonlyargs)
        names = [each.arg for each in parameters if each.arg not in ("self", "cls")]
        if name in names:
            for call in self.calls(function.name):
                given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords}
                yield from self.texts(given[name], call)
            return
        values = [value for each in ast.walk(function) for value in _values(each, name, at)]
        for value in values:
            yield from self.texts(value, function.body[0])
        if not values and function in self._inside:
            yield from self._named(name, self._inside[function], at)
        elif not values:
            yield str(getattr(importlib.import_module(self.name), name, UNTOLD))


def _of_subclasses(name: str) -> Iterator[str]:
    """The texts that classes of the package give to an attribute."""
    for node in (each for module in modules() for each in ast.walk(module.tree)):
        match node:
            case ast.Assign(targets=[ast.Name(id=given)], value=ast.Constant(value=str(value))) if given == name:
                yield value


def _values(node: ast.AST, name: str, at: ast.AST) -> Iterator[ast.expr]:
    """What a loop or an assignment gives to a name."""
    match node:
        case ast.DictComp(generators=[ast.comprehension(target=ast.Name(id=given), iter=ast.Tuple(elts=rows))]):
            yield from rows if given == name and any(each is at for each in ast.walk(node)) else ()
        case ast.For(target=ast.Name(id=given), iter=ast.Tuple(elts=rows)) if given == name:
            yield from rows
        case ast.For(target=ast.Tuple(elts=targets), iter=ast.Tuple(elts=rows)):
            named = [ast.unparse(each) for each in targets]
            yield from (row.elts[named.index(name)] for row in rows if name in named and isinstance(row, ast.Tuple))
        case ast.For(target=target, iter=rows) if name in ast.unparse(target):
            yield rows
        case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == name:
            yield value


@cache
def modules() -> tuple[Module, ...]:
    """The package's files."""
    return tuple(Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def linked() -> dict[str, set[str]]:
    """By entry, a page and a place on it: what leads there."""
    found: dict[str, set[str]] = {}
    for see, where in (*_of_classes(), *_of_options(), *_of_texts(), *_of_events()):
        found.setdefault(see, set()).add(where)
    for problem in semantics.Problem:
        found.setdefault(f"http#{problem.value[0]}", set()).add("contrib/http/semantics.py")
    return found


def _of_classes() -> Iterator[tuple[str, str]]:
    """By the class alone: every error but those whose option counts."""
    kinds: list[type[errors.IdempotencyError]] = [errors.IdempotencyError, UnreadableRow]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("celery_idempotent.") and kind not in (
            errors.IdempotencyError,
            errors.PolicyError,
        ):
            yield kind.__new__(kind).see, kind.__name__


def _of_options() -> Iterator[tuple[str, str]]:
    for module in modules():
        for call in module.calls("PolicyError", "Selector"):
            options = () if isinstance(call.args[0], ast.Attribute) else module.texts(call.args[0], call)
            for option in options:  # one that is an attribute was given to the selector
                yield errors.PolicyError(option, "", "").see, f"{module.where}:{call.lineno}"
        for call in module.calls("IdempotencyWarning", "Hint"):
            given = call.args[0 if ast.unparse(call.func) == "Hint" else 1]
            if not isinstance(given, ast.Attribute):  # which says again what another site has said
                for option in module.texts(given, call):
                    yield errors.IdempotencyWarning("", option).see, f"{module.where}:{call.lineno}"


def _of_texts() -> Iterator[tuple[str, str]]:
    """Of errors that are not the library's own."""
    for module in modules():
        for call in module.calls("with_link"):
            if isinstance(call.args[1], ast.Constant):
                yield str(call.args[1].value), f"{module.where}:{call.lineno}"


def _of_events() -> Iterator[tuple[str, str]]:
    for module in modules():
        for call in module.calls("say"):
            loud = not ast.unparse(call.args[0]).endswith((".info", ".debug"))
            if loud and (module.where != "integration/events.py" or isinstance(call.args[1], ast.Constant)):
                for event in module.texts(call.args[1], call):
                    yield f"log-lines#{event.replace('_', '-')}", f"{module.where}:{call.lineno}"
    for name in EventName:
        if name.level >= 30:
            yield f"log-lines#{name.replace('_', '-')}", "engine/events.py"


@cache
def entries() -> dict[str, str]:
    """By entry: the text that it is part of. Several entries can have one text, with anchors in it."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for entry in page.read_text().split("\n## ")[1:]:
            heading, _, text = entry.partition("\n")
            for name in (make_id(heading), *re.findall('<a id="(.*?)">', text)):
                assert f"{page.stem}#{name}" not in found, name
                found[f"{page.stem}#{name}"] = text
    return found
