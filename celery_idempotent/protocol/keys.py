"""From a call to its idempotency key: pure, and the same for every way of writing the same call.

A key is ``scope:version:SHA-256``. The hash covers a *typed canonical form* of the values that the policy
selects, so that ``1``, ``"1"``, ``1.0``, ``True`` and ``None`` are five different keys while a tuple is a
list, and the order of a dict or a set does not matter.

What JSON cannot tell apart on the wire has one form, so that publisher and worker agree: an enum counts as
its value, a dataclass or a pydantic model as the dict of its fields.

The form is frozen by ``tests/unit/golden_keys.json``. Changing it gives every running operation a new key,
which is to say: runs it again.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import sha256
from typing import Any
from uuid import UUID

import jmespath
from jmespath.exceptions import JMESPathError

from celery_idempotent.errors import IdempotencyError, KeyMissing, PolicyError
from celery_idempotent.protocol.paths import LENIENT, STRICT, Absent, root_names

Spec = str | tuple[str, ...] | Callable[..., Any]
"""How a policy names what it selects: a JMESPath, several, or a function of the task's own arguments."""

Conversion = Callable[[Iterable[Any], Mapping[str, Any]], tuple[Iterable[Any], Mapping[str, Any]]]
"""From the arguments of a call, by position and by name, to those that its body gets."""

WHOLE_CALL = "@"
"""JMESPath's own name for "everything here": all arguments of the call."""


class NotCanonical(TypeError):
    """A value has no canonical form, so it cannot be told whether two of them are the same.

    Args:
        path: Where in the arguments the value stands.
        type_name: Its type.
    """

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(path, type_name)
        self.path = path
        self.type_name = type_name

    def __str__(self) -> str:
        return f"argument {self.path} of type {self.type_name} has no canonical form"


def canonical(value: Any, path: str = "value") -> str:
    """The typed canonical form of ``value``: equal for equal values, different for different ones.

    Raises:
        NotCanonical: Some part has no canonical form; the message says which.
    """
    try:
        return _form(value)
    except _Formless:
        raise NotCanonical(*_culprit(value, path)) from None
    except RecursionError:
        raise NotCanonical(path, f"{_type_name(value)} (nested too deep, or inside itself)") from None
    except Exception as error:  # a value's own code may raise anything
        raise NotCanonical(*_culprit(value, path)) from error


class _Formless(Exception):
    """Some part of a value has no form. Paths are followed only then: nearly every call has a key."""


def _form(value: Any) -> str:
    return _ENCODERS[type(value)](value)


def _text(value: str) -> str:
    # The length makes the form prefix-free: no text can imitate a neighbouring value.
    return f"s{len(value)}:{value}"


def _float(value: float) -> str:
    return f"f{value + 0.0!r}"  # adding 0.0 turns -0.0 into the 0.0 it is equal to


def _decimal(value: Decimal) -> str:
    # Equal decimals have one form, exactly: Decimal.normalize() would round to the context's precision.
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return f"m{value}"
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return "m0"
    stripped = text.rstrip("0")
    return f"m{'-' if sign else ''}{stripped}e{exponent + len(text) - len(stripped)}"


def _datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        return f"T{value.isoformat()}"
    return f"t{value.astimezone(UTC).replace(tzinfo=None).isoformat()}"


def _duration(value: timedelta) -> str:
    return f"p{value // timedelta(microseconds=1)}"


def _bytes(value: bytes | bytearray | memoryview) -> str:
    return f"y{bytes(value).hex()};"


def _sequence(value: Iterable[Any]) -> str:
    return _list([_ENCODERS[type(each)](each) for each in value])


def _list(parts: list[str]) -> str:
    return f"l{len(parts)}[{','.join(parts)}]"


def _set(value: Iterable[Any]) -> str:
    parts = sorted(map(_form, value))
    return f"S{len(parts)}[{','.join(parts)}]"


def _mapping(value: Mapping[Any, Any]) -> str:
    parts = {_ENCODERS[type(key)](key): _ENCODERS[type(each)](each) for key, each in value.items()}
    if len(parts) != len(value):
        raise _Formless  # two keys are one on the wire, so nobody can tell which value is whose
    return _pairs(parts)


def _pairs(parts: Mapping[str, str]) -> str:
    return f"d{len(parts)}{{{','.join([f'{key}={each}' for key, each in sorted(parts.items())])}}}"


def _opened(value: Any) -> Any:
    """A dataclass or pydantic model as the dict of its fields, a secret as what it hides; anything else as it is."""
    kind = type(value)
    if kind in _ENCODERS:
        return value
    if hasattr(kind, "__pydantic_root_model__"):
        return _opened(value.root) if kind.__pydantic_root_model__ else _fields(value)
    if dataclasses.is_dataclass(kind):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    return _opened(value.get_secret_value()) if hasattr(kind, "get_secret_value") else value


