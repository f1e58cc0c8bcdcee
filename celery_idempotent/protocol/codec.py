"""Outcomes to bytes and back, by kombu's serialisers."""

import json
import sys
from collections.abc import Callable
from functools import partial
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple, TypeVar

from kombu import serialization
from kombu.exceptions import DecodeError, EncodeError, KombuError
from kombu.serialization import registry
from kombu.utils import json as kombus_json

from celery_idempotent.errors import ReplayedFailure, members
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import keepable

T = TypeVar("T")

ANY_TEXT = ("utf-8", "surrogatepass")
"""Encoding and errors by which every text of Python's becomes bytes, and itself again."""

_MAX_MESSAGE = 2_000
"""Characters of an exception's message that are kept; people read them, nothing depends on them."""

_NEVER_ENCODED = "application/data"
"""kombu's content type of bytes that are passed on as they are: in every other encoding, nothing says nothing."""

_MAX_FAILURE = 50_000
"""Length of an encoded failure above which its arguments are dropped; every store has room for the rest."""


class Encoded(NamedTuple):
    """An outcome as a store keeps it."""

    data: str | bytes
    content_type: str


class Kept(NamedTuple):
    """What becomes of a result: what is recorded, or why nothing is.

    The first caller gets ``value``: the same as every replay, if there will be one.
    """

    encoded: Encoded | None
    value: Any
    lost: str | None


class Codec(NamedTuple):
    """Encodes outcomes by kombu's serialiser of that name, and decodes them.

    What is not in ``accept`` is never decoded, so nothing is unpickled from a store unless results are pickled. With
    ``private`` no result of an operation is kept, though those of its steps are, and only its type is kept and told of
    an exception.
    """

    serializer: str
    accept: frozenset[str]
    private: bool = False

    def under(self, policy: Policy) -> "Codec":
        """The same, with what ``policy`` says of what is kept."""
        return self._replace(private=policy.private)

    def encode(self, value: Any) -> Encoded:
        """``value`` encoded; raises ``kombu.exceptions.EncodeError``."""
        if self.serializer == "json" and _is_kombus_json():
            try:
                return Encoded(_TO_JSON(value), _JSON)
            except (TypeError, ValueError, RecursionError):
                pass  # kombu has more types
        content_type, _, data = _again(lambda: serialization.dumps(value, self.serializer))
        if isinstance(data, str) and not data.isascii() and data != data.encode(errors="replace").decode():
            raise EncodeError("half of a surrogate pair is in it")  # for which a store would refuse the whole outcome
        return Encoded(data, content_type)

    def decode(self, encoded: Encoded) -> Any:
        """The value that was encoded; raises ``DecodeError``, or ``ContentDisallowed``, which are kombu's."""
        if not encoded.data and encoded.content_type != _NEVER_ENCODED:
            raise DecodeError("it is empty")  # kombu would give it back as it is
        if encoded.content_type == _JSON and isinstance(text := encoded.data, str) and _is_kombus_json():
            try:
                if "__" not in text and "\\" not in text:  # no marker can be in it, however it is written
                    value, end = _FROM_JSON(text)
                    if end == len(text):
                        return value
            except (ValueError, RecursionError):
                pass  # kombu says what is wrong
        encoding = "utf-8" if isinstance(encoded.data, str) else "binary"
        return _again(lambda: serialization.loads(encoded.data, encoded.content_type, encoding, accept=self.accept))

    def keep_outcome(self, value: Any) -> "Kept":
        """The result of an operation, as :meth:`keep`, or what the policy records in its place."""
        return self.keep(None)._replace(value=value) if self.private else self.keep(value)

    def keep(self, value: Any) -> "Kept":
        """``value`` as it is recorded and as it reads back.

        As the effect has happened, it raises nothing of the value's: only what struck from outside, and then asking
        again succeeds.
        """
        try:
            return self._read_back(value)
        except Exception as first:  # noqa: BLE001 - nothing about a result may undo its effect
            error = own_failure(partial(self._read_back, value), first)
        return Kept(None, value, f"not encodable: {self.told(error)}")

    def _read_back(self, value: Any) -> "Kept":
        encoded = self.encode(value)
        return Kept(encoded, self.decode(encoded), None)

    def told(self, error: BaseException) -> str:
        """What may be kept and logged of what ``error`` says; its type where its text may not."""
        return type(error).__name__ if self.private else describe(error)

    def summary(self, error: BaseException) -> str:
        """The type of ``error``, and what it says if that may be kept."""
        name = type(error).__name__
        return name if self.private else f"{name}: {describe(error)}"

    def encode_failure(self, error: BaseException) -> Encoded:
        """``error`` encoded so that a replay can raise an equal one.

        Its arguments are only kept if they are encodable, and make an equal one when they are decoded.
        """
        description = {"module": type(error).__module__, "type": type(error).__qualname__}
        if self.private:
            return self.encode(description)
        description["message"] = describe(error)
        with_arguments = partial(self._rebuildable, error, {**description, "args": list(error.args)})
        try:
            encoded = with_arguments()
        except Exception as first:  # noqa: BLE001 - whatever code of an argument's own raises, the failure stays recorded
            own_failure(with_arguments, first)
            encoded = None
        return encoded or self.encode(description)

    def _rebuildable(self, error: BaseException, description: dict[str, Any]) -> Encoded | None:
        """``description`` encoded, if it is short and makes an equal exception when it is decoded."""
        encoded = self.encode(description)
        twin = type(error)(*self.decode(encoded)["args"])
        return encoded if len(encoded.data) <= _MAX_FAILURE and _is_equal(twin, error) else None

    def decode_failure(
        self,
        encoded: Encoded | None,
        key: str,
        *,
        remembered: tuple[type[BaseException], ...] = (),
        never: tuple[type[BaseException], ...] = (),
    ) -> Exception:
        """The failure to raise on a replay: of the recorded type if that may be, else ``ReplayedFailure``.

        Whoever can write the store chooses the description, so nothing is built but an ``Exception`` whose type is
        loaded here, is remembered, and steers nobody. Raises as :meth:`decode` does.
        """
        description = None if encoded is None else self.decode(encoded)
        if not isinstance(description, dict):
            description = {}
        module, name, message = (_text(description.get(each)) for each in ("module", "type", "message"))
        found = _loaded(module, name)
        if found and issubclass(found, Exception) and issubclass(found, remembered) and not issubclass(found, never):
            rebuilt = _built(found, description.get("args"))
            if rebuilt is not None and not isinstance(rebuilt, never):
                return rebuilt
        return ReplayedFailure(key, f"{module or '?'}.{name or '?'}", message)


