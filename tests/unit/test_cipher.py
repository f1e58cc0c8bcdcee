"""What a ciphertext is bound to, which keys open it, and what people are told of one that is not opened."""

from base64 import urlsafe_b64encode
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed

from celery_idempotent import PolicyError
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import ENCRYPTED, Slot, unpack
from celery_idempotent.protocol.record import Record, RecordUnreadable
from celery_idempotent.protocol.store import CommittingStore, Outbox, TransactionalStore
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.wrappers import NotDecrypted, Sealed
from celery_idempotent.testing.contract import a_record
from tests.support.scene import JSON

OLD, NEW = (urlsafe_b64encode(each * 32) for each in (b"\xb1", b"\x4e"))  # so that tests have the same names
RING = KeyRing(NEW)
SLOT = Slot("shop.charge:1:ab", "result")

TEXTS = st.text(st.characters())  # lone surrogates included, which a key, a label or the name of a step can have
SLOTS = st.builds(Slot, TEXTS, st.sampled_from(["result", "failure", "error", "label"]), TEXTS)


@given(st.binary(max_size=50), SLOTS, SLOTS)
@example(b"ch_1", SLOT, replace(SLOT, key="shop.charge:1:cd"))
@example(b"ch_1", SLOT, replace(SLOT, field="failure"))
@example(b"ch_1", SLOT, replace(SLOT, step="charge"))
def test_what_was_encrypted_is_decrypted_in_its_place_alone(clear: bytes, slot: Slot, other: Slot) -> None:
    """Not in another record, not in another field of it, and not as the result of another step."""
    assert RING.decrypt(RING.encrypt(clear, slot), slot) == clear
    assume(slot != other)
    with pytest.raises(NotDecrypted, match="moved it here from another"):
        RING.decrypt(RING.encrypt(clear, slot), other)


@given(st.binary(max_size=50), st.data())
def test_what_was_changed_or_cut_is_not_decrypted(clear: bytes, data: st.DataObject) -> None:
    """Any bit of it, also of the nonce, of the version and of the name of the key; at either end."""
    sealed = RING.encrypt(clear, SLOT)
    place, bit = data.draw(st.integers(0, len(sealed) - 1)), 1 << data.draw(st.integers(0, 7))
    changed = bytes([*sealed[:place], sealed[place] ^ bit, *sealed[place + 1 :]])

    for each in (changed, sealed[:place], sealed[len(sealed) - place :]):
        with pytest.raises(NotDecrypted):
            RING.decrypt(each, SLOT)


