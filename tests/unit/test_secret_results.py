"""What is encrypted at rest, what people see of it, and what happens without the key or after somebody tampered."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from cryptography.fernet import Fernet

from celery_idempotent import (
    AtMostOnce,
    IdempotentTask,
    OutcomeUnknown,
    Policy,
    PolicyError,
    Record,
    ReplayedFailure,
    ResultLost,
    Status,
    current_attempt,
    idempotent,
    resolve,
    signals,
)
from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import ENCRYPTED, OBJECT, Slot, reveal, unpack
from celery_idempotent.protocol.record import RecordUnreadable
from celery_idempotent.protocol.steps import Step
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.wrappers import innermost
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import Ended, an_app, deliver, published
from tests.support.objects import MemoryObjects, large_results
from tests.support.web import a_page, a_program, text_of

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()
SECRET = "card 4711"
LABEL = "acme/order-4711"


class Declined(Exception):
    """The failure that is an outcome."""


class Shop:
    """A task that does what the test says, on an app with these keys; and the same of another worker."""

    def __init__(
        self, keys: Any = NEW, store: Any = None, order: str = "order-4711", large: Any = None, **options: Any
    ) -> None:
        self.order = order
        self.store = store or MemoryStore()
        self.app = an_app(idempotency_store=self.store, idempotency_cipher=keys, idempotency_large_results=large)
        self.calls: list[str] = []
        self.raises: BaseException | None = None
        self.result: Any = {"receipt": SECRET}
        policy = Policy("order", label=lambda order, tenant: f"{tenant}/{order}", **options)

        @self.app.task(base=IdempotentTask, bind=True, shared=False, name="shop.charge", idempotent=policy)
        def charge(task: Any, order: str, tenant: str = "acme") -> Any:
            self.calls.append("body")
            current_attempt().step("pay", self._pay)
            if self.raises:
                raise self.raises
            return self.result

        self.charge = charge

    def _pay(self, step: Step) -> str:
        self.calls.append("pay")
        return SECRET

    def deliver(self, order: str = "") -> Ended:
        return deliver(self.charge, order or self.order)

    @property
    def record(self) -> Record:
        (record,) = self.store.scan()
        return record


def _plain(record: Record) -> str:
    """All that a store is given."""
    return repr(record.to_fields())


def _another(shop: Shop, keys: Any, **options: Any) -> Shop:
    """A worker with other keys on the same store."""
    return Shop(keys, shop.store, **options)


# -- what is kept


def _completed(shop: Shop) -> Ended:
    return shop.deliver()


def _failed(shop: Shop) -> Ended:
    shop.raises = Declined(SECRET)
    return shop.deliver()


def _released(shop: Shop) -> Ended:
    shop.raises = KeyError(SECRET)
    return shop.deliver()


def _unknown(shop: Shop) -> Ended:
    shop.raises = OutcomeUnknown(shop.charge.idempotency_key_for("order-4711"), f"no answer about {SECRET}")
    return shop.deliver()


def _lost(shop: Shop) -> Ended:
    shop.result = {SECRET: object()}
    return shop.deliver()


@pytest.mark.parametrize("end", [_completed, _failed, _released, _unknown, _lost])
def test_nothing_that_was_said_is_kept_in_clear(end: Callable[[Shop], Ended]) -> None:
    """Neither result, step, label nor text of an exception, however the operation ends."""
    hidden, shop = Shop(remember=(Declined,)), Shop(None, remember=(Declined,))
    end(shop)
    end(hidden)

    assert LABEL in _plain(shop.record)
    assert hidden.record.status is shop.record.status
    for each in (SECRET, LABEL, "order-4711", "acme/"):
        assert each not in _plain(hidden.record)


@pytest.mark.parametrize("end", [_completed, _failed, _released, _unknown])
def test_delivery_ends_as_without_encryption(end: Callable[[Shop], Ended]) -> None:
    """The first one, and the duplicate after it."""
    hidden, shop = Shop(remember=(Declined,)), Shop(None, remember=(Declined,))

    for _ in range(2):
        ended, clear = end(hidden), end(shop)
        assert (ended.state, repr(ended.value)) == (clear.state, repr(clear.value))
    assert hidden.calls == shop.calls


def test_finished_step_is_recalled() -> None:
    """The body runs again after a release, and its step does not."""
    shop = Shop()
    _released(shop)
    shop.raises = None

    assert shop.deliver().value == {"receipt": SECRET}
    assert shop.calls == ["body", "pay", "body"]


def test_lost_result_of_a_step_says_why() -> None:
    """In clear to the body, and not in the store."""
    app = an_app(idempotency_cipher=NEW)

    @app.task(base=IdempotentTask, bind=True, shared=False, idempotent=Policy("order"))
    def charge(task: Any, order: str) -> None:
        current_attempt().step("pay", lambda step: {SECRET: object()})
        raise KeyError("once more")

    deliver(charge, "o-1")
    (record,) = innermost(runtime_of(app).store).scan()
    assert SECRET not in _plain(record)
    ended = deliver(charge, "o-1")

    assert isinstance(ended.value, ResultLost)
    assert "not encodable" in str(ended.value)
    assert reveal(runtime_of(app).store, record).steps["pay"]["lost"].startswith("not encodable")


def test_lost_result_says_why() -> None:
    """To the duplicate that asks for it."""
    shop = Shop()
    _lost(shop)
    ended = shop.deliver()

    assert isinstance(ended.value, ResultLost)
    assert "not encodable" in ended.value.reason


def test_redacted_failure_stays_redacted() -> None:
    """Encryption keeps no more than was kept without."""
    shop = Shop(remember=(Declined,), private=True)
    _failed(shop)

    assert reveal(runtime_of(shop.app).store, shop.record).error == "Declined"
    assert isinstance(shop.deliver().value, ReplayedFailure)


def test_function_is_encrypted_as_a_task() -> None:
    """By the app that it names."""
    app = an_app(idempotency_cipher=NEW)

    @idempotent(Policy("order", label="order"), app=app, name="charge")
    def charge(order: str) -> str:
        return SECRET

    assert [charge("order-4711"), charge("order-4711")] == [SECRET, SECRET]
    (record,) = innermost(runtime_of(app).store).scan()
    assert "order-4711" not in _plain(record)


def test_what_is_told_is_in_clear() -> None:
    """Logs and signals are not at rest in the store: they say what they said before."""
    shop, told = Shop(remember=(Declined,)), []

    def tell(sender: Any, label: str, reason: str, **_: Any) -> None:
        told.append((label, reason))

    for each in (signals.failed, signals.claimed, signals.replayed):
        each.connect(tell, weak=False, dispatch_uid="tell")
    try:
        _failed(shop)
        shop.deliver()
    finally:
        for each in (signals.failed, signals.claimed, signals.replayed):
            each.disconnect(dispatch_uid="tell")

    assert {label for label, _ in told} == {LABEL}
    assert (LABEL, f"failed earlier: Declined: {SECRET}") in told


# -- where the key is missing


def _attempts(shop: Shop) -> list[str]:
    return [each for each in shop.calls if each == "body"]


@pytest.mark.parametrize("keys", [None, OLD], ids=["no key", "another key"])
@pytest.mark.parametrize("end", [_completed, _failed, _released])
def test_without_the_key_nothing_runs_and_nothing_is_lost(end: Callable[[Shop], Ended], keys: Any) -> None:
    """The delivery is postponed, the record stays as it is, and a worker with the key goes on from it."""
    shop = Shop(remember=(Declined,))
    first = end(shop)
    keyless, before = _another(shop, keys, remember=(Declined,)), shop.record
    ended = keyless.deliver()

    assert ended.state == "RETRY"
    assert isinstance(ended.value.exc, RecordUnreadable)
    assert "idempotency_cipher" in str(ended.value.exc)
    assert keyless.calls == []
    assert shop.record == before
    rotated = _another(shop, [OLD, NEW], remember=(Declined,))
    if end is _released:
        assert rotated.deliver().value == {"receipt": SECRET}
        assert rotated.calls == ["body"], "the step that finished is not made again"
    else:
        ended = rotated.deliver()
        assert (ended.state, repr(ended.value)) == (first.state, repr(first.value))
        assert rotated.calls == []


def test_without_the_key_an_outage_that_may_run_does_not() -> None:
    """``on_outage="run"`` is about a store that does not answer."""
    shop = Shop(on_outage="run")
    shop.deliver()
    keyless = _another(shop, None, on_outage="run")

    assert keyless.deliver().state == "RETRY"
    assert keyless.calls == []


def test_without_the_key_what_a_dead_worker_left_is_not_taken_over() -> None:
    """Its step may have been paid for; who cannot read what it returned must not call it again."""
    shop = Shop()
    _released(shop)
    left = shop.record.but(status=Status.IN_PROGRESS, lease_until=0, revision="left")
    assert shop.store.swap(left, shop.record.revision) == left
    keyless = _another(shop, OLD)

    assert keyless.deliver().state == "RETRY"
    assert keyless.calls == []
    assert shop.record == left


def test_what_runs_elsewhere_is_a_conflict_without_the_key_too() -> None:
    """Nothing has to be read for it."""
    shop = Shop()
    _released(shop)
    now = shop.store.now()
    running = shop.record.but(status=Status.IN_PROGRESS, lease_until=now + 60_000, revision="running")
    assert shop.store.swap(running, shop.record.revision) == running
    told: list[str] = []

    def tell(sender: Any, label: str, **_: Any) -> None:
        told.append(label)

    signals.conflicted.connect(tell, weak=False, dispatch_uid="tell")
    try:
        _another(shop, None).deliver()
    finally:
        signals.conflicted.disconnect(dispatch_uid="tell")

    (label,) = told
    assert label.startswith("encrypted:")


def test_unknown_outcome_is_unknown_without_the_key_too() -> None:
    """A person has to judge it in any case, and reads the reason where the key is."""
    shop = Shop()
    _unknown(shop)
    ended = _another(shop, None).deliver()

    assert isinstance(ended.value, OutcomeUnknown)
    assert ended.value.reason.startswith("encrypted:")


def test_clear_record_goes_on_under_encryption() -> None:
    """Who sets keys keeps what is recorded: outcomes are replayed, and finished steps are not repeated."""
    before = Shop(None)
    before.deliver("done")
    before.raises = KeyError("no")
    before.deliver("open")
    shop = _another(before, NEW)

    assert shop.deliver("done").value == {"receipt": SECRET}
    assert shop.deliver("open").value == {"receipt": SECRET}
    assert shop.calls == ["body"]


def test_damaged_step_is_told() -> None:
    """It says that it is encrypted, and is nothing that was."""
    shop = Shop()
    _released(shop)
    spoilt = shop.record.but(steps={"pay": {"content_type": ENCRYPTED, "base64": "?"}}, revision="spoilt")
    assert shop.store.swap(spoilt, shop.record.revision) == spoilt
    ended = shop.deliver()

    assert ended.state == "RETRY"
    assert "is damaged" in str(ended.value.exc)
    assert reveal(runtime_of(shop.app).store, spoilt).steps == spoilt.steps


def test_begun_step_that_is_called_encrypted_has_nothing_to_decrypt() -> None:
    """Somebody wrote that there; the step had no result yet."""
    shop = Shop()
    _released(shop)
    begun = {"begun_at": 1, "attempt": 1, "content_type": ENCRYPTED}
    _tampered(shop, steps={"other": begun})
    shop.raises = None

    assert shop.deliver().value == {"receipt": SECRET}


def test_large_results_are_encrypted_objects() -> None:
    """What comes after the codec has ciphertext: the objects of the result and of the step have no secret."""
    large = large_results(over=10)
    assert isinstance(large.objects, MemoryObjects)
    shop, clear = Shop(large=large), Shop(None, large=large)
    for each in (shop, clear):
        each.raises = KeyError("no")
        each.deliver()

    keyless = _another(shop, None, large=large)
    assert keyless.deliver().state == "RETRY"
    assert keyless.calls == []
    shop.raises = None
    assert [shop.deliver().value, shop.deliver().value] == [{"receipt": SECRET}] * 2
    assert shop.calls == ["body", "pay", "body"]
    assert keyless.deliver().state == "RETRY"
    assert keyless.calls == []
    kept = [SECRET.encode() in each for each in large.objects.objects.values()]
    assert kept == [False, True, False], "a step of each, and a result"


def test_encrypted_object_of_a_step_is_refused_without_a_key() -> None:
    """Also where nothing else of the record is encrypted: before the body begins, as its step would not be called."""
    large = large_results(over=10)
    shop = Shop(large=large)
    _released(shop)
    _tampered(shop, label="")
    before, keyless = shop.record, _another(shop, None, large=large)
    ended = keyless.deliver()

    assert ended.state == "RETRY"
    assert "the result of step 'pay'" in str(ended.value.exc)
    assert keyless.calls == []
    assert shop.record == before


def test_damaged_pointer_is_not_called_encrypted() -> None:
    """Whoever reads it says what is wrong with it."""
    shop = Shop(None)
    _released(shop)
    _tampered(shop, steps={"other": {"text": "?", "content_type": OBJECT}})
    shop.raises = None

    assert shop.deliver().value == {"receipt": SECRET}


# -- who can write the store


def _tampered(shop: Shop, **changes: Any) -> None:
    record = shop.record
    changed = record.but(**changes, revision="tampered")
    assert shop.store.swap(changed, record.revision) == changed


def _of_another_order(end: Callable[[Shop], Ended]) -> Record:
    other = Shop(order="order-4712", remember=(Declined,))
    end(other)
    return other.record


@pytest.mark.parametrize("end", [_completed, _failed])
def test_outcome_of_another_operation_is_not_replayed(end: Callable[[Shop], Ended]) -> None:
    """Encrypted by the same key for the same task, and for another order."""
    shop = Shop(remember=(Declined,))
    end(shop)
    other = _of_another_order(end)
    _tampered(shop, result=other.result, content_type=other.content_type)
    ended = shop.deliver()

    assert ended.state == "RETRY"
    assert "moved it here from another" in str(ended.value.exc)
    assert _attempts(shop) == ["body"]


def test_step_of_another_operation_is_not_recalled() -> None:
    """Nor called: nobody can tell what became of the one that was here."""
    shop = Shop()
    _released(shop)
    _tampered(shop, steps=_of_another_order(_released).steps)

    assert shop.deliver().state == "RETRY"
    assert shop.calls == ["body", "pay"]


def test_result_of_a_step_is_not_taken_for_that_of_the_operation() -> None:
    """Nor for that of another step."""
    shop = Shop()
    _released(shop)
    step = shop.record.steps["pay"]
    _tampered(shop, steps={"pay": step, "refund": step})
    assert shop.deliver().state == "RETRY"

    assert step["content_type"] == ENCRYPTED
    with pytest.raises(RecordUnreadable):
        unpack(runtime_of(shop.app).store, Encoded(json.dumps(step), ENCRYPTED), Slot(shop.record.key, "result"))


def test_failure_that_somebody_calls_completed_is_no_result() -> None:
    """The status is not encrypted, and does not make one of the other."""
    shop = Shop(remember=(Declined,))
    _failed(shop)
    _tampered(shop, status=Status.COMPLETED)

    assert shop.deliver().state == "RETRY"


def test_label_of_another_operation_is_not_shown() -> None:
    """Nor does anything run on it."""
    shop = Shop()
    _released(shop)
    _tampered(shop, label=_of_another_order(_released).label)

    assert reveal(runtime_of(shop.app).store, shop.record).label.startswith("encrypted:")
    assert shop.deliver().state == "RETRY"


def test_older_ciphertext_of_the_same_place_is_accepted() -> None:
    """What cannot be prevented: it was this operation's result once, and who can write the store can put it back."""
    shop = Shop()
    shop.deliver()
    older = shop.record
    forgotten = shop.record.but(expires_at=1, revision="forgotten")
    assert shop.store.swap(forgotten, shop.record.revision) == forgotten
    shop.result = "the second"
    assert shop.deliver().value == "the second"
    _tampered(shop, result=older.result)

    assert shop.deliver().value == {"receipt": SECRET}


