"""Outcomes to bytes and back."""
# mypy: allow-untyped-decorators

import sys
from datetime import datetime
from decimal import Decimal
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from celery.exceptions import WorkerShutdown
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import serialization
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError
from kombu.utils import json as kombus_json

from celery_idempotent.errors import ReplayedFailure
from celery_idempotent.protocol.codec import Codec, Encoded, describe
from tests.support.scene import raising

JSON = Codec("json", frozenset({"application/json"}))
PICKLE = Codec("pickle", frozenset({"application/x-python-serialize"}))

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
RICH = PLAIN | st.datetimes() | st.decimals(allow_nan=False) | st.uuids() | st.binary()
VALUES = st.recursive(
    RICH, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner), max_leaves=8
)


@given(VALUES)
@example({"__type__": "decimal", "__value__": "1"})
@example({"when": datetime(2027, 1, 2, 3, 4), "much": Decimal("1.10"), "who": UUID(int=7), "raw": b"\xff"})
def test_json_is_written_and_read_as_kombu_does(value: object) -> None:
    """The short way of plain JSON and that of kombu are one format, which older versions have written."""
    content_type, _, data = serialization.dumps(value, "json")
    assert JSON.encode(value) == Encoded(data, content_type)
    theirs = serialization.loads(data, content_type, "utf-8", accept={content_type})
    for form in (data, data.encode(), data.replace("_", "\\u005f"), f" {data} "):
        assert repr(JSON.decode(Encoded(form, content_type))) == repr(theirs)


