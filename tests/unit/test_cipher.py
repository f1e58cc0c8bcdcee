"""What a ciphertext is bound to, which keys open it, and what people are told of one that is not opened."""

import json
from base64 import urlsafe_b64encode
from dataclasses import replace
from typing import Any

import pytest
from cryptography.fernet import Fernet, MultiFernet
from hypothesis import assume, given
from hypothesis import strategies as st
from kombu import serialization
from kombu.exceptions import ContentDisallowed

from celery_idempotent import PolicyError
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.protocol.cipher import (
    SEALED,
    NotOpened,
    Slot,
    error_slot,
    hidden,
    hidden_label,
    is_hidden,
    label_slot,
    legible,
    shown,
)
from celery_idempotent.protocol.codec import Codec, Encoded, failure_slot, result_slot
from celery_idempotent.protocol.record import RecordUnreadable
from celery_idempotent.testing.contract import a_record

OLD, NEW = (urlsafe_b64encode(each * 32) for each in (b"\xb1", b"\x4e"))
"""The same in each process, so that tests have the same names."""
RING = KeyRing(NEW)
CODEC = Codec("json", frozenset({"application/json"}), cipher=RING)
SLOT = Slot("shop.charge:1:ab", "result")

TEXTS = st.text(st.characters())
"""Lone surrogates included, which a key, a label or the name of a step can have."""

SLOTS = st.builds(Slot, TEXTS, st.sampled_from(["result", "failure", "error", "label"]), TEXTS)


@given(st.binary(), SLOTS)
def test_what_was_sealed_is_opened(clear: bytes, slot: Slot) -> None:
    """Whatever it is, and wherever it belongs."""
    assert RING.open(RING.seal(clear, slot), slot) == clear


@given(SLOTS, SLOTS)
def test_what_was_sealed_is_opened_nowhere_else(slot: Slot, other: Slot) -> None:
    """Not in another record, not in another field of it, and not as the result of another step."""
    assume(slot != other)

    with pytest.raises(NotOpened, match="moved it here from another"):
        RING.open(RING.seal(b"ch_1", slot), other)


@pytest.mark.parametrize(
    "other",
    [replace(SLOT, key="shop.charge:1:cd"), replace(SLOT, field="failure"), replace(SLOT, step="charge")],
    ids=["record", "field", "step"],
)
def test_each_part_of_a_slot_counts(other: Slot) -> None:
    """As an attacker would move it: one part changed, all others the same."""
    with pytest.raises(NotOpened, match="moved it here from another"):
        RING.open(RING.seal(b"ch_1", SLOT), other)


@given(st.binary(max_size=50), st.data())
def test_what_was_changed_is_not_opened(clear: bytes, data: st.DataObject) -> None:
    """Any bit of it: also of the nonce, of the version and of the name of the key."""
    sealed = bytearray(RING.seal(clear, SLOT))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(NotOpened):
        RING.open(bytes(sealed), SLOT)


@given(st.binary(max_size=50), st.data())
def test_what_was_cut_is_not_opened(clear: bytes, data: st.DataObject) -> None:
    """At either end."""
    sealed = RING.seal(clear, SLOT)
    length = data.draw(st.integers(0, len(sealed) - 1))

    for cut in (sealed[:length], sealed[len(sealed) - length :]):
        with pytest.raises(NotOpened):
            RING.open(cut, SLOT)


def test_what_an_earlier_release_has_sealed_is_opened() -> None:
    """Records outlive the code that wrote them: neither the form nor how keys are derived may change."""
    sealed = bytes.fromhex("0147763655000102030405060708090a0b8ff20061056052429511eef35ad0d7af03d44113")
    assert RING.open(sealed, SLOT) == b"ch_1"