# -- publishers


def test_publisher_hides_the_label_too() -> None:
    """It records the operation before a worker sees it."""
    shop = Shop(publish="once")
    shop.charge.delay("order-4711")

    assert "order-4711" not in _plain(shop.record)
    assert reveal(runtime_of(shop.app).store, shop.record).label == LABEL


def test_publisher_gets_the_first_result_and_its_reason_in_clear() -> None:
    """What is done is not published again."""
    shop, told = Shop(publish="once", remember=(Declined,)), []
    _failed(shop)

    def tell(sender: Any, reason: str, **_: Any) -> None:
        told.append(reason)

    signals.publish_skipped.connect(tell, weak=False, dispatch_uid="tell")
    try:
        with pytest.raises(Declined, match=SECRET):
            shop.charge.delay("order-4711").get(timeout=0)
    finally:
        signals.publish_skipped.disconnect(dispatch_uid="tell")

    assert told == [f"failed earlier: Declined: {SECRET}"]


def test_publisher_without_the_key_sends_the_message() -> None:
    """Whoever executes it answers."""
    shop = Shop(publish="once")
    shop.deliver()
    keyless = _another(shop, None, publish="once")
    keyless.charge.delay("order-4711")

    assert len(published(keyless.app)) == 1


# -- people


def test_verdict_is_given_on_an_encrypted_record() -> None:
    """The stated result is encrypted, as is the copy of the error that was judged; people read both."""
    shop = Shop()
    _unknown(shop)
    judged = resolve(shop.record.key, completed={"receipt": SECRET}, by="ann", reason="T-1", app=shop.app)

    assert SECRET not in _plain(shop.record)
    assert judged.label == LABEL
    assert judged.verdict["error"] == f"no answer about {SECRET}"
    assert shop.deliver().value == {"receipt": SECRET}