_JSON = "application/json"  # which every codec accepts
_TO_JSON, _FROM_JSON = json.JSONEncoder().encode, json.JSONDecoder().raw_decode


def _is_kombus_json() -> bool:
    """Whether JSON is kombu's, not the user's own: then the standard library does the same in a third of the time.

    kombu adds the types that JSON has not, and a marker from which it reads them.
    """
    encoding = registry._encoders.get("json")
    is_written = encoding is not None and encoding.encoder is kombus_json.dumps
    return is_written and registry._decoders.get(_JSON) is kombus_json.loads


def as_bytes(data: str | bytes) -> bytes:
    """The bytes of an encoded outcome, which may be any text of Python's."""
    return data.encode(*ANY_TEXT) if isinstance(data, str) else data


def _again(act: Callable[[], T]) -> T:
    """``act()``; raises what is its own failure, and what struck in it as it was."""
    try:
        return act()
    except Exception as first:  # noqa: BLE001 - it is raised, or what fails again
        error = own_failure(act, first)
    raise error


def own_failure(act: Callable[[], object], first: Exception) -> Exception:
    """What ``act`` raises again after ``first``: what cannot be encoded fails twice.

    What fails once was struck, by a soft time limit or whatever else a signal raises; that is raised. kombu has taken
    it for the serialiser's own error. Taken for that here, too, it would cost an operation its outcome and be lost.
    """
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the caller says what it means
        return error
    raise (first.__context__ or first) if isinstance(first, KombuError) else first


def describe(error: object) -> str:
    """A readable, bounded text about ``error``, or its reason, that every store can keep: valid UTF-8, no NUL."""
    try:
        text = str(error)
        if isinstance(error, BaseExceptionGroup):
            text += "".join(f"; {type(each).__name__}: {each}" for each in members(error))
    except Exception:  # noqa: BLE001 - a broken __str__ must not replace the failure it describes
        text = "(no message)"
    return keepable(text[:_MAX_MESSAGE])


_MODULE_DICT: Any = vars(ModuleType)["__dict__"]
_CLASS_DICT: Any = vars(type)["__dict__"]
"""How the interpreter itself finds names, whatever a module or a class has put in its way."""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _loaded(module: str, qualname: str) -> type | None:
    """The class of that name if its module is loaded.

    Only names that stand in the module, and in classes there, are followed: nothing is imported, and no
    ``__getattr__`` or descriptor is run that a record happens to name.
    """
    place: Any = sys.modules.get(module)
    if not issubclass(type(place), ModuleType):
        return None
    found, names = None, _MODULE_DICT.__get__(place)
    for name in qualname.split("."):
        found = names.get(name)
        if not issubclass(type(found), type):
            return None
        names = _CLASS_DICT.__get__(found)
    return found


def _built(found: type[Exception], args: object) -> Exception | None:
    """``found(*args)``, if it takes them and gives what it is asked for: built-in types give their subclasses, too."""
    if not isinstance(args, list):
        return None
    try:
        built: object = found(*args)
    except Exception:  # noqa: BLE001 - a constructor may raise anything; the caller has a fallback
        return None
    return built if isinstance(built, found) else None


def _is_equal(twin: BaseException, error: BaseException) -> bool:
    """Whether ``twin`` says and has all that ``error`` does: its attributes, slots and built-in fields.

    Tracers mark an exception that passes by private attributes, and Python keeps notes in one: what only ``error`` has,
    under such a name, makes no difference.
    """
    if type(twin) is not type(error) or describe(twin) != describe(error):
        return False
    its, others = vars(twin), vars(error)
    if its != {name: value for name, value in others.items() if name in its or not name.startswith("_")}:
        return False
    return all(getattr(twin, name, None) == getattr(error, name, None) for name in _fields(type(error)))


def _fields(kind: type) -> set[str]:
    """What instances of a class keep outside their ``__dict__``, but where it was raised and why."""
    kept = (MemberDescriptorType, GetSetDescriptorType)
    found = {name for each in kind.__mro__ for name, value in vars(each).items() if isinstance(value, kept)}
    return {name for name in found if not name.startswith("__")}
