"""What is encrypted or not kept at all, what people see of it, and what happens without the key or after tampering."""

import json
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from celery import Celery
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu.exceptions import ContentDisallowed

from celery_idempotent import Policy, PolicyError, ReplayedFailure, Status, current_attempt, resolve
from celery_idempotent.engine.search import Filter, find, look_up
from celery_idempotent.errors import InFlight, OutcomeUnknown
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import ENCRYPTED, Slot, reveal, unpack
from celery_idempotent.protocol.record import Record, RecordUnreadable
from celery_idempotent.protocol.store import CommittingStore, Outbox, TransactionalStore
from celery_idempotent.stores.keyring import KeyRing
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.wrappers import NotDecrypted, Sealed
from celery_idempotent.testing.contract import a_record
from tests.support import deliveries
from tests.support.commands import run
from tests.support.deliveries import Ended
from tests.support.objects import large_results
from tests.support.scene import JSON, raising
from tests.support.web import a_page, a_program, text_of

OLD, NEW = (urlsafe_b64encode(each * 32).decode() for each in (b"\xb1", b"\x4e"))  # so that tests have the same names
RING = KeyRing(NEW)
SLOT = Slot("shop.charge:1:ab", "result")

TEXTS = st.text(st.characters())  # lone surrogates included, which a key, a label or the name of a step can have
SLOTS = st.builds(Slot, TEXTS, st.sampled_from(["result", "failure", "error", "label"]), TEXTS)


@given(st.binary(max_size=50), SLOTS, SLOTS)
@example(b"ch_1", SLOT, SLOT._replace(key="shop.charge:1:cd"))
@example(b"ch_1", SLOT, SLOT._replace(field="failure"))
@example(b"ch_1", SLOT, SLOT._replace(step="charge"))
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


@pytest.mark.parametrize("form", [str, str.encode, lambda key: key + "\n", lambda key: [key], lambda key: (key,)])
def test_key_is_text_or_bytes_alone_or_in_a_list(form: Any) -> None:
    """As a setting, a variable of the environment or a file of a secret has it."""
    assert KeyRing(form(NEW)).decrypt(RING.encrypt(b"ch_1", SLOT), SLOT) == b"ch_1"


def test_first_key_encrypts_and_all_decrypt() -> None:
    """As with MultiFernet, whose keys these are; no key is shown."""
    before, during, after = KeyRing(OLD), KeyRing([NEW, OLD]), KeyRing([NEW])
    assert not [each for each in (OLD, NEW) if each in repr(during)]
    assert during.decrypt(before.encrypt(b"old", SLOT), SLOT) == b"old"
    assert after.decrypt(during.encrypt(b"new", SLOT), SLOT) == b"new"
    with pytest.raises(NotDecrypted, match="add that key to the end of idempotency_cipher"):
        before.decrypt(during.encrypt(b"new", SLOT), SLOT)


BAD: list[Any] = [[], "", OLD[:-1], OLD.replace(OLD[:1], "+"), "é" * 44, "\ud800" * 44, 7, [NEW, None], {NEW: OLD}]


@pytest.mark.parametrize("keys", BAD)
def test_bad_key_is_refused_and_not_shown(keys: Any) -> None:
    """Neither in the error, nor in what it came from, which a traceback would show; of several it says which one."""
    with pytest.raises(PolicyError) as refused:
        KeyRing(keys)
    told = str(refused.value)
    assert (refused.value.option, refused.value.__cause__) == ("idempotency_cipher", None)
    assert ("key 2 is not 32 bytes" in told) is (isinstance(keys, list) and bool(keys))
    assert not [each for each in (OLD, NEW) if each[:8] in told]


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
        _unpacked(Encoded(data, ENCRYPTED), SLOT._replace(step=step))


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
    vars(indexed := MemoryStore())["reads_all"] = lambda **wanted: not (wanted["label"] or wanted["label_prefix"])
    around: Any = Sealed(indexed, RING)
    assert around.reads_all(label="acme/7", label_prefix="acme/")  # no index knows what is encrypted