def test_signal_of_a_verdict_has_the_label_in_clear() -> None:
    """As every other."""
    shop, told = Shop(), []
    _unknown(shop)

    def tell(sender: Any, label: str, **_: Any) -> None:
        told.append(label)

    signals.verdict_given.connect(tell, weak=False, dispatch_uid="tell")
    try:
        resolve(shop.record.key, rerun=True, app=shop.app)
    finally:
        signals.verdict_given.disconnect(dispatch_uid="tell")

    assert told == [LABEL]


@pytest.mark.parametrize("label", [LABEL, "acme/*"])
def test_records_are_found_by_label(label: str) -> None:
    """By all of it or its beginning: each label is decrypted and compared."""
    shop = Shop()
    shop.deliver()
    shop.deliver("order-4711")
    deliver(shop.charge, "7", "other")
    store = runtime_of(shop.app).store

    (record,) = found(store, Filter(label=label))
    assert record.label == LABEL
    assert looked_up(store, LABEL) == looked_up(store, record.key) == reveal(store, record)


def test_search_by_label_without_the_key_is_refused() -> None:
    """Who erases all of a tenant must not be told that there is nothing."""
    shop = Shop()
    shop.deliver()
    keyless = _another(shop, OLD)

    for app in (keyless.app, _another(shop, None).app):
        result = run(app, "forget", "--label", "acme/*", "--yes", "--reason", "T-1")
        assert result.exit_code == 1
        assert "is encrypted with a key that is not here" in result.output
    assert shop.record.status is Status.COMPLETED