def test_plain_json_does_without_kombu(monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu's way takes three times as long, at each end of every task; what is written is legible in a console."""
    monkeypatch.setattr(serialization, "dumps", None)
    monkeypatch.setattr(serialization, "loads", None)
    encoded = JSON.encode({"id": 1})
    assert (encoded, JSON.decode(encoded)) == (Encoded('{"id": 1}', "application/json"), {"id": 1})


@pytest.mark.parametrize("replaced", ["encoder", "decoder"])
def test_json_of_the_users_own_is_used(replaced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever registers another serialiser as json means it for results, too."""
    theirs = serialization.registry.__class__()
    encoder = (lambda value: '"theirs"') if replaced == "encoder" else kombus_json.dumps
    decoder = (lambda data: "theirs") if replaced == "decoder" else kombus_json.loads
    theirs.register("json", encoder, decoder, content_type="application/json", content_encoding="utf-8")
    monkeypatch.setattr(serialization.registry, "_encoders", theirs._encoders)
    monkeypatch.setattr(serialization.registry, "_decoders", theirs._decoders)
    assert JSON.decode(JSON.encode("ours")) == "theirs"


def test_pickle_is_decoded_only_where_it_is_accepted() -> None:
    """It is bytes."""
    encoded = PICKLE.encode({1, 2})
    assert (type(encoded.data), PICKLE.decode(encoded)) == (bytes, {1, 2})
    with pytest.raises(ContentDisallowed):
        JSON.decode(encoded)


def test_text_that_is_no_utf8_is_an_error() -> None:
    """Of a serialiser that writes any text as it is: a store would refuse all of the outcome for it."""
    serialization.register("any text", str, str, "text/any", "utf-8")
    codec = Codec("any text", frozenset())
    assert codec.encode("Zoë 💥").data == "Zoë 💥"
    with pytest.raises(EncodeError, match="half of a surrogate pair"):
        codec.encode("Zoë \ud83d")


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [object(), ENDLESS, DEEP], ids=type)
def test_unencodable_value_is_an_error(value: object) -> None:
    """The caller decides what an unencodable result means; as the effect has happened, to keep it raises nothing."""
    with pytest.raises(EncodeError):
        JSON.encode(value)
    kept = JSON.keep(value)
    assert (kept.encoded, kept.value is value) == (None, True)
    assert str(kept.lost).startswith("not encodable: ")


@pytest.mark.parametrize("data", ["[1", "1 2", "[" * 100_000, "", b""], ids=["torn", "two", "deep", "empty", "bytes"])
def test_undecodable_result_is_an_error(data: str | bytes) -> None:
    """No serialiser makes nothing of something, save the one that encodes nothing; kombu would pass nothing on."""
    with pytest.raises(DecodeError):
        JSON.decode(Encoded(data, "application/json"))
    raw = Codec("raw", frozenset({"application/data"}))
    assert raw.decode(raw.encode(b"")) == b""


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: object, again: bool = False) -> None:
        super().__init__(f"the bank says {code}")
        self.code = code


class Named(Exception):
    """Has what it was given, as most do."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code, self._reason = code, reason


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def _changed(error: Exception, **attributes: object) -> Exception:
    vars(error).update(attributes)
    return error


def _replayed(error: BaseException, codec: Codec = JSON, remembered: Any = (Exception,), **options: Any) -> Exception:
    return codec.decode_failure(codec.encode_failure(error), "k", remembered=remembered, **options)


@given(
    st.sampled_from([ValueError, KeyError, EncodeError, LookupError]),
    st.lists(st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=3),
)
def test_failure_of_plain_arguments_is_rebuilt(kind: type[Exception], args: list[object]) -> None:
    """Built-in and imported exceptions come back with their type and arguments."""
    twin = _replayed(kind(*args))
    assert (type(twin), twin.args) == (kind, tuple(args))


@pytest.mark.parametrize(
    ("error", "codec", "is_rebuilt"),
    [
        (Named(5, "r"), JSON, True),
        (FileNotFoundError(2, "no"), JSON, True),
        (_changed(Named(6), _tracers_span=object(), __notes__=["seen by a tracer"]), JSON, True),
        (Unprintable(), JSON, True),
        (ValueError((1, 2)), PICKLE, True),
        (ValueError((1, 2)), JSON, False),
        (type("Unknown", (Exception,), {})("x"), JSON, False),
        (ValueError(object()), JSON, False),
        (ValueError("x" * 60_000), JSON, False),
        (Slotted(5), JSON, False),
        (_changed(Named(5), code=6), JSON, False),
        (_changed(Named(5), _reason="another"), JSON, False),
        (_changed(Named(5), more=1), JSON, False),
        (FileNotFoundError(2, "no such file", "name.txt"), JSON, False),
    ],
)
def test_failure_is_rebuilt_only_as_an_equal_one(error: Exception, codec: Codec, is_rebuilt: bool) -> None:
    """Where type, arguments or attributes do not allow it, the replay names the type and the message."""
    twin = _replayed(error, codec)
    if is_rebuilt:
        assert (type(twin), twin.args) == (type(error), error.args)
    else:
        assert isinstance(twin, ReplayedFailure)
        assert twin.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
        assert str(error).startswith(twin.message) is bool(twin.message)


def test_group_is_described_with_all_of_its_members() -> None:
    """Its own text only counts them."""
    twin = _replayed(ExceptionGroup("two", [ValueError("a"), ExceptionGroup("", [KeyError("b")])]))
    assert isinstance(twin, ReplayedFailure)
    assert twin.message == "two (2 sub-exceptions); ValueError: a; KeyError: 'b'"


@pytest.mark.parametrize(
    ("message", "kept"), [("a\0b", r"a\x00b"), ("file \udcff.txt", r"file \udcff.txt"), ("Überlast 💥", "Überlast 💥")]
)
def test_description_is_text_that_every_store_can_keep(message: str, kept: str) -> None:
    """PostgreSQL keeps no NUL and no store a lone surrogate; a failure with one must still be recorded."""
    assert describe(ValueError(message)) == kept


class Turning(ValueError):
    """Becomes something else when it is built, as ``OSError`` does."""

    def __new__(cls, *args: object) -> Any:
        return ValueError.__new__(Turned, *args)


class Turned(Turning, LookupError): ...


@pytest.mark.parametrize(
    ("error", "remembered", "never", "is_built"),
    [
        (KeyError("k"), (LookupError,), (), True),
        (KeyError("k"), (ValueError,), (), False),
        (KeyError("k"), (Exception,), (LookupError,), False),
        (Turning("k"), (Exception,), (LookupError,), False),
        (SystemExit(1), (BaseException,), (), False),
        (WorkerShutdown(0), (Exception, WorkerShutdown), (), False),
    ],
)
def test_only_what_is_remembered_and_steers_nobody_is_built(
    error: BaseException, remembered: Any, never: Any, is_built: bool
) -> None:
    """Whoever can write a record chooses its type; what no task may raise is only described."""
    kind = Turning if isinstance(error, Turning) else type(error)
    described = JSON.encode({"module": kind.__module__, "type": kind.__name__, "message": "m", "args": ["k"]})
    twin = JSON.decode_failure(described, "k", remembered=remembered, never=never)
    assert type(twin) is (kind if is_built else ReplayedFailure)


_RUN = raising(AssertionError("code of a module, a class or a descriptor was run"))
Module = type("Module", (ModuleType,), {"__getattribute__": _RUN})


class Metaclass(type):
    __getattr__ = _RUN


class Outer(metaclass=Metaclass):
    Inner = type("Inner", (Exception,), {})
    descriptor = type("Descriptor", (), {"__get__": _RUN})()
    instance = SimpleNamespace(Inner=ValueError)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("hostile", name) for name in ("Outer.Inner", "missing", "Outer.missing", "Outer.descriptor", "instance.x")),
        *(("hostile", name) for name in ("Outer.instance.Inner", "Outer.Inner.args", "")),
        *(("builtins", name) for name in ("dict", "nothing.here")),
        *(("os", "system"), ("antigravity", "x"), ("lazy", "Error")),
    ],
)
def test_type_is_looked_up_without_running_code(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported for it, and modules and classes may compute their attributes: a record makes none do so."""
    hostile = Module("hostile")
    names = {"Outer": Outer, "instance": SimpleNamespace(x=ValueError), "__getattr__": lambda name: 1 / 0}
    ModuleType.__getattribute__(hostile, "__dict__").update(names)
    monkeypatch.setitem(sys.modules, "hostile", hostile)
    monkeypatch.setitem(sys.modules, "lazy", Outer)  # programs put all kinds of objects there
    described = JSON.encode({"module": module, "type": name, "message": "m", "args": []})
    twin = JSON.decode_failure(described, "k", remembered=(Exception,))
    assert type(twin) is (Outer.Inner if name == "Outer.Inner" else ReplayedFailure)
    assert "antigravity" not in sys.modules


ANYTHING = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=2), max_leaves=3)


@given(
    ANYTHING
    | st.fixed_dictionaries(
        {}, optional={"module": ANYTHING | st.just("builtins"), "type": ANYTHING, "message": ANYTHING, "args": ANYTHING}
    )
)
@example({"module": "builtins", "type": "ValueError", "message": "m", "args": "text"})
@example({"module": "builtins", "type": "UnicodeDecodeError", "message": "m", "args": ["wrong"]})
@example({"module": "builtins", "type": "ValueError", "message": "m", "args": None})
def test_damaged_failure_is_a_failure_all_the_same(damaged: object) -> None:
    """Whatever stands in a record, the delivery fails with what can be told of it, and never with our own mistake."""
    for encoded in (JSON.encode(damaged), None):
        assert isinstance(JSON.decode_failure(encoded, "k", remembered=(Exception,)), ReplayedFailure)


def test_redacted_failure_is_its_type_alone() -> None:
    """Neither the text of an exception nor its arguments are kept, of those that cannot be encoded no more."""
    redacting, error = JSON._replace(private=True), ValueError("card 4111 1111 1111 1111")
    twin = _replayed(error, redacting)
    assert "4111" not in f"{redacting.encode_failure(error)} {redacting.summary(error)} {redacting.told(error)}"
    assert isinstance(twin, ReplayedFailure)
    assert (twin.type_name, twin.message) == ("builtins.ValueError", "")
    assert redacting.keep({"4111 1111 1111 1111"}).lost == "not encodable: EncodeError"
