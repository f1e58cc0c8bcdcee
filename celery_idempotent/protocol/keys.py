"""From a call to its idempotency key: pure, and the same for every way of writing the same call.

A key is ``scope:1:SHA-256``, where 1 is the generation of this form. The hash covers the canonical form of what the
policy selects: ``key``, ``fingerprint`` and ``label``, however the call was written.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID

from celery_idempotent.errors import IdempotencyError, KeyMissing, PolicyError
from celery_idempotent.protocol.canonical import NotCanonical, arguments_form, canonical, list_form, text_form
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, bounded, keepable

Spec = str | tuple[str, ...] | Callable[..., Any]
"""How a policy names what it selects: a path, several, or a function with the task's own signature."""

Conversion = Callable[[Iterable[Any], Mapping[str, Any]], tuple[Iterable[Any], Mapping[str, Any]]]
"""From the arguments of a call, by position and by name, to those that its body gets."""

WHOLE_CALL = "*"
"""All arguments of the call."""

_NAME = r"""[^\s.,|&!?*@=<>`'"()\[\]{}]+"""
_PATH = re.compile(rf"{_NAME}(\.{_NAME})*")
"""Names joined by dots: no brackets, quotes or operators, as an expression would have."""

FORMS = (
    "an argument's name, a path such as 'order.id', a tuple of these, or a function of the arguments for what is "
    "chosen from a list or computed: lambda order: order['lines'][0]['sku']"
)


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

    ``signature`` is that of the task's body, without ``self``; ``convert`` gives the arguments that the body gets.
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
        """The call's arguments by name, as the body gets them; raises what calling the task would."""
        if self.convert is not None:
            args, kwargs = self.convert(_unshared(tuple(args)), _unshared(dict(kwargs)))
        args, defaults = tuple(args), self._defaults
        if defaults is not None and len(args) <= len(defaults):
            given = {**dict(zip(defaults, args, strict=False)), **kwargs} if args else kwargs
            arguments: Any = {**defaults, **given}
            is_right = len(arguments) == len(defaults) and len(given) == len(args) + len(kwargs)
            if is_right and id(inspect.Parameter.empty) not in map(id, arguments.values()):  # nobody's __eq__ is asked
                return inspect.BoundArguments(self.signature, arguments)
        bound = self.signature.bind(*args, **kwargs)  # unusual, or wrong: inspect is slower, and says what is wrong
        bound.apply_defaults()
        return bound


