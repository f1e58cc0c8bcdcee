"""What the package says to people and where it sends them: read from the source, as texts with … for what varies.

Run ``python -m tests.support.messages`` to have the pages of docs/troubleshooting quote the texts as they are now.
"""

import ast
import importlib
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from docutils.nodes import make_id

import celery_idempotent
from celery_idempotent.contrib.http import semantics
from celery_idempotent.engine.events import EventName
from tests.support.documents import DOCS

PACKAGE = Path(celery_idempotent.__file__).parent
PAGES = DOCS / "troubleshooting"
VARIES = "…"

_FAILED = "{}: {} failed: {}"
KINDS = {
    "PolicyError": "{}={}: {}",
    "StoreUnavailable": _FAILED,
    "StoreMisconfigured": _FAILED,
    "RecordUnreadable": _FAILED,
    "UnreadableRow": _FAILED,
    "IdempotencyWarning": "{}",
    "Hint": "{}={}: {}; write {}",
    "with_link": "{}",
    "Rule": f"{VARIES}: {VARIES} failed: {{}} ({VARIES})",
}
"""By what is called with ``see``: how its other arguments read."""

Names = Mapping[str, list[str]]
"""What a name can stand for."""


@dataclass(frozen=True, slots=True)
class Said:
    """One text, where it is said, and the entry that it names; ``…`` if that cannot be told from the source."""

    where: str
    see: str
    text: str


