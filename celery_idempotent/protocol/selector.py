"""What a policy's ``key``, ``fingerprint`` and ``label`` select from a call's arguments, however it was written."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any
from uuid import UUID

import jmespath
from jmespath.exceptions import JMESPathError

from celery_idempotent.errors import IdempotencyError, KeyMissing, PolicyError
from celery_idempotent.protocol.canonical import canonical, list_form, opened, pairs_form, parts, text_form
from celery_idempotent.protocol.paths import LENIENT, STRICT, Absent, root_names

Spec = str | tuple[str, ...] | Callable[..., Any]
"""How a policy names what it selects: a JMESPath, several, or a function of the task's own arguments."""

Conversion = Callable[[Iterable[Any], Mapping[str, Any]], tuple[Iterable[Any], Mapping[str, Any]]]
"""From the arguments of a call, by position and by name, to those that its body gets."""

WHOLE_CALL = "@"
"""JMESPath's own name for "everything here": all arguments of the call."""


def _plain(value: Any) -> Any:
    """``value`` with every container turned into what JMESPath can search; leaves stay as they are."""
    bare = opened(value)
    if isinstance(bare, Mapping):
        return {key: _plain(each) for key, each in bare.items()}
    if isinstance(bare, list | tuple):
        return [_plain(each) for each in bare]
    return bare


def _unshared(value: Any) -> Any:
    """``value`` with a copy of each of its dicts, lists and sets, so that whoever gets it cannot change it."""
    try:
        return _copied(value)
    except RecursionError:
        return value  # it has no canonical form either


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if kind is list or kind is tuple or kind is set:
        return kind(map(_copied, value))
    return value