class Selector:
    """What a policy's ``key``, ``fingerprint`` or ``label`` selects from the bound arguments of a call.

    With ``nulls`` null is a value like any other. In what identifies something, a part that is null is missing.
    """

    def __init__(self, option: str, spec: Spec, *, nulls: bool = False) -> None:
        self.option = option
        self.spec = spec
        self._nulls = nulls
        self._paths: tuple[str, ...] = ()
        if callable(spec):
            if inspect.iscoroutinefunction(spec) or inspect.isgeneratorfunction(spec):
                raise PolicyError(option, repr(spec), "must be a plain function that returns the value")
        elif spec != WHOLE_CALL:
            paths = spec if isinstance(spec, tuple) else (spec,)
            if not paths or not all(isinstance(each, str) and _PATH.fullmatch(each) for each in paths):
                raise PolicyError(option, repr(spec), f"must be {FORMS}")
            self._paths = paths

    def __str__(self) -> str:
        """What is selected, for people."""
        if callable(self.spec):
            return f"what {getattr(self.spec, '__qualname__', self.spec)} returns"
        return ", ".join(self._paths)

    def check(self, signature: inspect.Signature) -> None:
        """Refuse, before any call, a selector that can never select anything from this signature."""
        parameters = signature.parameters
        if callable(self.spec):
            example = signature.bind_partial()
            example.arguments |= {name: _EXAMPLES.get(each.kind) for name, each in parameters.items()}
            try:
                inspect.signature(self.spec).bind(*example.args, **example.kwargs)
            except TypeError as error:
                raise PolicyError(
                    self.option, repr(self.spec), f"must take the task's arguments {signature}: {error}"
                ) from error
            except ValueError:
                pass  # a function of C's may not tell its signature; the first call will
        for path in self._paths:
            name = path.partition(".")[0]
            if name not in parameters:
                others = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
                among_others = f"; write {f'{others[0]}.{path}'!r}" if others else ""
                why = f"there is no argument {name!r}; the signature is {signature}{among_others}"
                raise PolicyError(self.option, repr(path), why)

    def canonical(self, bound: inspect.BoundArguments, task: str) -> str:
        """The canonical form of what is selected; a tuple of paths gives that of a list.

        Raises:
            KeyMissing: What is selected, or a part of it that counts, is missing or null.
            PolicyError: A path leads into a list, or what is selected cannot be computed.
            NotCanonical: A selected value has no canonical form.
        """
        if self.spec == WHOLE_CALL:
            return arguments_form(bound.arguments)
        if callable(self.spec):
            return canonical(self._returned(self.spec, bound, task), self.option)
        forms = [canonical(self._found(path, bound.arguments, task), path) for path in self._paths]
        return list_form(forms) if isinstance(self.spec, tuple) else forms[0]

    def text(self, bind: Callable[[], inspect.BoundArguments]) -> str:
        """What is selected, for people: texts and numbers as they are, joined by a slash; empty if one is missing.

        It never raises: no effect is given up for a name to show. Where none can be had, the text says why.
        """
        try:
            bound = bind()
            found: Sequence[Any] = [look_up(path, bound.arguments) for path in self._paths]
            if callable(self.spec):
                value = self.spec(*_unshared(bound.args), **_unshared(bound.kwargs))
                found = value if isinstance(value, tuple) else (value,)
            unfit = [type(each).__name__ for each in found if not isinstance(each, str | int | UUID | None)]
            if unfit:
                return f"(no {self.option}: a {unfit[0]} is neither text nor number)"
            return "" if None in found else "/".join(map(str, found))
        except Exception as error:  # noqa: BLE001 - see above; an author's function may raise or return anything
            return f"(no {self.option}: {type(error).__name__})"

    def _returned(self, function: Callable[..., Any], bound: inspect.BoundArguments, task: str) -> Any:
        try:
            value = function(*_unshared(bound.args), **_unshared(bound.kwargs))
        except IdempotencyError:
            raise
        except Exception as error:
            raise self._failed(function, error, task) from error
        if value is None and self._nulls:
            raise PolicyError(self.option, repr(function), f"{task}: it returned None; return what is to be compared")
        if not self._nulls:
            # What it has put together, it has chosen part by part; what lies deeper is data, and may hold nulls.
            parts = value if isinstance(value, list | tuple | set | frozenset) else ()
            if value is None or any(each is None for each in parts):
                raise KeyMissing(task, f"{'what' if value is None else 'a part of what'} key={function!r} returned")
        return value

    def _found(self, path: str, arguments: Mapping[str, Any], task: str) -> Any:
        try:
            value = look_up(path, arguments)
            if value is None and not self._nulls:
                missing = _first_missing(path, arguments)
                raise KeyMissing(task, f"{'' if missing == path else f'{missing!r} of '}{self.option}={path!r}")
        except IntoList as error:
            raise PolicyError(
                self.option,
                repr(path),
                f"{task}: a path cannot choose {error}; write a function of the arguments: "
                "lambda order: order['lines'][0]['sku']",
            ) from None
        except IdempotencyError:
            raise
        except Exception as error:
            raise self._failed(path, error, task) from error
        return value

    def _failed(self, source: object, error: Exception, task: str) -> PolicyError:
        return PolicyError(
            self.option, repr(source), f"{task}: it raised {type(error).__name__} for these arguments{_text_of(error)}"
        )


class IntoList(Exception):
    """A path leads into a list, which has no named parts."""


def look_up(path: str, arguments: Mapping[str, Any]) -> Any:
    """What a path leads to: members of mappings, attributes of anything else; None where a part of it is missing.

    Raises ``IntoList``, and what a property of the author's raises.
    """
    found: Any = arguments
    for name in path.split("."):
        found = _member(found, name)
    return found