def _fields(model: Any) -> dict[str, Any]:
    # Read one by one: model_dump() masks secrets, and leaves out or rewrites what the author keeps from being shown.
    # Two calls that differ there only would have one key.
    kind = type(model)
    names = (*kind.model_fields, *kind.__pydantic_decorators__.computed_fields)
    return {name: getattr(model, name) for name in names} | (model.model_extra or {})


def _jsonable(value: Any) -> Any:
    """``value`` as pydantic's JSON has it, but for what the author hides, and with sets in an order."""
    opened = _opened(value)
    if isinstance(opened, Mapping):
        values = {name: _jsonable(each) for name, each in opened.items()}
        named = {_json_name(name): each for name, each in values.items()}
        return named if len(named) == len(values) else values
    if isinstance(opened, list | tuple):
        return [_jsonable(each) for each in opened]
    if isinstance(opened, set | frozenset):
        return sorted(map(_jsonable, opened), key=_form)
    return _json_leaf(opened)


def _json_name(name: Any) -> Any:
    return name if type(name) is str else next(iter(_json_leaf({name: None})))


def _json_leaf(value: Any) -> Any:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        return value


def _model(value: Any) -> str:
    return _form(_jsonable(value))


def _enum(value: Enum) -> str:
    return _form(value.value)


def _derived(value: Any) -> str:
    if isinstance(value, Enum):
        return _enum(value)
    if hasattr(type(value), "__pydantic_root_model__"):
        return _model(value)
    opened = _opened(value)
    if opened is not value:
        return _form(opened)
    for base, exact in _EXACTLY.items():
        if isinstance(value, base):
            return _ENCODERS[base](exact(value))
    # datetime before date, its base class; the order of _ENCODERS says so.
    for known, encode in _ENCODERS.items():
        if isinstance(value, known):
            return encode(value)
    if isinstance(value, Mapping):
        return _mapping(value)
    raise _Formless


_EXACTLY: Mapping[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
"""By type, what gives the value itself of a subclass that may print as something else."""


class _Encoders(dict[type, Callable[[Any], str]]):
    """By type, what gives a value's form. Values of other types are told by what those derive from."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        return _derived


_ENCODERS = _Encoders(
    {
        type(None): lambda value: "n",
        bool: lambda value: "b1" if value else "b0",
        int: lambda value: f"i{value}",
        float: _float,
        str: _text,
        bytes: _bytes,
        bytearray: _bytes,
        memoryview: _bytes,
        Decimal: _decimal,
        UUID: lambda value: f"u{value.hex}",
        datetime: _datetime,
        date: lambda value: f"D{value.isoformat()}",
        time: lambda value: f"o{value.isoformat()}",
        timedelta: _duration,
        list: _sequence,
        tuple: _sequence,
        set: _set,
        frozenset: _set,
        dict: _mapping,
    }
)


def _culprit(value: Any, path: str) -> tuple[str, str]:
    """Path and type of the innermost part of ``value`` that has no form."""
    while (part := _formless_part(value, path)) is not None:
        path, value = part
    return path, _type_name(value)


def _formless_part(value: Any, path: str) -> tuple[str, Any] | None:
    try:
        return next(((where, part) for where, part in _parts(value, path) if not _has_form(part)), None)
    except Exception:  # noqa: BLE001 - a value that cannot give its parts has no form itself
        return None


def _has_form(value: Any) -> bool:
    try:
        _form(value)
    except Exception:  # noqa: BLE001 - whatever it is, the value has no canonical form
        return False
    return True


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    match value:
        case Enum():
            yield path, value.value
        case list() | tuple():
            yield from ((f"{path}[{index}]", each) for index, each in enumerate(value))
        case set() | frozenset():
            yield from ((f"{path}{{}}", each) for each in value)
        case Mapping():
            yield from ((f"key of {path}", key) for key in value)
            yield from ((f"{path}.{key}", each) for key, each in value.items())
        case _ if hasattr(type(value), "__pydantic_root_model__"):
            yield path, _jsonable(value)
        case _ if (opened := _opened(value)) is not value:
            yield from _parts(opened, path)


def _plain(value: Any) -> Any:
    """``value`` with every container turned into what JMESPath can search; leaves stay as they are."""
    opened = _opened(value)
    if isinstance(opened, Mapping):
        return {key: _plain(each) for key, each in opened.items()}
    if isinstance(opened, list | tuple):
        return [_plain(each) for each in opened]
    return opened


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


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Binds the arguments of a call to names, defaults included, however the call was written.

    Args:
        signature: The signature of the task's body, without ``self``.
        convert: What turns a call's arguments into those that the body gets; None where they are the same.
    """

    signature: inspect.Signature
    convert: Conversion | None = None

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The call's arguments by name, as the body gets them.

        Raises:
            TypeError: The arguments do not fit the task, as calling it would say.
            Exception: What the conversion raises, as calling the task would.
        """
        if self.convert is not None:
            args, kwargs = self.convert(_unshared(tuple(args)), _unshared(dict(kwargs)))
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound


class Selector:
    """What a policy's ``key`` or ``fingerprint`` selects from the bound arguments of a call.

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
                raise PolicyError(option, repr(spec), "must be a plain function that returns the value")
        elif isinstance(spec, str):
            self._paths = (_compile(option, spec),)
        elif isinstance(spec, tuple) and spec and all(isinstance(each, str) for each in spec):
            self._paths = tuple(_compile(option, each) for each in spec)
        else:
            raise PolicyError(
                option,
                repr(spec),
                "must be a JMESPath, a non-empty tuple of them, or a function of the arguments",
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
                    self.option, repr(self.spec), f"must take the task's arguments {signature}: {error}"
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
                    f"the task has no argument {min(unknown)!r}; its signature is {signature}",
                )

    def canonical(self, bound: inspect.BoundArguments, task: str) -> str:
        """The canonical form of what is selected; a tuple of expressions gives that of a list.

        Raises:
            KeyMissing: What is selected, or a part of what ``spec`` builds of it, is missing or null.
            PolicyError: An expression does not fit the argument's type.
            NotCanonical: A selected value has no canonical form.
        """
        if self.spec == WHOLE_CALL:
            return _pairs({_text(name): canonical(value, name) for name, value in bound.arguments.items()})
        if callable(self.spec):
            return self._returned(self.spec, bound, task)
        parts = [self._found(path, bound.arguments, task) for path in self._paths]
        return _list(parts) if isinstance(self.spec, tuple) else parts[0]

    def _returned(self, function: Callable[..., Any], bound: inspect.BoundArguments, task: str) -> str:
        args, kwargs = _unshared(bound.args), _unshared(bound.kwargs)
        try:
            value = function(*args, **kwargs)
        except IdempotencyError:
            raise
        except Exception as error:
            raise self._failed(function, error, task) from error
        if value is None and self._nulls:
            raise PolicyError(self.option, repr(function), f"{task}: it returned None; return what is to be compared")
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
            self.option, repr(source), f"{task}: it raised {type(error).__name__} for these arguments{_told(error)}"
        )

    def _search(self, path: Any, arguments: Mapping[str, Any]) -> Any:
        if path.parsed["type"] == "field":
            return arguments.get(path.parsed["value"])
        member = _member(path.parsed, arguments)
        if member is not None:
            return member
        return (LENIENT if self._nulls else STRICT).visit(path.parsed, _plain(arguments))