class Module:
    """One file of the package, and what its names stand for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self._inside = {
            id(each): node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for each in ast.walk(node)
            if each is not node
        }
        # ast.walk goes from the outside to the inside, so the innermost function is what stays.

    @cached_property
    def _loaded(self) -> Any:
        name = ".".join(self.path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        return importlib.import_module(name)

    def calls(self, *names: str) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _name_of(node.func) in names:
                yield node

    def function_of(self, node: ast.AST) -> Any:
        return self._inside.get(id(node))

    def environments(self, node: ast.AST, seen: tuple[int, ...] = ()) -> Iterator[Names]:
        """What the names around ``node`` can stand for together: one for each caller, and for each round of a loop."""
        function = self.function_of(node)
        if function is None or id(function) in seen:
            yield {}
            return
        for bound in self._bound(function, (*seen, id(function))):
            yield from self._in_loops(function, node, bound)

    def _bound(self, function: Any, seen: tuple[int, ...]) -> Iterator[Names]:
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if parameters[:1] in (["self"], ["cls"]):
            del parameters[0]
        named = {*parameters, *(each.arg for each in function.args.kwonlyargs)}
        # A class is called by its own name: `super().__init__()` elsewhere is no call of this one.
        found = () if function.name == "__init__" else self.calls(function.name)
        callers = [each for each in found if self.function_of(each) is not function]
        if not callers or not named:
            yield {}
        for call in callers if named else ():
            given = dict(zip(parameters, call.args, strict=False)) | {
                each.arg: each.value for each in call.keywords if each.arg in named
            }
            for around in self.environments(call, seen):
                yield {name: self.values(value, around, call) for name, value in given.items()}

    def _in_loops(self, function: Any, node: ast.AST, bound: Names) -> Iterator[Names]:
        loops = [each for each in ast.walk(function) if isinstance(each, ast.For) and _holds(each, node)]
        rows = [[*self._rows(each, bound, node)] for each in loops]
        for chosen in product(*rows):
            yield {**bound, **{name: value for row in chosen for name, value in row.items()}}

    def _rows(self, loop: ast.For, bound: Names, node: ast.AST) -> Iterator[Names]:
        targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        names = [each.id if isinstance(each, ast.Name) else "" for each in targets]
        rows = loop.iter.elts if isinstance(loop.iter, ast.Tuple | ast.List) else []
        for row in rows:
            values = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
            yield {name: self.values(each, bound, node) for name, each in zip(names, values, strict=False)}
        if not rows:
            known = self._runtime(loop.iter)
            pairs = known.items() if isinstance(known, dict) else ()
            texts = [pair for pair in pairs if all(isinstance(each, str) for each in pair[1:])]
            for _, text in texts:
                yield {**{name: [VARIES] for name in names}, names[-1]: [text]}
            if not texts:
                yield {name: [VARIES] for name in names}

    def values(self, node: ast.expr | None, names: Names, at: ast.AST) -> list[str]:
        """The texts that an expression can be."""
        match node:
            case ast.Constant(value=value):
                return [str(value)]
            case ast.JoinedStr(values=parts):
                return ["".join(each) for each in product(*(self.values(part, names, at) for part in parts))]
            case ast.FormattedValue(value=ast.Name() | ast.Attribute() | ast.JoinedStr() as inner, conversion=-1):
                return self.values(inner, names, at)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return ["".join(each) for each in product(self.values(left, names, at), self.values(right, names, at))]
            case ast.IfExp(body=one, orelse=other):
                return [*self.values(one, names, at), *self.values(other, names, at)]
            case ast.BoolOp(values=several):
                return [text for each in several for text in self.values(each, names, at)]
            case ast.Name(id=name):
                return names[name] if name in names else self._named(name, names, at)
            case ast.Attribute():
                found = self._runtime(node)
                return [str(found)] if isinstance(found, str | int) else [VARIES]
            case ast.Call(func=ast.Attribute(value=template, attr="format")):
                return [_filled(each) for each in self.values(template, names, at)]
            case ast.Call(func=ast.Name(id=name)) if name in self._sentences:
                returned = (each for each in ast.walk(self._sentences[name]) if isinstance(each, ast.Return))
                return [text for each in returned for text in self.values(each.value, {}, each)]
            case _:
                return [VARIES]

    @cached_property
    def _sentences(self) -> dict[str, ast.FunctionDef]:
        """The functions that put a sentence together, by name."""
        return {
            node.name: node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef)
            and any(isinstance(each, ast.Return) and isinstance(each.value, ast.JoinedStr) for each in ast.walk(node))
        }

    def _named(self, name: str, names: Names, at: ast.AST) -> list[str]:
        function = self.function_of(at)
        assigned = [
            value
            for each in (ast.walk(function) if function else ())
            if isinstance(each, ast.Assign)
            for value in _assigned(each, name)
        ]
        if assigned:
            # Names on the right that stand for themselves would lead here again.
            rest = {**names, name: [VARIES]}
            return [*dict.fromkeys(text for each in assigned for text in self.values(each, rest, at))]
        found = self._runtime(ast.Name(name))
        return [str(found)] if isinstance(found, str | int) else [VARIES]

    def _runtime(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return vars(self._loaded).get(name)
            case ast.Attribute(value=inner, attr=name):
                return getattr(self._runtime(inner), name, None)
            case ast.Call(func=ast.Attribute(value=inner, attr="items")):
                return self._runtime(inner)
            case _:
                return None


def _assigned(node: ast.Assign, name: str) -> Iterator[ast.expr]:
    for target in node.targets:
        match target, node.value:
            case ast.Name(id=found), value if found == name:
                yield value
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                yield from (value for each, value in zip(targets, values, strict=False) if _name_of(each) == name)
            case ast.Tuple(elts=targets), ast.IfExp(body=ast.Tuple(elts=one), orelse=ast.Tuple(elts=other)):
                for each, *both in zip(targets, one, other, strict=False):
                    if _name_of(each) == name:
                        yield from both


def _holds(outer: ast.AST, node: ast.AST) -> bool:
    return any(each is node for each in ast.walk(outer))


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _filled(template: str) -> str:
    return "".join(
        text + (VARIES if field is not None else "") for text, field, _, _ in string.Formatter().parse(template)
    )


@cache
def modules() -> tuple[Module, ...]:
    """The package's files."""
    return tuple(Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def said() -> frozenset[Said]:
    """Every text that an error or a warning can have, as often as it names another entry."""
    found = {each for module in modules() for texts in (_of_calls(module), _of_classes(module)) for each in texts}
    for problem in semantics.Problem:
        slug, status, title, detail = problem.value
        found.add(Said("contrib/http/semantics.py", f"http#{slug}", f"{status} {title}: {detail}"))
    return frozenset(found)


def _of_calls(module: Module) -> Iterator[Said]:
    for call in module.calls(*KINDS):
        kind = _name_of(call.func)
        where = f"{module.path.relative_to(PACKAGE)}:{call.lineno}"
        keywords = {each.arg: each.value for each in call.keywords}
        see, texts = keywords.get("see"), [*call.args, *(keywords[name] for name in ["remedy"] if name in keywords)]
        if isinstance(see, ast.Attribute) or (kind == "Rule" and not keywords.keys() & {"see", "remedy"}):
            continue  # says again what another site has said, with its entry; or says what the store does
        template = KINDS[kind] if kind != "Rule" or "remedy" in keywords else _FAILED
        count = template.count("{}")
        for names in module.environments(call):
            parts = [module.values(each, names, call) for each in texts[:count]]
            for entry in module.values(see, names, call):
                for filled in product(*parts):
                    text = template.format(*filled, *[VARIES] * (count - len(filled)))
                    yield Said(where, entry, _tidy(_filled(text) if kind == "Rule" else text))


def _of_classes(module: Module) -> Iterator[Said]:
    """Of classes that name their entry themselves."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        own = {_name_of(each.targets[0]): each.value for each in node.body if isinstance(each, ast.Assign)}
        see = own.get("see")
        sentences = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "_sentence"]
        if isinstance(see, ast.Constant) and see.value:
            for result in (each for body in sentences for each in ast.walk(body) if isinstance(each, ast.Return)):
                for text in module.values(result.value, {}, result):
                    yield Said(f"{module.path.relative_to(PACKAGE)}:{node.lineno}", str(see.value), _tidy(text))


def _tidy(text: str) -> str:
    return re.sub(f"(?:'{VARIES}'|\"{VARIES}\")", VARIES, re.sub(f"{VARIES}+", VARIES, text))


@cache
def logged() -> frozenset[Said]:
    """Every event that is logged as a warning or worse, with its entry."""
    found = {
        Said(f"{module.path.relative_to(PACKAGE)}:{call.lineno}", f"{page}#{make_id(event)}", event)
        for module in modules()
        for call in module.calls("say")
        if not ast.unparse(call.args[0]).endswith((".info", ".debug"))
        and (module.path.name != "events.py" or isinstance(call.args[1], ast.Constant))
        for names in module.environments(call)
        for event in module.values(call.args[1], names, call)
        for page in module.values(
            next((each.value for each in call.keywords if each.arg == "page"), ast.Constant("log-lines")), names, call
        )
    }
    found |= {
        Said("integration/events.py", f"log-lines#{make_id(event)}", str(event))
        for event in EventName
        if event.level >= 30
    }
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Entry:
    """A heading of a page, what it quotes, and the rest of its text."""

    see: str
    heading: str
    quoted: str
    text: str


@cache
def entries() -> tuple[Entry, ...]:
    """Of all pages."""
    return tuple(
        Entry(f"{page.stem}#{make_id(heading)}", heading, "".join(re.findall(_QUOTE, body)), body)
        for page in sorted(PAGES.glob("*.md"))
        for heading, body in re.findall(r"^##+ (.*)\n((?:(?!##+ ).*\n?)*)", page.read_text(), re.MULTILINE)
    )


_QUOTE = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def quoted(texts: set[str]) -> str:
    """The block of an entry."""
    return "".join(f"{each}\n" for each in sorted(texts))


def texts_by_entry() -> dict[str, set[str]]:
    """What each entry has to quote."""
    found: dict[str, set[str]] = {}
    for each in said():
        found.setdefault(each.see, set()).add(each.text)
    return found


def _rewrite() -> None:
    wanted = texts_by_entry()
    for page in sorted(PAGES.glob("*.md")):
        parts = re.split(r"^(##+ .*\n)", page.read_text(), flags=re.MULTILINE)
        for at in range(1, len(parts), 2):
            texts = wanted.get(f"{page.stem}#{make_id(parts[at].lstrip('#').strip())}")
            if texts:
                body = _QUOTE.sub("", parts[at + 1], count=1).strip("\n")
                parts[at + 1] = f"\n```text\n{quoted(texts)}```\n\n{body}\n\n"
        page.write_text("".join(parts).rstrip("\n") + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        for each in sorted(said(), key=lambda one: (one.see, one.text)):
            sys.stdout.write(f"{each.see} | {each.where} | {each.text}\n")
    else:
        _rewrite()
