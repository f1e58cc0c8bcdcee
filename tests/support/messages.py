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
UNTOLD = "..."
"""What stands for a text that cannot be told from the source."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file of the package."""

    def __init__(self, path: Path) -> None:
        self.where = str(path.relative_to(PACKAGE))
        self.name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        self.nodes: list[ast.AST] = []
        self._inside: dict[ast.AST, Function] = {}
        todo: list[tuple[ast.AST, Function | None]] = [(ast.parse(path.read_text()), None)]
        for node, function in todo:  # which grows meanwhile
            self.nodes.append(node)
            if function:
                self._inside[node] = function
            inner = node if isinstance(node, Function) else function
            todo += [(each, inner) for each in ast.iter_child_nodes(node)]

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """The calls of functions and methods of these names."""
        for node in self.nodes:
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in names:
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
            case ast.Name(id=name) if (given := self._given(name, at)) is not None:
                for each in given:
                    yield from self.texts(each, each)
            case ast.Name(id=name):
                yield str(getattr(importlib.import_module(self.name), name, UNTOLD))
            case _:
                yield UNTOLD

    def _given(self, name: str, at: ast.AST) -> list[ast.expr] | None:
        """What callers, loops and assignments give to a name of the functions around ``at``; None if it is none."""
        while function := self._inside.get(at):
            names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs) if each.arg != "self"]
            if name in names:
                named = [{each.arg: each.value for each in call.keywords} for call in self.calls(function.name)]
                calls = zip(self.calls(function.name), named, strict=True)
                return [(dict(zip(names, call.args, strict=False)) | by_name)[name] for call, by_name in calls]
            if values := [value for each in ast.walk(function) for value in _values(each, name, at)]:
                return values
            at = function
        return None


def _of_subclasses(name: str) -> Iterator[str]:
    """The texts that classes of the package give to an attribute."""
    for node in (each for module in modules() for each in module.nodes):
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
        case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == name:
            yield value


@cache
def modules() -> tuple[Module, ...]:
    """The package's files."""
    return tuple(Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def linked() -> frozenset[str]:
    """The entries to which something leads, each as a page and a place on it."""
    found = {f"http#{problem.value[0]}" for problem in semantics.Problem}
    events = {str(name) for name in EventName if name.level >= 30}
    kinds: list[type[errors.IdempotencyError]] = [errors.IdempotencyError, UnreadableRow]
    for kind in kinds:
        kinds += kind.__subclasses__()
        is_ours = kind.__module__.startswith("celery_idempotent.")
        if is_ours and kind not in (errors.IdempotencyError, errors.PolicyError):  # of this one, the option counts
            found.add(kind.__new__(kind).see)
    for module in modules():
        for call in module.calls("PolicyError", "Selector", "IdempotencyWarning", "Hint", "with_link", "say"):
            name = ast.unparse(call.func).rpartition(".")[2]
            given = call.args[1 if name in ("IdempotencyWarning", "with_link", "say") else 0]
            if isinstance(given, ast.Attribute):
                continue  # it hands on what another place has said
            texts = set(module.texts(given, call))
            if name == "say":
                is_loud = not ast.unparse(call.args[0]).endswith((".info", ".debug"))
                is_event = isinstance(given, ast.Constant) or module.where != "integration/events.py"
                events |= texts if is_loud and is_event else set()
            elif name == "with_link":
                found |= {each for each in texts if "#" in each}
            else:
                warned = {errors.IdempotencyWarning("", each).see for each in texts}
                refused = {errors.PolicyError(each, "", "").see for each in texts}
                found |= warned if name in ("IdempotencyWarning", "Hint") else refused
    return frozenset(found | {f"log-lines#{each.replace('_', '-')}" for each in events})


@cache
def entries() -> dict[str, str]:
    """By entry: the text that it is part of. Several entries can have one text, with anchors in it."""
    found: dict[str, str] = {}
    for page in sorted((DOCS / "troubleshooting").glob("*.md")):
        for entry in page.read_text().split("\n## ")[1:]:
            heading, _, text = entry.partition("\n")
            for name in (make_id(heading), *re.findall('<a id="(.*?)">', text)):
                assert f"{page.stem}#{name}" not in found, name
                found[f"{page.stem}#{name}"] = text
    return found