SECRET = "card 4711"
ORDER = "acme/order-4711"
"""Also the label."""


class Declined(Exception):
    """The failure that is an outcome."""


ENDS: dict[str, Any] = {
    "completed": {"receipt": SECRET},
    "failed": Declined(SECRET),
    "released": KeyError(SECRET),
    "unknown": OutcomeUnknown("this", f"no answer about {SECRET}"),
    "lost": {SECRET: object()},
}
"""What the body returns, or raises."""


class Shop(deliveries.Shop):
    """Pays in a step and ends as it is told to; a worker on the store of another if one is given."""

    def __init__(self, keys: Any = NEW, on: "Shop | None" = None, large: Any = None, **options: Any) -> None:
        memory = on.memory if on else MemoryStore()
        settings = {"idempotency_store": memory, "idempotency_cipher": keys, "idempotency_large_results": large}
        settings |= {name: options.pop(name) for name in ("idempotency_cipher_required",) if name in options}
        policy = Policy("order_id", label="order_id", remember=(Declined,), **options)
        super().__init__(policy, **settings)
        self.memory, self.does, self.pays, self.ends = memory, self._charge, SECRET, ENDS["completed"]
        self.around: Any = runtime_of(self.app).store

    def _charge(self, order_id: str, cents: int) -> Any:
        current_attempt().step("pay", self._pay)
        if isinstance(self.ends, OutcomeUnknown):
            raise OutcomeUnknown(current_attempt().key, self.ends.reason)
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def _pay(self, step: Any) -> Any:
        self.runs.append("pay")
        return self.pays

    def end(self, how: str, order: str = ORDER) -> Ended:
        self.ends = ENDS[how]
        return self.deliver(order)

    @property
    def kept(self) -> str:
        """All that the store is given."""
        return repr(self.record.to_fields())


@pytest.mark.parametrize("end", ENDS)
def test_nothing_that_was_said_is_kept_in_clear_and_all_ends_as_without_encryption(end: str) -> None:
    """Neither result, step, label nor text of an exception; the duplicate gets what it gets without keys."""
    hidden, clear = Shop(), Shop(None)
    for _ in range(2):
        assert repr(hidden.end(end)) == repr(clear.end(end))
    assert (hidden.runs, hidden.record.status) == (clear.runs, clear.record.status)
    assert ORDER in clear.kept
    assert not [each for each in (SECRET, "acme", "4711") if each in hidden.kept]


def test_signals_are_in_clear() -> None:
    """They are not at rest in the store; that of a verdict as every other."""
    shop, doubtful = Shop(), Shop()
    with deliveries.signalled() as told:
        shop.end("failed")
        shop.deliver(ORDER)
        doubtful.end("unknown")
        resolve(doubtful.record.key, rerun=True, app=doubtful.app)

    assert {about["label"] for _, about in told} == {ORDER}
    assert f"failed earlier: Declined: {SECRET}" in [about.get("reason") for name, about in told if name == "replayed"]


@pytest.mark.parametrize("large", [None, 10], ids=["in the record", "objects"])
@pytest.mark.parametrize("keys", [None, OLD], ids=["no key", "another key"])
@pytest.mark.parametrize("end", ["completed", "failed", "released", "left"])
def test_without_the_key_nothing_runs_and_nothing_is_lost(end: str, keys: Any, large: Any) -> None:
    """The delivery is postponed, the record stays as it is, and a worker with the key goes on from it."""
    kept: Any = large and large_results(over=large)
    shop = Shop(large=kept)
    first = shop.end(end if end != "left" else "released")
    objects = list(kept.objects.objects.values()) if large else []
    assert [SECRET.encode() in each for each in objects] == [False] * len(objects), "those of results and of steps"
    if end == "left":  # without a key also where the step alone is encrypted
        shop.change(status=Status.IN_PROGRESS, lease_until=0, label=shop.record.label if keys else "")
    before = shop.record
    keyless = Shop(keys, shop, kept, on_outage="run")
    ended = keyless.deliver(ORDER)

    assert (ended.state, type(ended.value.exc), keyless.runs) == ("RETRY", RecordUnreadable, [])
    assert shop.record == before
    rotated, is_over = Shop([OLD, NEW], shop, kept), end in ("completed", "failed")
    assert repr(rotated.deliver(ORDER)) == repr(first if is_over else Ended("SUCCESS", ENDS["completed"]))
    assert rotated.runs == ([] if is_over else [ORDER]), "the step that finished is not made again"


