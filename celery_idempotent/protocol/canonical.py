"""The canonical form of a value: equal for equal values, and different for different ones.

It is *typed*, so that ``1``, ``"1"``, ``1.0``, ``True`` and ``None`` have five different forms, while a tuple is a
list, and the order of a dict or a set does not matter. What JSON cannot tell apart on the wire has one form, so that
publisher and worker agree: an enum counts as its value, a dataclass or a pydantic model as the dict of its fields.

The form is frozen by ``tests/unit/golden_keys.json``. Changing it gives every running operation a new key, which is to
say: runs it again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID


class NotCanonical(TypeError):
    """The value at ``path`` has no canonical form, so it cannot be told whether two of them are the same."""

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(path, type_name)
        self.path = path
        self.type_name = type_name

    def __str__(self) -> str:
        return f"argument {self.path} of type {self.type_name} has no canonical form"


def canonical(value: Any, path: str = "value") -> str:
    """The typed canonical form of ``value``, or :exc:`NotCanonical`, which says what has none."""
    try:
        return _form(value)
    except _Formless:
        raise NotCanonical(*_culprit(value, path)) from None
    except RecursionError:
        raise NotCanonical(path, f"{_type_name(value)} (nested too deep, or inside itself)") from None
    except Exception as error:  # a value's own code may raise anything
        raise NotCanonical(*_culprit(value, path)) from error


def arguments_form(arguments: Mapping[str, Any]) -> str:
    """The form of a call's arguments, that of a dict; :exc:`NotCanonical` says which of them has none."""
    try:
        return _mapping(arguments)
    except Exception:
        for name, value in arguments.items():
            canonical(value, name)
        raise  # what struck


class _Formless(Exception):
    """Some part of a value has no form. Paths are followed only then: nearly every call has a key."""


def _form(value: Any) -> str:
    return _ENCODERS[type(value)](value)


def text_form(value: str) -> str:
    """The form of a text. Its length makes it prefix-free: no text can imitate a neighbouring value."""
    return f"s{len(value)}:{value}"


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


def _bytes(value: bytes | bytearray | memoryview) -> str:
    return f"y{bytes(value).hex()};"


def _sequence(value: Iterable[Any]) -> str:
    return list_form([_ENCODERS[type(each)](each) for each in value])


def list_form(forms: list[str]) -> str:
    """The form of a list of which these are the items' forms."""
    return f"l{len(forms)}[{','.join(forms)}]"


def _set(value: Iterable[Any]) -> str:
    forms = sorted(map(_form, value))
    return f"S{len(forms)}[{','.join(forms)}]"


def _mapping(value: Mapping[Any, Any]) -> str:
    pairs = []
    for key, each in value.items():
        if type(key) is not str:
            return _mapping_of_any(value)
        pairs.append(f"s{len(key)}:{key}={_ENCODERS[type(each)](each)}")  # the form of no text begins that of another
    return f"d{len(pairs)}{{{','.join(sorted(pairs))}}}"


def _mapping_of_any(value: Mapping[Any, Any]) -> str:
    forms = {_form(key): _form(each) for key, each in value.items()}
    if len(forms) != len(value):
        raise _Formless  # two keys are one on the wire, so nobody can tell which value is whose
    return f"d{len(forms)}{{{','.join(map('='.join, sorted(forms.items())))}}}"


def opened(value: Any) -> Any:
    """A dataclass or pydantic model as the dict of its fields, a secret as what it hides; anything else as it is."""
    kind = type(value)
    if kind in _ENCODERS:
        return value
    if hasattr(kind, "__pydantic_root_model__"):
        return opened(value.root) if kind.__pydantic_root_model__ else _fields(value)
    if dataclasses.is_dataclass(kind):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(kind)}
    return opened(value.get_secret_value()) if hasattr(kind, "get_secret_value") else value


def _fields(model: Any) -> dict[str, Any]:
    # Read one by one: model_dump() masks secrets, and leaves out or rewrites what the author keeps from being shown.
    # Two calls that differ there only would have one key.
    kind = type(model)
    names = (*kind.model_fields, *kind.__pydantic_decorators__.computed_fields)
    return {name: getattr(model, name) for name in names} | (model.model_extra or {})


def _jsonable(value: Any) -> Any:
    """``value`` as pydantic's JSON has it, but for what the author hides, and with sets in an order."""
    bare = opened(value)
    if isinstance(bare, Mapping):
        values = {name: _jsonable(each) for name, each in bare.items()}
        named = {_json_name(name): each for name, each in values.items()}
        return named if len(named) == len(values) else values
    if isinstance(bare, list | tuple):
        return [_jsonable(each) for each in bare]
    if isinstance(bare, set | frozenset):
        return sorted(map(_jsonable, bare), key=_form)
    return _json_leaf(bare)


def _json_name(name: Any) -> Any:
    return name if type(name) is str else next(iter(_json_leaf({name: None})))


def _json_leaf(value: Any) -> Any:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        return value


def _derived(value: Any) -> str:
    if isinstance(value, Enum):
        return _form(value.value)
    if hasattr(type(value), "__pydantic_root_model__"):
        return _form(_jsonable(value))
    bare = opened(value)
    if bare is not value:
        return _form(bare)
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
        float: lambda value: f"f{value + 0.0!r}",  # adding 0.0 turns -0.0 into the 0.0 it is equal to
        str: text_form,
        bytes: _bytes,
        bytearray: _bytes,
        memoryview: _bytes,
        Decimal: _decimal,
        UUID: lambda value: f"u{value.hex}",
        datetime: _datetime,
        date: lambda value: f"D{value.isoformat()}",
        time: lambda value: f"o{value.isoformat()}",
        timedelta: lambda value: f"p{value // timedelta(microseconds=1)}",
        list: _sequence,
        tuple: _sequence,
        set: _set,
        frozenset: _set,
        dict: _mapping,
    }
)


def _culprit(value: Any, path: str) -> tuple[str, str]:
    """Path and type of the innermost part of ``value`` that has no form."""
    with suppress(Exception):  # a value that cannot give its parts has no form itself
        for where, part in parts(value, path):
            try:
                _form(part)
            except Exception:  # noqa: BLE001 - whatever it is, the part has no canonical form
                return _culprit(part, where)
    return path, _type_name(value)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each part that ``value`` is made of; none of a leaf."""
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
        case _ if (bare := opened(value)) is not value:
            yield from parts(bare, path)