def test_nonce_is_fresh_each_time() -> None:
    """Who reads the store cannot tell whether two operations have one result."""
    assert len({RING.seal(b"ch_1", SLOT) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("form", [bytes, bytes.decode, lambda key: key + b"\n", lambda key: [key], lambda key: (key,)])
def test_key_is_text_or_bytes_alone_or_in_a_list(form: Any) -> None:
    """As a setting, a variable of the environment or a file of a secret has it."""
    assert KeyRing(form(NEW)).open(RING.seal(b"ch_1", SLOT), SLOT) == b"ch_1"


def test_first_key_encrypts_and_all_decrypt() -> None:
    """As with MultiFernet, whose keys these are."""
    before, during, after = KeyRing(OLD), KeyRing([NEW, OLD]), KeyRing([NEW])
    assert MultiFernet([Fernet(NEW), Fernet(OLD)])

    assert during.open(before.seal(b"old", SLOT), SLOT) == b"old"
    assert after.open(during.seal(b"new", SLOT), SLOT) == b"new"
    with pytest.raises(NotOpened, match="add that key to the end of idempotency_cipher"):
        before.open(during.seal(b"new", SLOT), SLOT)


def test_key_that_was_given_twice_counts_once() -> None:
    """A rotation that was written by hand may leave one behind."""
    assert repr(KeyRing([NEW, NEW])) == repr(KeyRing([NEW]))


@pytest.mark.parametrize(
    "keys",
    [
        [],
        "",
        b"",
        "secret",
        OLD[:-1],
        OLD[:20],
        OLD + OLD,
        OLD.replace(OLD[:1], b"+"),
        "é" * 44,
        "\ud800" * 44,
        7,
        object(),
        [NEW, None],
        [NEW, "secret"],
        {NEW: OLD},
    ],
)
def test_bad_key_is_refused_and_not_shown(keys: Any) -> None:
    """Neither in the error, nor in what it came from, which a traceback would show."""
    with pytest.raises(PolicyError) as refused:
        KeyRing(keys)

    assert refused.value.option == "idempotency_cipher"
    assert refused.value.__cause__ is None
    if isinstance(keys, list) and keys:
        assert "key 2 is not 32 bytes" in str(refused.value)  # which one, as it is not shown
    for each in (OLD, NEW):
        assert each[:8].decode() not in str(refused.value)


def test_ring_does_not_show_its_keys() -> None:
    """It tells only by which names errors call them."""
    (name,) = repr(RING).removeprefix("KeyRing(").removesuffix(")").split(", ")

    assert NEW.decode() not in repr(RING)
    with pytest.raises(NotOpened, match=name):
        RING.open(RING.seal(b"", SLOT), replace(SLOT, key="other"))


def test_newer_form_is_told() -> None:
    """The first byte says by which rules it was made."""
    with pytest.raises(NotOpened, match="a newer version"):
        RING.open(b"\x02" + RING.seal(b"", SLOT)[1:], SLOT)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)


@given(JSONS)
def test_result_reads_back(value: Any) -> None:
    """Every value, as without a cipher."""
    assert CODEC.decode(CODEC.encode(value, SLOT), SLOT) == value


@pytest.mark.parametrize(("serializer", "value"), [("pickle", {1, 2}), ("yaml", ["é"]), ("json", "\ud800")])
def test_every_serialiser_can_be_encrypted(serializer: str, value: Any) -> None:
    """Whether it gives text or bytes, and under the accept list of what is inside."""
    inside = frozenset({"application/json", "application/x-python-serialize", "application/x-yaml"})
    codec = Codec(serializer, inside, cipher=RING)
    encoded = codec.encode(value, SLOT)

    assert encoded.content_type == SEALED
    assert codec.decode(encoded, SLOT) == value
    if serializer != "json":
        with pytest.raises(ContentDisallowed):
            CODEC.decode(encoded, SLOT)


def test_version_that_does_not_know_it_refuses_it() -> None:
    """It takes nothing for a result that it cannot read: of this content type it has never heard."""
    encoded = CODEC.encode(7, SLOT)

    with pytest.raises(ContentDisallowed):
        serialization.loads(encoded.data, encoded.content_type, "binary", accept={"application/json"})


def test_clear_result_from_before_is_read() -> None:
    """An app that begins to encrypt has records."""
    assert CODEC.decode(Encoded("7", "application/json"), SLOT) == 7


@pytest.mark.parametrize("data", ["text", b"", b"\x01"])
def test_damaged_result_is_refused(data: str | bytes) -> None:
    """Whatever somebody has written under that content type."""
    with pytest.raises(RecordUnreadable, match="decrypting the result of shop.charge:1:ab failed: it is damaged"):
        CODEC.decode(Encoded(data, SEALED), SLOT)


def test_result_of_a_step_is_named() -> None:
    """An operator has to find it."""
    with pytest.raises(RecordUnreadable, match="the result of step 'charge' of shop.charge:1:ab"):
        CODEC.decode(Encoded(b"", SEALED), replace(SLOT, step="charge"))


def test_without_a_key_the_setting_is_named() -> None:
    """The remedy is a setting of the worker that met it."""
    with pytest.raises(RecordUnreadable, match="set idempotency_cipher"):
        replace(CODEC, cipher=None).decode(CODEC.encode(7, SLOT), SLOT)


def test_failure_is_not_taken_for_a_result() -> None:
    """Who can write the store can change the status of a record; that makes its failure no result."""
    failure = CODEC.encode_failure(ValueError("card 4711"), "k")

    assert isinstance(CODEC.decode_failure(failure, "k", remembered=(ValueError,)), ValueError)
    with pytest.raises(RecordUnreadable):
        CODEC.decode(failure, result_slot("k"))
    with pytest.raises(RecordUnreadable):
        CODEC.decode_failure(CODEC.encode({}, result_slot("k")), "k")
    assert failure_slot("k") != result_slot("k")


def test_limit_of_a_result_is_about_what_the_author_returns() -> None:
    """Not about what encryption adds; and of what is not kept, nothing is encrypted either."""
    exact = len(json.dumps("x" * 100))

    assert replace(CODEC, max_result=exact).keep_outcome("x" * 100, "k").encoded is not None
    assert replace(CODEC, max_result=exact - 1).keep_outcome("x" * 100, "k").lost == f"{exact} bytes, over {exact - 1}"
    kept = replace(CODEC, private=True).keep_outcome("ch_1", "k")
    assert kept.value == "ch_1"
    assert kept.encoded is not None
    assert CODEC.decode(kept.encoded, result_slot("k")) is None


class Secretive:
    def __repr__(self) -> str:
        return "card 4711"


def test_why_a_result_was_lost_is_encrypted() -> None:
    """Serialisers quote what they cannot encode."""
    clear = replace(CODEC, cipher=None).keep_outcome({Secretive(): 1}, "k").lost
    lost = CODEC.keep_outcome({Secretive(): 1}, "k").lost

    assert clear is not None
    assert lost is not None
    assert is_hidden(lost)
    assert shown(RING, lost, Slot("k", "error")) == clear


@given(TEXTS)
def test_text_reads_back(text: str) -> None:
    """An empty one stays empty, and says nothing."""
    kept = hidden(RING, text, SLOT)

    assert shown(RING, kept, SLOT) == text
    assert is_hidden(kept) is bool(text)


@pytest.mark.parametrize("kept", ["encrypted:", "encrypted:AAAA", "encrypted:é", "encrypted:A", "encrypted:\ud800"])
def test_damaged_text_is_said_to_be_encrypted(kept: str) -> None:
    """People see that there is something, and not what somebody wrote there."""
    assert shown(RING, kept, SLOT) == "(encrypted)"


def test_text_without_a_key_is_said_to_be_encrypted() -> None:
    """Neither its ciphertext, nor nothing."""
    assert shown(None, hidden(RING, "card 4711", SLOT), SLOT) == "(encrypted)"


@given(TEXTS)
def test_label_has_room_in_every_store(label: str) -> None:
    """255 characters; a longer one is cut before it is encrypted."""
    kept = hidden_label(RING, label, "k")
    read = shown(RING, kept, label_slot("k"))

    assert len(kept) <= 255
    assert read == label or (len(label.encode("utf-8", "surrogatepass")) > 150 and read.endswith("…"))


def test_longest_label_is_cut_between_characters() -> None:
    """One of many bytes is kept whole or not at all."""
    assert shown(RING, hidden_label(RING, "é" * 76, "k"), label_slot("k")) == f"{'é' * 73}…"
    assert shown(RING, hidden_label(RING, "é" * 75, "k"), label_slot("k")) == "é" * 75


def test_clear_label_that_looks_encrypted_is_marked() -> None:
    """Or whoever chooses an argument could keep its operation from running again."""
    kept = hidden_label(None, "encrypted:" + "x" * 245, "k")

    assert not is_hidden(kept)
    assert kept == "(encrypted:" + "x" * 244
    assert hidden_label(None, "o-1", "k") == "o-1"


def test_verdict_is_legible_where_nothing_else_is_encrypted() -> None:
    """It has a copy of the error that was judged."""
    judged = hidden(RING, "card 4711", error_slot("k"))
    record = a_record().but(key="k", verdict={"action": "completed", "error": judged})
    assert (record.label, record.error) == ("acme/1001", None)

    assert legible(RING, record).verdict["error"] == "card 4711"
