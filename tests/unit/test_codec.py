"""Outcomes to bytes and back."""

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from celery.exceptions import WorkerShutdown
from kombu import serialization
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError
from kombu.utils import json as kombus_json

from celery_idempotent.errors import ReplayedFailure
from celery_idempotent.protocol.codec import Codec, Encoded, describe
from tests.support.links import unlinked

JSON = Codec("json", frozenset({"application/json"}))


class Awkward(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class Formatting(Exception):
    """Makes its text of what it was given, and gives that to its base."""

    def __init__(self, code: object) -> None:
        super().__init__(f"the bank says {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: object, again: bool = False) -> None:
        super().__init__(f"the bank says {code}")
        self.code = code


class Hidden(Exception):
    def __init__(self, code: object) -> None:
        super().__init__(str(code))
        self._code = code


class Named(Exception):
    """Has what it was given, as most do."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code, self._reason = code, reason


def changed(error: Exception, **attributes: object) -> Exception:
    vars(error).update(attributes)
    return error


def noted(error: Exception) -> Exception:
    error.add_note("seen by a tracer")
    return error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_json_is_text_that_a_person_can_read() -> None:
    """In the console of a store a JSON result is legible."""
    assert JSON.encode({"id": 1}) == Encoded('{"id": 1}', "application/json")


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "é"], "b": (1,)},
        float("nan"),
        {"__type__": "decimal", "__value__": "1"},
        {"when": datetime(2027, 1, 2, 3, 4), "much": Decimal("1.10"), "who": UUID(int=7), "raw": b"\xff"},
    ],
)
def test_json_is_written_and_read_as_kombu_does(value: object) -> None:
    """The short way of plain JSON and that of kombu are one format, which older versions have written."""
    content_type, _, data = serialization.dumps(value, "json")

    assert JSON.encode(value) == Encoded(data, content_type)
    assert repr(JSON.decode(Encoded(data, content_type))) == repr(
        serialization.loads(data, content_type, "utf-8", accept={content_type})
    )


@pytest.mark.parametrize("underscore", ["_", "\\u005f"], ids=["plain", "escaped"])
@pytest.mark.parametrize("form", [str, str.encode], ids=["text", "bytes"])
def test_markers_of_kombu_are_read_however_they_are_written(
    underscore: str, form: Callable[[str], str | bytes]
) -> None:
    """A result that holds a Decimal or a date comes back as one."""
    data = '{"__type__": "decimal", "__value__": "1"}'.replace("_", underscore)

    assert JSON.decode(Encoded(form(data), "application/json")) == Decimal(1)


def test_plain_json_does_without_kombu(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu's way takes three times as long, at each end of every task."""
    monkeypatch.setattr(serialization, "dumps", None)
    monkeypatch.setattr(serialization, "loads", None)

    assert JSON.decode(JSON.encode({"id": 1})) == {"id": 1}


@pytest.mark.parametrize("replaced", ["encoder", "decoder"])
def test_json_of_the_users_own_is_used(replaced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever registers another serialiser as json means it for results, too."""
    theirs = serialization.registry.__class__()
    theirs.register(
        "json",
        (lambda value: '"theirs"') if replaced == "encoder" else kombus_json.dumps,
        (lambda data: "theirs") if replaced == "decoder" else kombus_json.loads,
        content_type="application/json",
        content_encoding="utf-8",
    )
    monkeypatch.setattr(serialization.registry, "_encoders", theirs._encoders)
    monkeypatch.setattr(serialization.registry, "_decoders", theirs._decoders)

    assert JSON.decode(JSON.encode("ours")) == "theirs"


def test_binary_formats_round_trip() -> None:
    """Pickle is bytes, and decoded only where it is accepted."""
    pickle = Codec("pickle", frozenset({"application/x-python-serialize"}))
    encoded = pickle.encode({1, 2})

    assert isinstance(encoded.data, bytes)
    assert pickle.decode(encoded) == {1, 2}
    with pytest.raises(ContentDisallowed):
        JSON.decode(encoded)


def test_text_that_is_no_utf8_is_an_error() -> None:
    """Of a serialiser that writes any text as it is: a store would refuse all of the outcome for it."""
    serialization.register("any text", str, str, "text/any", "utf-8")
    try:
        with pytest.raises(EncodeError, match="half of a surrogate pair"):
            Codec("any text", frozenset()).encode("Zoë \ud83d")
        assert Codec("any text", frozenset()).encode("Zoë 💥").data == "Zoë 💥"
    finally:
        serialization.unregister("any text")


def endless() -> list[object]:
    """A list that holds itself."""
    found: list[object] = []
    found.append(found)
    return found


def deep() -> list[object]:
    """Lists in lists, more than Python follows."""
    found: list[object] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize("make", [object, endless, deep])
def test_unencodable_value_is_an_error(make: Callable[[], object]) -> None:
    """The caller decides what an unencodable result means."""
    with pytest.raises(EncodeError):
        JSON.encode(make())


@pytest.mark.parametrize("data", ["[1", "[" * 100_000], ids=["torn", "deep"])
def test_undecodable_text_is_an_error(data: str) -> None:
    """The caller decides what an unreadable record means."""
    with pytest.raises(DecodeError):
        JSON.decode(Encoded(data, "application/json"))


def test_failure_is_rebuilt_with_type_and_arguments() -> None:
    """Built-in and imported exceptions come back equal."""
    marked = noted(changed(Named(6), _tracers_span=object()))
    for error in (
        ValueError("a", 1),
        KeyError("k"),
        EncodeError("x"),
        Named(5, "r"),
        FileNotFoundError(2, "no"),
        marked,
    ):
        twin = JSON.decode_failure(JSON.encode_failure(error), "k", remembered=(Exception,))
        assert type(twin) is type(error)
        assert twin.args == error.args


@pytest.mark.parametrize(
    "error",
    [
        Awkward(5, reason="r"),
        type("Unknown", (Exception,), {})("x"),
        ValueError(object()),
        ValueError("x" * 60_000),
        Formatting(5),
        Slotted(5),
        Hidden(5),
        ValueError((1, 2)),
        changed(Named(5), code=6),
        changed(Named(5), _reason="another"),
        changed(Named(5), more=1),
        FileNotFoundError(2, "no such file", "name.txt"),
        ModuleNotFoundError("x", name="x"),
    ],
)
def test_failure_that_cannot_be_rebuilt_is_described(error: Exception) -> None:
    """Where type, arguments or attributes do not allow it, the replay names the type and the message."""
    twin = JSON.decode_failure(JSON.encode_failure(error), "k", remembered=(Exception,))

    assert isinstance(twin, ReplayedFailure)
    assert twin.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
    assert str(error).startswith(twin.message)


@pytest.mark.parametrize(("error", "is_rebuilt"), [(Formatting(5), False), (ValueError((1, 2)), True)])
def test_other_formats_keep_more_and_are_looked_at_likewise(error: Exception, is_rebuilt: bool) -> None:
    """A tuple stays one; what an exception makes of its arguments is no better."""
    pickling = Codec("pickle", frozenset({"application/x-python-serialize"}))
    twin = pickling.decode_failure(pickling.encode_failure(error), "k", remembered=(Exception,))

    assert (type(twin), twin.args) == (type(error), error.args) if is_rebuilt else type(twin) is ReplayedFailure


def test_group_is_described_with_all_of_its_members() -> None:
    """Its own text only counts them."""
    error = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("", [KeyError("b")])])
    twin = JSON.decode_failure(JSON.encode_failure(error), "k", remembered=(Exception,))

    assert isinstance(twin, ReplayedFailure)
    assert twin.message == "two (2 sub-exceptions); ValueError: a; KeyError: 'b'"


def test_failure_of_another_kind_is_never_built() -> None:
    """Only exception types are called, whatever a tampered record names; nothing is imported for it."""
    for module, name in (("os", "system"), ("builtins", "dict"), ("antigravity", "x"), ("builtins", "nothing.here")):
        tampered = JSON.encode({"module": module, "type": name, "message": "m", "args": ["true"]})
        assert isinstance(JSON.decode_failure(tampered, "k", remembered=(BaseException,)), ReplayedFailure)


def test_failure_without_a_record_is_described() -> None:
    """A failure whose description was lost is still a failure."""
    assert isinstance(JSON.decode_failure(None, "k"), ReplayedFailure)


def test_broken_exception_does_not_hide_the_failure() -> None:
    """An exception that cannot even be printed is recorded."""
    twin = JSON.decode_failure(JSON.encode_failure(Unprintable()), "k", remembered=(Exception,))

    assert isinstance(twin, Unprintable)


@pytest.mark.parametrize(
    ("message", "kept"), [("a\0b", r"a\x00b"), ("file \udcff.txt", r"file \udcff.txt"), ("Überlast 💥", "Überlast 💥")]
)
def test_description_is_text_that_every_store_can_keep(message: str, kept: str) -> None:
    """PostgreSQL keeps no NUL and no store a lone surrogate; a failure with one must still be recorded."""
    assert describe(ValueError(message)) == kept


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        (KeyError("k"), ()),
        (KeyError("k"), (ValueError,)),
        (KeyError("k"), (LookupError,)),
        (SystemExit(1), (BaseException,)),
        (KeyboardInterrupt(), (KeyboardInterrupt,)),
        (WorkerShutdown(0), (Exception, WorkerShutdown)),
    ],
)
def test_only_what_is_remembered_is_built(error: BaseException, remembered: tuple[type[BaseException], ...]) -> None:
    """Whoever can write a record chooses its type; what nobody remembers, or no task may raise, is only described."""
    twin = JSON.decode_failure(JSON.encode_failure(error), "k", remembered=remembered)

    assert type(twin) is (KeyError if remembered == (LookupError,) else ReplayedFailure)


def test_what_steers_is_never_built() -> None:
    """Neither the type itself, nor one below it, nor what a type in between makes of its arguments."""
    for module, name in (("builtins", "LookupError"), ("builtins", "KeyError"), (__name__, "Turning")):
        described = JSON.encode({"module": module, "type": name, "message": "m", "args": ["k"]})
        twin = JSON.decode_failure(described, "k", remembered=(Exception,), never=(LookupError,))
        assert isinstance(twin, ReplayedFailure)


class Turning(ValueError):
    """Becomes something else when it is built, as ``OSError`` does."""

    def __new__(cls, *args: object) -> Any:
        return ValueError.__new__(Turned, *args)


class Turned(Turning, LookupError): ...


class Metaclass(type):
    def __getattr__(cls, name: str) -> Any:
        raise AssertionError("code of a class was run")


class Descriptor:
    def __get__(self, *_: object) -> Any:
        raise AssertionError("code of a descriptor was run")


class Outer(metaclass=Metaclass):
    Inner = type("Inner", (Exception,), {})
    descriptor = Descriptor()
    instance = SimpleNamespace(Inner=ValueError)


class Module(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("code of a module was run")


@pytest.mark.parametrize(
    "name",
    ["missing", "Outer.missing", "Outer.descriptor", "Outer.instance.Inner", "Outer.Inner.args", "instance.x", ""],
)
def test_type_is_looked_up_without_running_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules and classes may compute their attributes; a record must not make them do so."""
    module = Module("hostile")
    ModuleType.__getattribute__(module, "__dict__").update(
        Outer=Outer, instance=SimpleNamespace(x=ValueError), __getattr__=lambda name: 1 / 0
    )
    monkeypatch.setitem(sys.modules, "hostile", module)

    for place, wanted in (("hostile", name), ("hostile", "Outer.Inner")):
        described = JSON.encode({"module": place, "type": wanted, "message": "m", "args": []})
        twin = JSON.decode_failure(described, "k", remembered=(Exception,))
        assert type(twin) is (Outer.Inner if wanted == "Outer.Inner" else ReplayedFailure)


def test_what_only_looks_like_a_module_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs put all kinds of objects into ``sys.modules``."""
    monkeypatch.setitem(sys.modules, "lazy", Lazy())

    described = JSON.encode({"module": "lazy", "type": "Error", "message": "m", "args": []})

    assert isinstance(JSON.decode_failure(described, "k", remembered=(Exception,)), ReplayedFailure)


class Lazy:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError("code of what is no module was run")


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        7,
        "text",
        ["builtins", "ValueError"],
        {},
        {"module": 7, "type": [], "message": {}, "args": {}},
        {"module": "builtins", "type": "ValueError", "message": "m", "args": "text"},
        {"module": "builtins", "type": "ValueError", "message": "m", "args": {"a": 1}},
        {"module": "builtins", "type": "ValueError", "message": "m", "args": None},
        {"module": None, "type": "ValueError", "args": []},
        {"module": "builtins", "args": []},
        {"module": "builtins", "type": "UnicodeDecodeError", "message": "m", "args": ["wrong"]},
    ],
)
def test_damaged_failure_is_a_failure_all_the_same(damaged: object) -> None:
    """Whatever stands in a record, the delivery fails with what can be told of it, and never with our own mistake."""
    twin = JSON.decode_failure(JSON.encode(damaged), "k", remembered=(Exception,))

    assert isinstance(twin, ReplayedFailure)
    assert str(twin).startswith("idempotency key k failed earlier with ")


def test_bytes_that_are_passed_on_as_they_are_may_be_none() -> None:
    """The encoding that encodes nothing is the only one in which nothing says nothing."""
    raw = Codec("raw", frozenset({"application/data"}))

    assert raw.decode(raw.encode(b"")) == b""


@pytest.mark.parametrize("data", ["", b""])
def test_empty_result_cannot_be_decoded(data: str | bytes) -> None:
    """No serialiser makes nothing of something; kombu would pass nothing on as the result."""
    with pytest.raises(DecodeError, match="empty"):
        JSON.decode(Encoded(data, "application/json"))


def test_redacted_failure_is_its_type_alone() -> None:
    """Neither the text of an exception nor its arguments are kept, of those that cannot be encoded no more."""
    redacting = replace(JSON, private=True)
    error = ValueError("card 4111 1111 1111 1111")

    encoded = redacting.encode_failure(error)
    twin = JSON.decode_failure(encoded, "k", remembered=(Exception,))

    assert "4111" not in f"{encoded} {redacting.summary(error)} {redacting.told(error)}"
    assert isinstance(twin, ReplayedFailure)
    assert (twin.type_name, twin.message) == ("builtins.ValueError", "")
    assert unlinked(str(twin)) == "idempotency key k failed earlier with builtins.ValueError"
    assert redacting.keep({Secretive()}).lost == "not encodable: EncodeError"


class Secretive:
    def __repr__(self) -> str:
        return "4111 1111 1111 1111"