def test_label_that_reads_as_if_it_were_encrypted_refuses_no_search() -> None:
    """Whoever chooses an argument could else keep an operator from searching."""
    shop = Shop(None)
    deliver(shop.charge, "o-1", "encrypted:")
    assert shop.record.label == "(encrypted:/o-1"
    assert shop.store.swap(replace(a_record(), label="(encrypted)"), None)
    shop.deliver()

    for keys in (None, NEW):
        (record,) = found(runtime_of(_another(shop, keys).app).store, Filter(label="acme/*"))
        assert record.label == LABEL


def test_look_for_one_label_without_the_key_says_what_was_not_read() -> None:
    """Nothing was found among what could be read, which is not all."""
    shop = Shop()
    shop.deliver()
    result = run(_another(shop, OLD).app, "show", LABEL)

    assert result.exit_code == 1
    assert "that can be read: 1 are encrypted" in result.output


def test_commands_show_what_is_encrypted() -> None:
    """Where the app has the keys, as without encryption; where not, they say so."""
    shop = Shop(remember=(Declined,))
    _failed(shop)
    key = shop.record.key

    for arguments in (("list", "--label", LABEL), ("list", "--label", "acme/*"), ("show", LABEL), ("show", key)):
        assert LABEL in run(shop.app, *arguments).output
    shown = json.loads(run(shop.app, "show", key, "--json").output)
    assert (shown["label"], shown["error"]) == (LABEL, f"Declined: {SECRET}")
    assert shown["result"]["message"] == SECRET
    hidden = json.loads(run(_another(shop, None).app, "show", key, "--json").output)
    assert all(hidden[each].startswith("encrypted:") for each in ("label", "error"))
    assert hidden["content_type"] == ENCRYPTED