_EXAMPLES: Mapping[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}


def _compile(option: str, expression: str) -> Any:
    try:
        return jmespath.compile(expression)
    except JMESPathError as error:
        raise PolicyError(option, repr(expression), f"is not a JMESPath: {error}") from error


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
    nulls = (_null(part, where, data) for where, part in _parts(value, path))
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
    opened = _opened(value)
    if isinstance(opened, Mapping):
        return opened.values()
    return opened if isinstance(opened, list | tuple | set | frozenset) else ()


@dataclass(frozen=True, slots=True)
class Identity:
    """Which effect a call asks for, and with which arguments.

    Args:
        key: The idempotency key.
        fingerprint: Hash of the declared arguments, or None if none are declared.
    """

    key: str
    fingerprint: str | None


def identify(
    scope: str,
    bound: inspect.BoundArguments,
    *,
    task: str,
    key: Selector,
    fingerprint: Selector | None,
    explicit: str | None = None,
    occurrence: str | None = None,
) -> Identity:
    """The identity of one call.

    Args:
        scope: Namespace and generation of the key.
        bound: The call's arguments by name.
        task: Task name, for messages.
        key: What selects the key.
        fingerprint: What selects the fingerprint, if there is one.
        explicit: The key that the publisher gave; it takes the place of what ``key`` selects.
        occurrence: Tells apart calls that are equal but meant to happen each time, such as beat's ticks.

    Raises:
        KeyMissing: The call has no key.
        PolicyError: An argument has no canonical form, or an expression does not fit it.
    """
    try:
        selected = None if explicit is not None else key.canonical(bound, task)
        if explicit is not None:
            material = f"explicit:{str.__str__(explicit)}"
        elif occurrence is not None:
            material = f"occurrence:{_text(occurrence)}{selected}"
        else:
            material = f"selected:{selected}"
        if fingerprint is None:
            declared = None
        elif selected is not None and fingerprint.spec == key.spec:
            declared = selected
        else:
            declared = fingerprint.canonical(bound, task)
    except NotCanonical as error:
        raise PolicyError(
            error.path,
            f"<{error.type_name}>",
            f"{task}: this argument has no canonical form, so equal calls cannot be recognised; pass a plain value, "
            "or leave it out with Policy(key=..., fingerprint=...)",
        ) from error
    return Identity(f"{scope}:{_digest(material)}", None if declared is None else _digest(declared))


def _digest(text: str) -> str:
    # surrogatepass: a lone surrogate is legal in a JSON string, and must not make a call fail.
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