def test_form_is_frozen_and_tells_its_version_and_no_two_ciphertexts_are_equal() -> None:
    """Records outlive the code that wrote them; who reads the store cannot tell that two results are one."""
    sealed = bytes.fromhex("0147763655000102030405060708090a0b8ff20061056052429511eef35ad0d7af03d44113")
    assert RING.decrypt(sealed, SLOT) == b"ch_1"
    with pytest.raises(NotDecrypted, match="a newer version"):
        RING.decrypt(b"\x02" + sealed[1:], SLOT)
    assert len({RING.encrypt(b"ch_1", SLOT) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("form", [bytes, bytes.decode, lambda key: key + b"\n", lambda key: [key], lambda key: (key,)])
def test_key_is_text_or_bytes_alone_or_in_a_list(form: Any) -> None:
    """As a setting, a variable of the environment or a file of a secret has it."""
    assert KeyRing(form(NEW)).decrypt(RING.encrypt(b"ch_1", SLOT), SLOT) == b"ch_1"


def test_first_key_encrypts_and_all_decrypt() -> None:
    """As with MultiFernet, whose keys these are; no key is shown."""
    before, during, after = KeyRing(OLD), KeyRing([NEW, OLD]), KeyRing([NEW])
    assert not [each for each in (OLD, NEW) if each.decode() in repr(during)]

    assert during.decrypt(before.encrypt(b"old", SLOT), SLOT) == b"old"
    assert after.decrypt(during.encrypt(b"new", SLOT), SLOT) == b"new"
    with pytest.raises(NotDecrypted, match="add that key to the end of idempotency_cipher"):
        before.decrypt(during.encrypt(b"new", SLOT), SLOT)


BAD: list[Any] = [[], "", OLD[:-1], OLD.replace(OLD[:1], b"+"), "é" * 44, "\ud800" * 44, 7, [NEW, None], {NEW: OLD}]


@pytest.mark.parametrize("keys", BAD)
def test_bad_key_is_refused_and_not_shown(keys: Any) -> None:
    """Neither in the error, nor in what it came from, which a traceback would show; of several it says which one."""
    with pytest.raises(PolicyError) as refused:
        KeyRing(keys)

    told = str(refused.value)
    assert (refused.value.option, refused.value.__cause__) == ("idempotency_cipher", None)
    assert ("key 2 is not 32 bytes" in told) is (isinstance(keys, list) and bool(keys))
    assert not [each for each in (OLD, NEW) if each[:8].decode() in told]


SEALED: Any = Sealed(MemoryStore(), RING)


def _unpacked(encoded: Encoded, slot: Slot = SLOT) -> Encoded:
    return unpack(SEALED, encoded, slot)


@pytest.mark.parametrize(("serializer", "value"), [("pickle", {1, 2}), ("yaml", ["é"]), ("json", "\ud800")])
def test_what_every_serialiser_gives_can_be_encrypted(serializer: str, value: Any) -> None:
    """Whether it is text or bytes, and with the content type that is accepted or not."""
    encoded = Codec(serializer, frozenset()).encode(value)

    packed = SEALED.pack(encoded, SLOT).encoded
    assert packed.content_type == ENCRYPTED
    assert _unpacked(packed) == encoded


def test_what_is_not_encrypted_here_is_told_apart() -> None:
    """A clear result from before the keys is read; a codec takes what is encrypted for no result; a key is missed."""
    seven = Encoded("7", "application/json")
    packed = SEALED.pack(seven, SLOT).encoded
    assert _unpacked(seven) is seven
    with pytest.raises(ContentDisallowed):
        JSON.decode(packed)
    with pytest.raises(RecordUnreadable, match="set idempotency_cipher"):
        unpack(MemoryStore(), packed, SLOT)


@pytest.mark.parametrize("data", ["text", b"", b"\x01"])
@pytest.mark.parametrize(("step", "named"), [("", "the result of"), ("charge", "the result of step 'charge' of")])
def test_damaged_result_is_refused_by_its_name(data: str | bytes, step: str, named: str) -> None:
    """Whatever somebody has written under that content type; an operator has to find it."""
    with pytest.raises(RecordUnreadable, match=f"decrypting {named} shop.charge:1:ab failed: it is damaged"):
        _unpacked(Encoded(data, ENCRYPTED), replace(SLOT, step=step))


def _kept(**changes: Any) -> tuple[Record, Record]:
    """What is stored of such a record, and what is read of it."""
    store = MemoryStore()
    sealed = Sealed(store, RING)
    sealed.swap(a_record().but(**changes), None)
    return next(store.scan()), next(sealed.scan())


@given(TEXTS)
def test_label_reads_back_and_has_room_in_every_store(label: str) -> None:
    """255 characters; a longer one is cut before it is encrypted, and an empty one says nothing."""
    kept, read = _kept(label=label)

    assert len(kept.label) <= 255
    assert kept.label.startswith("encrypted:") is bool(label)
    assert read.label == label or (len(label.encode("utf-8", "surrogatepass")) > 150 and read.label.endswith("…"))
    assert [len(_kept(label="é" * count)[1].label) for count in (75, 76)] == [75, 74]  # cut between characters


@given(TEXTS | st.sampled_from(["encrypted:", "encrypted:AAAA", "encrypted:é", "encrypted:A", "encrypted:\ud800"]))
def test_every_other_text_reads_back(text: str) -> None:
    """Why there is no result, of the operation and of a step, and in the verdict; also what looks encrypted."""
    texts = {"error": text, "verdict": {"action": "completed", "error": text}, "steps": {"pay": {"lost": text}}}
    kept, read = _kept(**texts)

    assert (read.error, read.verdict, read.steps) == (text, texts["verdict"], texts["steps"])
    if text:
        assert all(str(each).startswith("encrypted:") for each in (kept.error, kept.verdict["error"]))
        assert kept.error != text


def test_text_that_cannot_be_read_is_written_back_as_it_is() -> None:
    """By whoever has another key."""
    kept, _ = _kept(label="acme", error="card 4711", steps={"pay": {"lost": "card 4712"}}, verdict={"error": "4713"})
    store = MemoryStore()
    store.swap(kept, None)
    other = Sealed(store, KeyRing(OLD))
    assert [*other.scan()] == [kept]
    assert other.swap(kept.but(revision="again"), kept.revision) == kept.but(revision="again")
    assert [*store.scan()] == [kept.but(revision="again")]
    assert Sealed(store, RING).reveal(kept).steps == {"pay": {"lost": "card 4712"}}


def test_everything_that_a_store_can_do_can_be_done_with_one_around_it() -> None:
    """And nothing that it cannot, which holds of a copy as well."""
    assert isinstance(SEALED, CommittingStore)
    assert not [each for each in (SEALED, copy(SEALED)) if isinstance(each, TransactionalStore | Outbox)]
