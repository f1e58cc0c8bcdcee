"""Outcomes to bytes and back."""

import pytest
from kombu.exceptions import ContentDisallowed, EncodeError

from celery_idempotent.codec import Codec, Encoded, describe
from celery_idempotent.errors import ReplayedFailure

JSON = Codec("json", frozenset({"application/json"}))


class Awkward(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_json_is_text_that_a_person_can_read() -> None:
    """In the console of a store a JSON result is legible."""
    assert JSON.encode({"id": 1}) == Encoded('{"id": 1}', "application/json")


def test_binary_formats_round_trip() -> None:
    """Pickle is bytes, and decoded only where it is accepted."""
    pickle = Codec("pickle", frozenset({"application/x-python-serialize"}))
    encoded = pickle.encode({1, 2})

    assert isinstance(encoded.data, bytes)
    assert pickle.decode(encoded) == {1, 2}
    with pytest.raises(ContentDisallowed):
        JSON.decode(encoded)


def test_unencodable_value_is_an_error() -> None:
    """The caller decides what an unencodable result means."""
    with pytest.raises(EncodeError):
        JSON.encode(object())


def test_failure_is_rebuilt_with_type_and_arguments() -> None:
    """Built-in and imported exceptions come back equal."""
    for error in (ValueError("a", 1), KeyError("k"), EncodeError("x")):
        twin = JSON.decode_failure(JSON.encode_failure(error), "k")
        assert type(twin) is type(error)
        assert twin.args == error.args


@pytest.mark.parametrize(
    "error",
    [Awkward(5, reason="r"), type("Unknown", (Exception,), {})("x"), ValueError(object()), ValueError("x" * 60_000)],
)
def test_failure_that_cannot_be_rebuilt_is_described(error: Exception) -> None:
    """Where type or arguments do not allow it, the replay names the type and the message."""
    twin = JSON.decode_failure(JSON.encode_failure(error), "k")

    assert isinstance(twin, ReplayedFailure)
    assert twin.type_name == f"{type(error).__module__}.{type(error).__qualname__}"
    assert str(error).startswith(twin.message)


def test_failure_of_another_kind_is_never_built() -> None:
    """Only exception types are called, whatever a tampered record names; nothing is imported for it."""
    for module, name in (("os", "system"), ("builtins", "dict"), ("antigravity", "x"), ("builtins", "nothing.here")):
        tampered = JSON.encode({"module": module, "type": name, "message": "m", "args": ["true"]})
        assert isinstance(JSON.decode_failure(tampered, "k"), ReplayedFailure)


def test_failure_without_a_record_is_described() -> None:
    """A failure whose description was lost is still a failure."""
    assert isinstance(JSON.decode_failure(None, "k"), ReplayedFailure)


def test_broken_exception_does_not_hide_the_failure() -> None:
    """An exception that cannot even be printed is recorded."""
    twin = JSON.decode_failure(JSON.encode_failure(Unprintable()), "k")

    assert isinstance(twin, Unprintable)


@pytest.mark.parametrize(
    ("message", "kept"), [("a\0b", r"a\x00b"), ("file \udcff.txt", r"file \udcff.txt"), ("Überlast 💥", "Überlast 💥")]
)
def test_description_is_text_that_every_store_can_keep(message: str, kept: str) -> None:
    """PostgreSQL keeps no NUL and no store a lone surrogate; a failure with one must still be recorded."""
    assert describe(ValueError(message)) == kept