def test_commands_show_steps() -> None:
    """Of an operation that is open."""
    shop = Shop()
    _released(shop)

    shown = json.loads(run(shop.app, "show", LABEL, "--json").output)

    assert shown["steps"]["pay"]["result"] == SECRET


def test_begun_step_is_shown() -> None:
    """It has no result that could be encrypted."""
    shop = Shop(effects={"pay": AtMostOnce()})
    shop.charge.backend  # noqa: B018 - binds the task
    begun = {"begun_at": 1, "attempt": 1}

    assert reveal(runtime_of(shop.app).store, replace(a_record(), steps={"pay": begun})).steps == {"pay": begun}


def test_page_shows_what_is_encrypted() -> None:
    """The overview, a list and a record, and finds it by its label."""
    shop = Shop()
    _unknown(shop)
    person = a_program(a_page(shop.app))

    for address in ("/", "/records?label=acme/*", f"/records?key={shop.record.key}", f"/record?key={shop.record.key}"):
        assert LABEL in text_of(person.get(address).text), address
    assert f"no answer about {SECRET}" in person.get(f"/record?key={shop.record.key}").text
    assert "is encrypted with a key that is not here" in text_of(
        a_program(a_page(_another(shop, OLD).app)).get("/records?label=acme/*").text
    )