_MAPPING = (dict, Mapping)  # to ask the abstract class takes ten times as long


def _member(value: Any, name: str) -> Any:
    if isinstance(value, _MAPPING):
        return value.get(name)
    if isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):  # which namedtuples have
        raise IntoList(f"{name!r} of a {type(value).__name__}")
    if getattr(type(value), "__pydantic_root_model__", False):
        return _member(value.root, name)
    return getattr(value, name, None)


def _first_missing(path: str, arguments: Mapping[str, Any]) -> str:
    names = path.split(".")
    beginnings = (".".join(names[: count + 1]) for count in range(len(names)))
    return next(each for each in beginnings if look_up(each, arguments) is None)


_EXAMPLES: Mapping[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}


def _text_of(error: Exception) -> str:
    try:
        return f": {error}"
    except Exception:  # noqa: BLE001 - its text may hold the very value that it is about
        return ""


class ArgumentNotCanonical(PolicyError):
    """The option is an argument of a call, which cannot be compared with that of another call."""

    see = IdempotencyError.see  # by the class: no entry is about an author's arguments


class Identity(NamedTuple):
    """Which effect a call asks for, and with which arguments: a hash of them, if any are declared.

    The label is for people: two calls of different labels may be one operation.
    """

    key: str
    fingerprint: str | None
    label: str = ""


class Selectors(NamedTuple):
    """What tells one call from another, what tells its arguments, and what is shown of it."""

    key: Selector
    fingerprint: Selector | None
    label: Selector | None


def identify(
    scope: str,
    bound: inspect.BoundArguments,
    selectors: Selectors,
    *,
    task: str,
    explicit: str | None = None,
    tick: str | None = None,
    occurrence: str | None = None,
) -> Identity:
    """The identity of one call, whose key begins with ``scope``; the ``selectors`` select from ``bound``.

    ``explicit`` is the key that the publisher gave, in place of what is selected. Equal calls of one ``tick`` of a
    schedule are one operation, whoever sent them. ``occurrence`` tells apart calls that are equal but meant to happen
    each time, such as ticks that have no name. ``task`` is for messages.

    Raises:
        KeyMissing: The call has no key.
        PolicyError: An argument has no canonical form, or a path does not fit it. A label raises nothing.
    """
    key, fingerprint, label = selectors
    try:
        selected = None if explicit is not None else key.canonical(bound, task)
        if explicit is not None:
            material = f"explicit:{str.__str__(explicit)}"
        elif tick is not None:
            material = f"tick:{text_form(tick)}{selected}"
        elif occurrence is not None:
            material = f"occurrence:{text_form(occurrence)}{selected}"
        else:
            material = f"selected:{selected}"
        if fingerprint is None:
            declared = None
        elif selected is not None and fingerprint.spec == key.spec:
            declared = selected
        else:
            declared = fingerprint.canonical(bound, task)
    except NotCanonical as error:
        raise ArgumentNotCanonical(
            error.path,
            f"<{error.type_name}>",
            f"{task}: this argument has no canonical form, so equal calls cannot be recognised; pass a plain value, "
            "or leave it out with Policy(key=..., fingerprint=...)",
        ) from error
    named = "" if label is None else label_of(label, lambda: bound)
    return Identity(f"{scope}:{_digest(material)}", None if declared is None else _digest(declared), named)


def label_of(label: Selector | None, bind: Callable[[], inspect.BoundArguments]) -> str:
    """What ``label`` says of the call whose arguments ``bind`` gives; it raises nothing, whatever ``bind`` does."""
    if label is None:
        return ""
    text = keepable(label.text(bind))
    # What looks encrypted would keep its operation from running.
    return bounded(f"({text}" if text.startswith(ENCRYPTED_TEXT) else text)


def _digest(text: str) -> str:
    # surrogatepass: a lone surrogate is legal in a JSON string, and must not make a call fail.
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