def test_without_the_key_a_conflict_and_a_doubt_are_what_they_are() -> None:
    """Nothing has to be read for a conflict; a person has to judge the other in any case, where the key is."""
    shop, doubtful = Shop(), Shop()
    shop.end("released")
    shop.change(status=Status.IN_PROGRESS, lease_until=shop.memory.now() + 60_000)
    doubtful.end("unknown")
    conflict, unknown = (Shop(None, each).deliver(ORDER) for each in (shop, doubtful))

    assert (conflict.state, type(conflict.value.exc)) == ("RETRY", InFlight)
    assert isinstance(unknown.value, OutcomeUnknown)
    assert unknown.value.reason.startswith("encrypted:")


def test_clear_record_goes_on_under_encryption() -> None:
    """Who sets keys keeps what is recorded: outcomes are replayed, and finished steps are not repeated."""
    before = Shop(None)
    before.end("completed", "done")
    before.end("released", "open")
    shop = Shop(NEW, before)
    assert [shop.deliver(each).value for each in ("done", "open")] == [ENDS["completed"]] * 2
    assert shop.runs == ["open"]


TAMPERED: dict[str, tuple[str, Callable[[Record, Record], dict[str, Any]], str]] = {
    "another's step": ("released", lambda own, other: {"steps": other.steps}, "moved it here"),
    "step as another": ("released", lambda own, _: {"steps": {**own.steps, "x": own.steps["pay"]}}, "moved it here"),
    "damaged step": ("released", lambda own, _: {"steps": {"pay": {"text": 1}}}, "not a state of a step"),
    "another's label": ("released", lambda own, other: {"label": other.label}, "the label"),
    "another's result": ("completed", lambda own, other: {"result": other.result}, "moved it here"),
    "failure as result": ("failed", lambda own, _: {"status": Status.COMPLETED}, "moved it here"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_what_somebody_moved_or_damaged_is_refused(name: str) -> None:
    """It was encrypted with the same key for the same task, in another place: nothing is replayed and nothing runs."""
    end, change, words = TAMPERED[name]
    shop, other = Shop(), Shop()
    shop.end(end)
    other.end(end, "acme/order-4712")
    tampered, runs = shop.change(**change(shop.record, other.record)), [*shop.runs]
    ended = shop.end("completed")

    assert (ended.state, shop.runs, shop.record) == ("RETRY", runs, tampered)
    assert words in str(ended.value.exc)
    assert reveal(shop.around, tampered).steps.keys() == tampered.steps.keys()
    assert name != "another's label" or reveal(shop.around, tampered).label.startswith("encrypted:")


def test_begun_step_has_nothing_to_decrypt() -> None:
    """It has no result yet, and keeps nobody from running."""
    shop, begun = Shop(), {"begun_at": 1, "attempt": 1, "content_type": ENCRYPTED}
    shop.end("released")
    shop.change(steps={**shop.record.steps, "other": begun})
    assert reveal(shop.around, shop.record).steps["other"] == begun
    assert shop.end("completed").value == ENDS["completed"]


def test_publisher_hides_the_label_and_gets_in_clear_what_is_done() -> None:
    """It records the operation before a worker sees it; one without the key sends, and whoever executes it answers."""
    shop = Shop(publish="once")
    shop.charge.delay(ORDER)
    assert ("4711" in shop.kept, len(shop.published())) == (False, 1)
    shop.end("failed")
    with pytest.raises(Declined, match=SECRET):
        shop.charge.delay(ORDER).get(timeout=0)
    keyless = Shop(None, shop, publish="once")
    keyless.charge.delay(ORDER)
    assert (len(shop.published()), len(keyless.published())) == (0, 1)


def test_verdict_is_given_on_an_encrypted_record() -> None:
    """The stated result is encrypted, as is the copy of the error that was judged; people read both."""
    shop = Shop()
    shop.end("unknown")
    judged = resolve(shop.record.key, completed=ENDS["completed"], by="ann", reason="T-1", app=shop.app)
    assert SECRET not in shop.kept
    assert (judged.label, judged.verdict["error"]) == (ORDER, f"no answer about {SECRET}")
    assert shop.deliver(ORDER).value == ENDS["completed"]


def test_records_are_found_by_label() -> None:
    """By all of it or its beginning; what cannot be decrypted is told, and no label that only looks so stops it."""
    shop = Shop()
    for order in (ORDER, "other/7"):
        shop.end("completed", order)
    Shop(None, shop).deliver("encrypted:/o-1")

    for label in (ORDER, "acme/*"):
        (record,) = find(shop.around, Filter(label=label))
        assert record.label == ORDER
    assert look_up(shop.around, ORDER) == look_up(shop.around, record.key) == reveal(shop.around, record)
    keyless = Shop(OLD, shop).app
    erased = run(keyless, "forget", "--label", "acme/*", "--yes", "--reason", "T-1")
    assert (erased.exit_code, "is encrypted with a key that is not here" in erased.output) == (1, True)
    assert "that can be read: 2 are encrypted" in run(keyless, "show", ORDER).output


def test_people_see_what_is_encrypted_where_the_key_is() -> None:
    """By the commands and on the page; elsewhere they are told that it is encrypted."""
    shop = Shop()
    shop.end("failed")
    key, keyless = shop.record.key, Shop(OLD, shop)
    shown, hidden = (json.loads(run(each.app, "show", key, "--json").output) for each in (shop, keyless))
    assert (shown["label"], shown["error"], shown["result"]["message"]) == (ORDER, f"Declined: {SECRET}", SECRET)
    assert all(hidden[each].startswith("encrypted:") for each in ("label", "error"))

    shop.end("released", "acme/open")
    assert json.loads(run(shop.app, "show", "acme/open", "--json").output)["steps"]["pay"]["result"] == SECRET

    person, stranger = (a_program(a_page(each.app)) for each in (shop, keyless))
    assert ORDER in text_of(person.get("/records?label=acme/*").text)
    assert SECRET in text_of(person.get(f"/record?key={key}").text)
    assert "it is encrypted" in text_of(stranger.get(f"/record?key={key}").text)


@pytest.mark.parametrize("keys", [None, NEW], ids=["clear", "encrypted"])
@pytest.mark.parametrize("large", [False, True], ids=["in the record", "an object"])
@pytest.mark.parametrize("end", ["completed", "failed", "released"])
def test_clear_text_is_no_result_where_encryption_is_required(end: str, large: bool, keys: Any) -> None:
    """Whoever can write the store could have put it there; what is encrypted is read, and people see both."""
    kept = large_results(over=0) if large else None
    shop = Shop(keys, large=kept)
    first, before = shop.end(end), shop.record
    demanding = Shop(NEW, shop, kept, idempotency_cipher_required=True)
    assert ORDER in repr(reveal(demanding.around, before))
    ended = demanding.deliver(ORDER)

    if keys is None:
        assert (ended.state, type(ended.value.exc), demanding.runs) == ("RETRY", RecordUnreadable, [])
        assert shop.record == before
    elif end == "released":
        assert (ended.state, demanding.runs) == ("SUCCESS", [ORDER])
    else:
        assert (repr(ended), demanding.runs) == (repr(first), [])


def test_bad_key_is_refused_where_a_task_is_bound_and_where_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earliest moment there is, and after the setting has changed; a missing package with what installs it."""
    app = Shop().app
    app.conf.idempotency_cipher = "hunter2"
    for refuse in (lambda: Shop("hunter2"), lambda: worker.check(app, "celery.concurrency.solo")):
        with pytest.raises(PolicyError, match="idempotency_cipher"):
            refuse()
    monkeypatch.delitem(sys.modules, "celery_idempotent.stores.keyring", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(PolicyError, match=r"celery-idempotent\[cipher\]"):
        Shop()


@pytest.mark.parametrize(("required", "keys"), [(True, None), ("yes", "NEW")])
def test_encryption_that_is_required_needs_keys(required: Any, keys: Any) -> None:
    """Or all would be written in clear."""
    with pytest.raises(PolicyError, match="idempotency_cipher_required="):
        Shop(keys and NEW, idempotency_cipher_required=required)


def test_reports_hide_the_keys() -> None:
    """``celery report`` and ``inspect conf`` print settings."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"celery_idempotency_cipher": [NEW]}, namespace="CELERY")
    assert NEW not in app.conf.humanize(with_defaults=False)
    assert NEW not in str(app.conf.table(with_defaults=True))


def _private(body: Any = lambda order_id, cents: SECRET, **policy: Any) -> deliveries.Shop:
    shop = deliveries.Shop(Policy("order_id", private=True, **policy), result_serializer="json")
    shop.does = body
    return shop


@pytest.mark.parametrize("value", [SECRET, object()])
def test_first_caller_of_private_task_gets_value_and_replay_none(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is a choice and no loss, also of what cannot be encoded: nobody is told of an error."""
    shop = _private(lambda order_id, cents: value)
    first, second = (shop.deliver("o") for _ in range(2))
    if value == SECRET:
        assert first.value == SECRET
    record = shop.record
    assert (second.value, record.status, record.result, record.error) == (None, Status.COMPLETED, "null", None)
    assert "result_dropped" not in caplog.text


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_none_is_kept_of_a_private_result_in_every_serialiser(serializer: str) -> None:
    """A reader of the record finds a result like any other."""
    accepted = frozenset({"application/json", "application/x-python-serialize", "application/x-yaml"})
    codec = Codec(serializer, accepted, private=True)
    kept = codec.keep_outcome(SECRET)
    assert (kept.value, kept.lost) == (SECRET, None)
    assert kept.encoded is not None
    assert codec.decode(kept.encoded) is None


def test_private_steps_keep_their_results_and_failures_their_type() -> None:
    """The next attempt needs the one; the other is told by its type, which is no result."""

    def body(order_id: str, cents: int) -> str:
        value = current_attempt().step("charge", lambda step: SECRET)
        if current_attempt().number == 1:
            raise RuntimeError
        return value

    shop = _private(body)
    assert (shop.deliver("o").state, SECRET in repr(shop.record.steps)) == ("FAILURE", True)
    assert shop.deliver("o").value == SECRET
    shop = _private(raising(LookupError("declined")), remember=(LookupError,))
    assert [type(shop.deliver("o").value) for _ in range(2)] == [LookupError, ReplayedFailure]
    assert "declined" not in repr(shop.record)


def test_what_goes_on_from_a_private_replay_goes_on_with_none() -> None:
    """A link of a duplicate, and a publisher of what is done."""
    shop = _private(publish="once")
    for _ in range(2):
        shop.deliver("o", request={"callbacks": [shop.app.signature("next")]})
    assert [message.payload[0] for message in shop.published()] == [[SECRET], [None]]
    result: Any = shop.charge.delay("o")
    assert (result.state, result.get(), shop.published()) == ("SUCCESS", None, [])
    with pytest.raises(PolicyError, match="private='no'"):
        Policy(private="no")  # type: ignore[arg-type]