def test_page_says_of_a_result_that_it_is_encrypted() -> None:
    """Where this app has no key that opens it."""
    shop = Shop()
    shop.deliver()
    address = f"/record?key={shop.record.key}"

    assert SECRET in a_program(a_page(shop.app)).get(address).text
    assert "it is encrypted" in text_of(a_program(a_page(_another(shop, OLD).app)).get(address).text)


# -- clear text, where it is refused


def _demanding(shop: Shop, large: Any = None, **options: Any) -> Shop:
    """A worker with the keys on the same store, to which only what is encrypted counts."""
    another = _another(shop, NEW, large=large, remember=(Declined,), **options)
    another.app.conf.idempotency_cipher_required = True
    return another


@pytest.mark.parametrize("is_large", [False, True], ids=["in the record", "an object"])
@pytest.mark.parametrize("end", [_completed, _failed, _released])
def test_clear_text_is_refused_where_encryption_is_required(end: Callable[[Shop], Ended], is_large: bool) -> None:
    """It is taken for a result, a failure or a step only where it may be from before the keys."""
    large = large_results(over=0) if is_large else None
    shop = Shop(None, remember=(Declined,), large=large)
    end(shop)
    demanding, before = _demanding(shop, large), shop.record
    ended = demanding.deliver()

    assert ended.state == "RETRY"
    assert isinstance(ended.value.exc, RecordUnreadable)
    assert "idempotency_cipher_required" in str(ended.value.exc)
    assert demanding.calls == []
    assert shop.record == before
    assert LABEL in repr(reveal(runtime_of(demanding.app).store, before)), "people see it all the same"