@dataclass(frozen=True)
class CallSignature:
    """Binds the arguments of a call to names, defaults included, however the call was written.

    Args:
        signature: The signature of the task's body, without ``self``.
        convert: What turns a call's arguments into those that the body gets; None where they are the same.
    """

    signature: inspect.Signature
    convert: Conversion | None = None

    @cached_property
    def _defaults(self) -> Mapping[str, Any] | None:
        """By name, the default of each argument; None where an argument is not both positional and named."""
        parameters = self.signature.parameters
        if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters.values()):
            return None
        return {name: each.default for name, each in parameters.items()}

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The call's arguments by name, as the body gets them.

        Raises:
            TypeError: The arguments do not fit the task, as calling it would say.
            Exception: What the conversion raises, as calling the task would.
        """
        if self.convert is not None:
            args, kwargs = self.convert(_unshared(tuple(args)), _unshared(dict(kwargs)))
        args = tuple(args)
        bound = self._bound(args, kwargs)
        if bound is None:  # unusual, or wrong: inspect is slower, and says what is wrong
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
        return bound

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments | None:
        defaults = self._defaults
        if defaults is None or len(args) > len(defaults):
            return None
        arguments: Any = dict(zip(defaults, args, strict=False))
        named = 0
        for name, default in islice(defaults.items(), len(args), None):
            if name in kwargs:
                named += 1
                arguments[name] = kwargs[name]
            elif default is inspect.Parameter.empty:
                return None
            else:
                arguments[name] = default
        return inspect.BoundArguments(self.signature, arguments) if named == len(kwargs) else None


class Selector:
    """What a policy's ``key``, ``fingerprint`` or ``label`` selects from the bound arguments of a call.

    Args:
        option: Name of the option, for messages.
        spec: JMESPath, tuple of them, or a function with the task's own signature.
        nulls: Whether null is a value like any other. What identifies something has none in what ``spec`` builds; what
            it takes from the arguments as it stands there may hold some.

    Raises:
        PolicyError: The expression does not parse, or the function can give no value.
    """

    def __init__(self, option: str, spec: Spec, *, nulls: bool = False) -> None:
        self.option = option
        self.spec = spec
        self._nulls = nulls
        self._paths: tuple[Any, ...] = ()
        if callable(spec):
            if inspect.iscoroutinefunction(spec) or inspect.isgeneratorfunction(spec):
                raise PolicyError(
                    option,
                    repr(spec),
                    "must be a plain function that returns the value",
                    see="keys#the-selector-cannot-be-read",
                )
        elif isinstance(spec, str):
            self._paths = (compiled(option, spec),)
        elif isinstance(spec, tuple) and spec and all(isinstance(each, str) for each in spec):
            self._paths = tuple(compiled(option, each) for each in spec)
        else:
            raise PolicyError(
                option,
                repr(spec),
                "must be a JMESPath, a non-empty tuple of them, or a function of the arguments",
                see="keys#the-selector-cannot-be-read",
            )

    def check(self, signature: inspect.Signature) -> None:
        """Refuse, before any call, a selector that can never select anything from this signature.

        Raises:
            PolicyError: An expression starts with a name that is not an argument, or the function takes others.
        """
        parameters = signature.parameters.values()
        if callable(self.spec):
            example = signature.bind_partial()
            example.arguments |= {each.name: _EXAMPLES.get(each.kind) for each in parameters}
            try:
                inspect.signature(self.spec).bind(*example.args, **example.kwargs)
            except TypeError as error:
                raise PolicyError(
                    self.option,
                    repr(self.spec),
                    f"must take the task's arguments {signature}: {error}",
                    see="keys#the-selector-does-not-fit-the-task",
                ) from error
            except ValueError:
                pass  # a function of C's may not tell its signature; the first call will
            return
        names = {each.name for each in parameters}
        for path in self._paths:
            unknown = root_names(path.parsed) - names
            if unknown:
                raise PolicyError(
                    self.option,
                    repr(path.expression),
                    f"there is no argument {min(unknown)!r}; the signature is {signature}",
                    see="keys#the-selector-does-not-fit-the-task",
                )

    def canonical(self, bound: inspect.BoundArguments, task: str) -> str:
        """The canonical form of what is selected; a tuple of expressions gives that of a list.

        Raises:
            KeyMissing: What is selected, or a part of what ``spec`` builds of it, is missing or null.
            PolicyError: An expression does not fit the argument's type.
            NotCanonical: A selected value has no canonical form.
        """
        if self.spec == WHOLE_CALL:
            return pairs_form({text_form(name): canonical(value, name) for name, value in bound.arguments.items()})
        if callable(self.spec):
            return self._returned(self.spec, bound, task)
        forms = [self._found(path, bound.arguments, task) for path in self._paths]
        return list_form(forms) if isinstance(self.spec, tuple) else forms[0]

    def text(self, bind: Callable[[], inspect.BoundArguments]) -> str:
        """What is selected, for people: texts and numbers as they are, joined by a slash; empty if one is missing.

        It never raises: no effect is given up for a name to show. Where none can be had, the text says why.
        """
        try:
            found = self._parts(bind())
            unfit = [type(each).__name__ for each in found if not isinstance(each, str | int | UUID | None)]
            if unfit:
                return f"(no {self.option}: a {unfit[0]} is neither text nor number)"
            return "" if None in found else "/".join(map(str, found))
        except Exception as error:  # noqa: BLE001 - see above; an author's function may raise or return anything
            return f"(no {self.option}: {type(error).__name__})"

    def _parts(self, bound: inspect.BoundArguments) -> Sequence[Any]:
        if callable(self.spec):
            value = self.spec(*_unshared(bound.args), **_unshared(bound.kwargs))
            return value if isinstance(value, tuple) else (value,)
        return [self._search(path, bound.arguments) for path in self._paths]

    def _returned(self, function: Callable[..., Any], bound: inspect.BoundArguments, task: str) -> str:
        args, kwargs = _unshared(bound.args), _unshared(bound.kwargs)
        try:
            value = function(*args, **kwargs)
        except IdempotencyError:
            raise
        except Exception as error:
            raise self._failed(function, error, task) from error
        if value is None and self._nulls:
            raise PolicyError(
                self.option,
                repr(function),
                f"{task}: it returned None; return what is to be compared",
                see="keys#the-selector-fails-for-a-call",
            )
        form = canonical(value, self.option)
        part = None if self._nulls else _null_that_was_built(value, (args, kwargs))
        if part is not None:
            raise self._missing(part, function, task)
        return form

    def _found(self, path: Any, arguments: Mapping[str, Any], task: str) -> str:
        try:
            value = self._search(path, arguments)
        except Absent as absent:
            raise self._missing(absent.part, path.expression, task) from None
        except Exception as error:
            raise self._failed(path.expression, error, task) from error
        if value is None and not self._nulls:
            raise self._missing("", path.expression, task)
        return canonical(value, path.expression)

    def _missing(self, part: str, source: object, task: str) -> KeyMissing:
        return KeyMissing(task, f"{f'part {part} of ' if part else ''}{self.option}={source!r}")

    def _failed(self, source: object, error: Exception, task: str) -> PolicyError:
        return PolicyError(
            self.option,
            repr(source),
            f"{task}: it raised {type(error).__name__} for these arguments{_told(error)}",
            see="keys#the-selector-fails-for-a-call",
        )

    def _search(self, path: Any, arguments: Mapping[str, Any]) -> Any:
        if path.parsed["type"] == "field":
            return arguments.get(path.parsed["value"])
        member = _member(path.parsed, arguments)
        if member is not None:
            return member
        return (LENIENT if self._nulls else STRICT).visit(path.parsed, _plain(arguments))


_EXAMPLES: Mapping[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}


def compiled(option: str, expression: str) -> Any:
    """The JMESPath, parsed; jmespath keeps what it has parsed. Raises ``PolicyError`` if it is none."""
    try:
        return jmespath.compile(expression)
    except JMESPathError as error:
        raise PolicyError(
            option, repr(expression), f"is not a JMESPath: {error}", see="keys#the-selector-cannot-be-read"
        ) from error


def _member(path: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """What a path of nothing but names leads to through plain dicts; None for any other path.

    JMESPath can search nothing but plain containers, and copying all arguments into some costs more than all
    the rest of a key. Nearly every path is of this kind, as is every argument that was JSON.
    """
    if path["type"] != "subexpression":
        return None
    found: Any = arguments
    for name in path["children"]:
        if name["type"] != "field" or type(found) is not dict:
            return None
        found = found.get(name["value"])
    return _plain(found)


def _told(error: Exception) -> str:
    try:
        return f": {error}"
    except Exception:  # noqa: BLE001 - its text may hold the very value that it is about
        return ""


def _null_that_was_built(value: Any, arguments: Any) -> str | None:
    """Where a function's result has a null that it did not take from the arguments together with what holds it."""
    if _null(value, "", {}) is None:
        return None
    return _null(value, "", _inside(arguments))


def _null(value: Any, path: str, data: Mapping[int, Any]) -> str | None:
    if value is None:
        return path
    if id(value) in data:
        return None
    nulls = (_null(part, where, data) for where, part in parts(value, path))
    return next((each for each in nulls if each is not None), None)


def _inside(value: Any) -> dict[int, Any]:
    """By identity, all that ``value`` is made of; holding it keeps the identities taken."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found[id(each)] = each
            waiting += _children(each)
    return found


def _children(value: Any) -> Iterable[Any]:
    bare = opened(value)
    if isinstance(bare, Mapping):
        return bare.values()
    return bare if isinstance(bare, list | tuple | set | frozenset) else ()