@pytest.mark.parametrize("is_large", [False, True], ids=["in the record", "an object"])
@pytest.mark.parametrize("end", [_completed, _failed, _released])
def test_what_is_encrypted_is_read_where_that_is_required(end: Callable[[Shop], Ended], is_large: bool) -> None:
    """The same as without the setting."""
    large = large_results(over=0) if is_large else None
    shop = Shop(remember=(Declined,), large=large)
    first = end(shop)
    demanding = _demanding(shop, large)
    ended = demanding.deliver()

    if end is _released:
        assert (ended.state, demanding.calls) == ("SUCCESS", ["body"])
    else:
        assert (ended.state, repr(ended.value)) == (first.state, repr(first.value))
        assert demanding.calls == []


# -- the setting


def _bound(keys: Any) -> Celery:
    app = an_app(idempotency_cipher=keys)

    @app.task(base=IdempotentTask, shared=False)
    def charge(order: str) -> None: ...

    app.finalize()
    return app


@pytest.mark.parametrize("keys", ["", "hunter2", [NEW, "hunter2"], []])
def test_bad_key_is_refused_when_a_task_is_bound(keys: Any) -> None:
    """The earliest moment there is; and the error does not show it."""
    with pytest.raises(PolicyError, match="idempotency_cipher") as refused:
        _bound(keys)

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("required", "keys"), [(True, None), ("yes", NEW), (None, NEW)], ids=["no keys", "text", "None"]
)
def test_encryption_that_is_required_needs_keys(required: Any, keys: Any) -> None:
    """Or all would be written in clear."""
    app = an_app(idempotency_cipher=keys, idempotency_cipher_required=required)

    with pytest.raises(PolicyError, match="idempotency_cipher_required=.*: must be True or False, and True needs"):
        app.task(base=IdempotentTask, shared=False)(_pay_nothing).name  # noqa: B018 - a task is bound at its first use


def _pay_nothing() -> None: ...


def test_key_that_became_bad_is_refused_when_a_worker_starts() -> None:
    """Settings can change after the tasks are bound."""
    app = _bound(NEW)
    app.conf.idempotency_cipher = "hunter2"

    with pytest.raises(PolicyError, match="idempotency_cipher"):
        worker.check(app, "celery.concurrency.solo")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what installs it."""
    monkeypatch.delitem(sys.modules, "celery_idempotent.stores.keyring", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)

    with pytest.raises(PolicyError, match=re.escape('pip install "celery-idempotent[cipher]"')):
        _bound(NEW)


@pytest.mark.parametrize("namespace", ["", "CELERY"])
def test_reports_hide_the_keys(namespace: str) -> None:
    """``celery report`` and ``inspect conf`` print settings."""
    app = Celery("shop", set_as_current=False)
    app.config_from_object({f"{namespace}_IDEMPOTENCY_CIPHER".strip("_").lower(): [NEW]}, namespace=namespace or None)

    assert NEW not in app.conf.humanize(with_defaults=False)
    assert NEW not in str(app.conf.table(with_defaults=True))
