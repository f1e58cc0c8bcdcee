"""``Policy(publish="once")``: the decision row by row, what reaches the broker, and what callers get instead."""
# mypy: allow-untyped-decorators

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from celery.result import EagerResult
from kombu.exceptions import OperationalError
from sqlalchemy import create_engine, update
from sqlalchemy.orm import Session

from celery_idempotent import Policy, ReplayedFailure
from celery_idempotent.errors import LeaseLost, SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol import publishing
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, Replay, ReplayFailure, Run, decide
from celery_idempotent.protocol.publishing import Announce, Outgoing, Publication, Send, Underway
from celery_idempotent.protocol.record import BLANK, Record, Status, bounded, marked
from celery_idempotent.stores.sql import SQLStore, schema
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import Ended, Shop, deliver, redeliver, signalled
from tests.support.scene import raising

NOW = 1_800_000_100_000
QUEUED_FOR = 3_600_000
LEASE = 60_000

ASKED: dict[str, Any] = {"task": "orders.charge", "task_id": "mine", "app": "shop", "process": "here:1:2"}
OPERATION = Operation(identity=Identity("k", "f" * 64), policy=Policy(publish="once"), worker="", **ASKED)
TIMES: dict[str, Any] = {"lease_until": NOW + LEASE, "created_at": NOW, "updated_at": NOW}
FIRST = BLANK.but(key="k", status=Status.RELEASED, revision="new", fingerprint="f" * 64, **TIMES, **ASKED)
"""What is announced of a new operation: what a claim would say of it, without what only an attempt has."""


def _publish(record: Record | None, *, is_gone: bool = False, **changes: Any) -> Publication:
    outgoing = Outgoing(operation=OPERATION, queued_for=QUEUED_FOR)._replace(**changes)
    return publishing.publication(record, outgoing, NOW, "new", is_gone=is_gone)


_record = a_record().but(key="k", task_id="theirs").but
QUEUED = FIRST.but(task_id="theirs", revision="old", lease_until=NOW + 1)
STALE = QUEUED.but(lease_until=NOW)
RUNNING = _record(lease_until=NOW - OPERATION.grace + 1)
OVER = _record(lease_until=NOW - OPERATION.grace)
RELEASED = _record(status=Status.RELEASED, lease_until=NOW + 9, attempts=3, steps={"charge": {}})
COMPLETED, FAILED = (_record(status=each, expires_at=NOW // 1000 + 1) for each in (Status.COMPLETED, Status.FAILED))
CUT: dict[str, Any] = {"task_id": bounded("x" * 300)}
EARLY, GONE, AWAITED = {"comes_back": False}, {"is_gone": True}, {"awaited": True}


@pytest.mark.parametrize("queued_for", [QUEUED_FOR, 5_000])
def test_a_new_operation_is_announced_for_a_lease_and_confirmed_for_longer(queued_for: int) -> None:
    """What is confirmed names no process: it counts whatever becomes of its publisher, and until it expires."""
    outgoing = Outgoing(operation=OPERATION, queued_for=queued_for)
    first = FIRST.but(lease_until=NOW + min(queued_for, LEASE))
    assert publishing.publication(None, outgoing, NOW, "new") == Announce(first, None)
    assert publishing.confirmed(first, outgoing, NOW + 7, "later") == first.but(
        revision="later", lease_until=NOW + 7 + queued_for, updated_at=NOW + 7, process=""
    )


@pytest.mark.parametrize(
    ("seen", "about", "expected"),
    [
        pytest.param(QUEUED, {}, Underway(QUEUED), id="queued"),
        pytest.param(RUNNING, {}, Underway(RUNNING), id="running, up to the end of the grace"),
        pytest.param(OVER, {}, Send(), id="lease and grace over"),
        pytest.param(COMPLETED, {}, Replay(COMPLETED), id="completed"),
        pytest.param(FAILED, {}, ReplayFailure(FAILED), id="failed"),
        pytest.param(_record(status=Status.UNKNOWN), {}, Send(), id="unknown"),
        pytest.param(RUNNING.but(**CUT), {}, Send(), id="running under an id that was too long to keep"),
        pytest.param(RUNNING.but(task_id="list[]"), {}, Send(), id="running as an item of a list"),
        pytest.param(RUNNING.but(task_id=""), {}, Send(), id="running under no id"),
        pytest.param(RUNNING.but(task_id="mine"), {}, Underway(RUNNING.but(task_id="mine")), id="its own body runs"),
        pytest.param(RUNNING, GONE, Send(), id="running in a process that is gone"),
        pytest.param(RUNNING, EARLY, Send(), id="running, and its message does not come back"),
        *(
            pytest.param(each, {**AWAITED, **more}, Send(), id=f"waited for: {each.status}")
            for each in (QUEUED, STALE, RUNNING, RELEASED, COMPLETED)
            for more in ({}, GONE)
        ),
        *(
            pytest.param(each.but(fingerprint="other"), {}, Send(), id=f"other arguments: {each.status}")
            for each in (QUEUED, RUNNING, RELEASED, COMPLETED)
        ),
        pytest.param(None, AWAITED, Announce(FIRST, None), id="waited for, and the first"),
    ],
)
def test_what_is_recorded_decides(seen: Record | None, about: Any, expected: Publication) -> None:
    """What is on its way, runs or has ended is not sent; what something waits for, or a delivery refuses, is."""
    assert _publish(seen, **about) == expected


@pytest.mark.parametrize(
    ("seen", "about"),
    [
        pytest.param(STALE, {}, id="queued for too long"),
        pytest.param(RELEASED, {}, id="released by an attempt, whatever its lease says"),
        pytest.param(QUEUED.but(**CUT), {}, id="queued under an id that was too long to keep"),
        pytest.param(QUEUED.but(task_id="mine"), {}, id="queued, and perhaps by who died before it was sent"),
        pytest.param(QUEUED, GONE, id="queued by a process that is gone, before or after it was sent"),
        pytest.param(RELEASED.but(verdict={"action": "rerun"}, label="order 1"), {}, id="judged by a person"),
    ],
)
def test_in_doubt_the_operation_is_announced_again(seen: Record, about: Any) -> None:
    """Attempts, token and steps stay, and so do the verdict and the label, whoever publishes it next."""
    kept = ("fencing_token", "attempts", "steps", "created_at", "label", "verdict")
    announced = FIRST.but(**{name: getattr(seen, name) for name in kept})
    assert _publish(seen, **about) == Announce(announced, seen)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_a_forgotten_outcome_counts_as_none(status: Status) -> None:
    """Only its fencing token stays."""
    seen = _record(status=status, expires_at=NOW // 1000, fencing_token=NOW + 5, attempts=3, fingerprint="other")
    assert _publish(seen) == Announce(FIRST.but(fencing_token=NOW + 5), seen)


@pytest.mark.parametrize("seen", [STALE, RELEASED.but(steps={})])
def test_other_arguments_take_the_place_of_what_binds_nobody(seen: Record) -> None:
    """Of a stale announcement, whose message may never come, and of a claim that was given back without a step."""
    decision = _publish(seen.but(fingerprint="other", label="old card"))
    assert isinstance(decision, Announce)
    kept = {"attempts": seen.attempts, "fencing_token": seen.fencing_token, "created_at": seen.created_at}
    assert decision.record == FIRST.but(**kept)


@pytest.mark.parametrize("fingerprint", ["f" * 64, "other"])
def test_a_delivery_takes_an_announcement_as_its_first_attempt(fingerprint: str) -> None:
    """With the next token, no takeover, and arguments that bind nobody before they were executed."""
    seen = QUEUED.but(fencing_token=NOW + 7, fingerprint=fingerprint)
    decision = decide(seen, OPERATION, NOW, owner="me", revision="new")
    assert isinstance(decision, Run)
    claimed = decision.record
    assert (decision.expected, claimed.owner, claimed.created_at) == (seen.revision, "me", seen.created_at)
    assert (claimed.attempts, claimed.takeovers, claimed.fencing_token) == (1, 0, NOW + 8)
    assert claimed.fingerprint == "f" * 64


ONCE = Policy("order_id", publish="once", remember=(LookupError,))
DAY = 86_400


@pytest.fixture
def shop() -> Shop:
    return Shop(ONCE)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has something else happen where Celery sends a message; ``then`` is called with its own function."""
    send = Celery.send_task

    def instead(then: Callable[[Callable[[], Any]], Any]) -> None:
        monkeypatch.setattr(Celery, "send_task", lambda *args, **options: then(lambda: send(*args, **options)))

    return instead


def _skipped(told: list[Any]) -> list[Any]:
    """The messages that were not sent: whose id is given, why, and whether it is only observed."""
    assert {name for name, _ in told} <= {"publish_skipped"}
    return [(about["task_id"], about["reason"], about["observed"]) for _, about in told]


def _ids(shop: Shop) -> list[str]:
    return [message.headers["id"] for message in shop.published()]


def _running(shop: Shop, **changes: Any) -> Record:
    until = shop.memory.now() + 60_000
    return shop.change(**{"status": Status.IN_PROGRESS, "owner": "a", "worker": "w", "lease_until": until, **changes})


def _failed(shop: Shop, error: Exception) -> Ended:
    shop.does = raising(error)
    return deliver(shop.charge, "o", task_id=shop.record.task_id)


def _completed(shop: Shop, **changes: Any) -> None:
    deliver(shop.charge, "o", task_id=shop.record.task_id)
    shop.change(**changes)


@pytest.mark.parametrize(
    ("happens", "args", "requests", "reason"),
    [
        (lambda shop: None, ("o",), 1, "queued"),
        (lambda shop: None, ("o", 2), 1, None),
        (lambda shop: shop.clock.advance(DAY * 1000), ("o",), 3, None),
        (_running, ("o",), 1, "running on w"),
        (lambda shop: _running(shop, process=marked("gone", "a")), ("o",), 1, None),
        (_completed, ("o",), 1, "completed earlier"),
        (lambda shop: _completed(shop, result=None, error="big"), ("o",), 1, None),
        (lambda shop: _failed(shop, KeyError("o")), ("o",), 1, "failed earlier: KeyError: 'o'"),
        (lambda shop: _failed(shop, ValueError("m")), ("o",), 3, None),
    ],
    ids=["queued", "queued with others", "stale", "running", "gone", "completed", "lost", "failed", "tried again"],
)
def test_what_is_recorded_decides_whether_a_message_is_sent(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, happens: Any, args: Any, requests: int, reason: Any
) -> None:
    """What is queued, runs or has an outcome is not sent, and its id is given. Else a message has an id of its own."""
    monkeypatch.setattr("celery_idempotent.engine.claim.is_gone", lambda process: process == "gone")
    first = shop.charge.delay("o")
    assert (_ids(shop), shop.store.asked) == ([first.id], ["swap"] * 2)
    happens(shop)
    shop.store.asked.clear()

    with signalled() as told:
        again = shop.charge.delay(*args)
    assert shop.store.asked == ["swap"] * requests
    assert (again.id == first.id, _ids(shop)) == ((True, []) if reason else (False, [again.id]))
    assert _skipped(told) == ([(first.id, reason, False)] if reason else [])


def test_fifty_racing_publishers_send_one_message(shop: Shop) -> None:
    """Whoever wins: all have its id."""
    shop.charge.delay("another, for the connection")
    shop.published()
    begin = threading.Barrier(50)
    with ThreadPoolExecutor(50) as threads:
        ids = {*threads.map(lambda _: (begin.wait(), shop.charge.delay("o").id)[1], range(50))}
    assert [*ids] == _ids(shop)


@pytest.mark.parametrize("backend", ["cache+memory://", "disabled://"])
@pytest.mark.parametrize(
    ("raises", "private", "state", "answer"),
    [
        (None, False, "SUCCESS", "charged 1"),
        (KeyError("no such order"), False, "FAILURE", KeyError),
        (KeyError("no such order"), True, "FAILURE", ReplayedFailure),
    ],
)
def test_operation_that_has_ended_answers_at_once(
    backend: str, raises: Exception | None, private: bool, state: str, answer: Any
) -> None:
    """With what is recorded, whatever the result backend knows; it is a result like any that is ready."""
    shop, heard = Shop(replace(ONCE, private=private), result_backend=backend), []
    first = shop.charge.delay("o")
    if raises is not None:
        shop.does = raising(raises)
    shop.redeliver()

    again = shop.charge.delay("o")
    again.then(lambda result: heard.append(result.result))

    value = again.get(timeout=0, propagate=False)
    assert (again.as_tuple()[0][0], again.state, heard) == (first.id, state, [value])
    assert (value if raises is None else type(value)) == answer
    if raises is not None:
        with pytest.raises(answer):
            again.get(timeout=0)


@pytest.mark.parametrize("steers", [Ignore, SafeToRetry, LeaseLost])
def test_recorded_failure_never_steers_its_caller(steers: type[Exception]) -> None:
    """Whoever can write the store chooses the type; in another task's body it would end that one's delivery."""
    shop = Shop(Policy("order_id", publish="once", on_takeover="refuse"))
    shop.charge.delay("o")
    shop.does = raising(ValueError("m"))
    shop.redeliver()
    described = {"module": steers.__module__, "type": steers.__qualname__, "message": "m", "args": ["k", 1]}
    shop.change(result=runtime_of(shop.app).codec.encode(described).data)
    with pytest.raises(ReplayedFailure):
        shop.charge.delay("o").get(timeout=0)


def test_running_operation_without_late_acknowledgement_is_published(shop: Shop) -> None:
    """Its own message would not come back if its worker died."""
    with pytest.warns(match="acks_late is off"):
        shop.charge = shop.task(ONCE, name="early", acks_late=False)
    first = shop.charge.delay("o")
    _running(shop)
    assert [first.id, shop.charge.delay("o").id] == _ids(shop)


@pytest.mark.parametrize(
    ("options", "counts_for"),
    [
        ({}, 7_200),
        ({"countdown": 90}, 7_290),
        ({"eta": timedelta(seconds=90)}, 7_290),
        ({"expires": 20}, 20),
        ({"expires": timedelta(seconds=20)}, 20),
        ({"countdown": 9_000, "expires": 9_001}, 9_001),
        ({"expires": -1e30}, 0),
        ({"countdown": 1e30}, 10 * 365 * DAY + 7_200),
    ],
)
@pytest.mark.parametrize("form", [datetime.isoformat, lambda moment: moment.replace(tzinfo=None)])
def test_message_counts_as_queued_by_the_setting_from_when_it_is_due(
    options: dict[str, Any], counts_for: int, form: Any, monkeypatch: pytest.MonkeyPatch, broker: Any
) -> None:
    """And no longer than until it expires: then nobody will execute it. Until it is sent, a lease at most."""
    shop = Shop(ONCE, idempotency_queued_for=7_200)
    counts: list[int] = []
    broker(lambda send: counts.append(shop.record.lease_until - shop.memory.now()))
    now = shop.app.now()
    monkeypatch.setattr(shop.app, "now", lambda: now)
    given = {name: form(now + each) if isinstance(each, timedelta) else each for name, each in options.items()}

    shop.charge.apply_async(("o",), **given)

    counts.append(shop.record.lease_until - shop.memory.now())
    assert counts == [min(60, counts_for) * 1000, counts_for * 1000]


@pytest.mark.parametrize(("is_sent", "is_seen"), [(False, True), (True, True), (True, False)])
def test_publisher_that_dies_unconfirmed_holds_the_others_up_for_a_lease_at_most(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, broker: Any, is_sent: bool, is_seen: bool
) -> None:
    """Nobody knows whether it has sent its message. On its machine its end is seen; elsewhere a lease has to pass."""
    with monkeypatch.context() as patch:
        if not is_sent:
            broker(lambda send: None)
        patch.setattr("celery_idempotent.integration.messages.publishing.confirm", lambda *given: None)
        shop.charge.delay("o")
    broker(lambda send: send())
    first = shop.record.task_id
    assert _ids(shop) == [first] * is_sent
    if is_seen:
        monkeypatch.setattr("celery_idempotent.engine.claim.is_gone", bool)
    else:
        shop.clock.advance(59_999)
        assert shop.charge.delay("o").id == first
        shop.clock.advance(1)

    again = shop.charge.delay("o")

    assert again.id != first
    assert shop.charge.delay("o").id == again.id
    assert _ids(shop) == [again.id]


def test_message_that_was_confirmed_counts_when_its_publisher_has_ended(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the reply to the confirmation is lost, which is told, and is no failure of the publication."""
    shop.store.faults.extend(["none", "reply lost"])
    first = shop.charge.delay("o")
    assert "not confirmed" in caplog.text
    monkeypatch.setattr("celery_idempotent.engine.claim.is_gone", bool)
    shop.clock.advance((DAY - 1) * 1000)
    assert shop.charge.delay("o").id == first.id


def test_record_of_a_fast_worker_is_neither_confirmed_nor_withdrawn(shop: Shop, broker: Any) -> None:
    """What it has written is not written over, also where the broker refused a message that it had taken."""
    broker(lambda send: (send(), shop.redeliver()))
    shop.charge.delay("o")
    assert shop.record.status is Status.COMPLETED
    broker(
        lambda send: (
            shop.change(shop.record_of("p"), status=Status.IN_PROGRESS, owner="a"),
            raising(OperationalError("no broker"))(),
        )
    )
    with pytest.raises(OperationalError):
        shop.charge.delay("p")
    assert [each.owner for each in shop.memory.scan(status=Status.IN_PROGRESS)] == ["a"]


def test_until_it_is_done_and_then_again() -> None:
    """With ``retain=0`` calls are spared while a message is queued or executed, and the next one runs the body."""
    shop = Shop(replace(ONCE, retain=0))
    shop.does = lambda order_id, cents: shop.charge.delay("o").id
    for runs in (1, 2):
        first = shop.charge.delay("o")
        assert shop.charge.delay("o").id == first.id
        assert shop.redeliver() == [Ended("SUCCESS", first.id)]
        assert len(shop.runs) == runs
    assert shop.published() == []


@pytest.mark.parametrize(
    ("happens", "args", "error"),
    [
        (lambda shop: None, ("o",), OperationalError("no broker")),
        (lambda shop: None, ("o",), SystemExit()),
        (lambda shop: shop.charge.delay("o"), ("o", 2), OperationalError("no broker")),
        (lambda shop: (shop.charge.delay("o"), _failed(shop, ValueError())), ("o",), OperationalError("no broker")),
        (lambda shop: None, ("o",), None),
    ],
    ids=["new", "told to end", "announced by another", "with attempts", "a time that Celery refuses"],
)
def test_refused_message_leaves_the_record_as_it_was(
    shop: Shop, broker: Any, happens: Any, args: Any, error: BaseException | None
) -> None:
    """The broker's error surfaces; what others have announced or attempted stays, with steps, token and worker."""
    happens(shop)
    before = shop.record_of("o")
    if error is not None:
        broker(raising(error))
    with pytest.raises(type(error) if error else (TypeError, ValueError, AttributeError)):
        shop.charge.apply_async(args, **({} if error else {"expires": object(), "countdown": object()}))
    after = shop.record_of("o")
    if before and before.attempts:
        assert after is not None
        assert after.revision != before.revision, "no write may win by a record that was seen before"
        after = replace(after, revision=before.revision)
    assert after == before


@pytest.mark.parametrize("strikes_after", [1, 2])
def test_what_strikes_surfaces_and_keeps_no_message_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, strikes_after: int
) -> None:
    """Such as the soft time limit of a body that publishes: its next try sends, unless the message was sent."""
    swap = shop.memory.swap

    def struck(new: Record, expected: str | None) -> Record | None:
        stored = swap(new, expected)
        if shop.store.asked == ["swap"] * strikes_after:
            raise SoftTimeLimitExceeded
        return stored

    monkeypatch.setattr(shop.memory, "swap", struck)
    with pytest.raises(SoftTimeLimitExceeded):
        shop.charge.delay("o")
    assert (shop.record_of("o") is None) is (strikes_after == 1)
    assert [shop.charge.delay("o").id] == _ids(shop)


@pytest.mark.parametrize("error", [StoreUnavailable, StoreMisconfigured, None])
@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_message_is_sent_when_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[StoreUnavailable] | None, mode: Any
) -> None:
    """Or holds what this version cannot read, or breaks its word and neither swaps nor tells who did: it is logged."""
    shop = Shop(replace(ONCE, mode=mode))
    if error is None:
        monkeypatch.setattr(shop.store, "swap", lambda new, expected: None)
    else:
        shop.store.away = {"swap": error("memory", "swap", "no answer")}
    assert [shop.charge.delay("o").id] == _ids(shop)
    assert "idempotency.store_unavailable" in caplog.text


@pytest.mark.parametrize("private", [False, True])
def test_call_whose_key_cannot_be_derived_is_sent_and_logged(
    shop: Shop, private: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its delivery tells the caller. Under ``private`` the text of an exception is not logged."""

    def key(order_id: str, cents: int) -> str:
        raise ValueError(f"bad card {order_id}")

    shop.task(Policy(key, publish="once", private=private), name="cards").delay("4111")
    assert "idempotency.not_announced task=cards" in caplog.text
    assert ("4111" in caplog.text, len(shop.published())) == (not private, 1)


def test_retry_and_replacement_are_published(shop: Shop) -> None:
    """It continues the operation, which is running; so does a replacement, whose result would otherwise never come."""

    def flaky(task: Any, order_id: str) -> int:
        if task.request.retries < 2:
            raise task.retry(countdown=0, args=(f"{order_id}!",))
        return int(task.request.retries)

    shop.charge = shop.task(Policy(publish="once"), flaky, name="flaky", bind=True)
    first = shop.charge.delay("o")
    shop.store.asked.clear()
    states = []
    while messages := shop.published():
        assert [message.headers["id"] for message in messages] == [first.id]
        states += [redeliver(shop.app, message).state for message in messages]
    assert states == ["RETRY", "RETRY", "SUCCESS"]
    assert len(shop.store.asked) == 3 * 3
    assert [shop.charge.apply_async(("o",), retries=1).id] == _ids(shop) != [first.id]
    front = shop.task(None, lambda task: task.replace(shop.charge.si("o")), "front", bind=True)
    result = front.delay()
    shop.redeliver()
    assert _ids(shop) == [result.id]


def test_postponed_conflict_and_outage_are_published(shop: Shop) -> None:
    """They are the first message itself."""
    first = shop.charge.delay("o")
    _running(shop)
    assert [each.state for each in shop.redeliver()] == ["RETRY"]
    shop.store.away = {"swap": StoreUnavailable("memory", "swap", "no answer")}
    assert [each.state for each in shop.redeliver()] == ["RETRY"]
    assert _ids(shop) == [first.id]


def test_a_suppressed_message_is_a_child_of_the_task_that_asked_for_it(shop: Shop) -> None:
    """As the message would have been; but no task is its own, or a walk through results would go in circles."""

    def parent(task: Any) -> list[str]:
        ids = [shop.charge.apply_async(("o",), add_to_parent=again).id for again in (True, False)]
        assert task.delay().id == task.request.id
        assert [child.id for child in task.request.children] == ids[:1]
        return ids

    first = shop.charge.delay("o")
    again = shop.task(Policy(publish="once"), parent, name="parent", bind=True)
    assert deliver(again, task_id="one").value == [first.id] * 2
    assert _ids(shop) == [first.id]


def test_eager_calls_run(shop: Shop) -> None:
    """Nothing is published, so nothing is announced: the guard of the call itself decides."""
    shop.app.conf.task_always_eager = True
    results = [shop.charge.delay("o") for _ in range(2)]
    assert [(type(each), each.get()) for each in results] == [(EagerResult, "charged 1")] * 2
    assert shop.store.asked == ["swap"] * 3
    assert shop.charge.apply(("o",)).get() == shop.charge("o") == "charged 1"


@pytest.mark.parametrize("ended", [False, True])
def test_a_callback_is_called_whoever_publishes(shop: Shop, ended: bool) -> None:
    """A message with ``link`` is sent under its own id, by whatever argument it is given."""
    thank = shop.task(Policy("order_id"), name="thank")
    first = shop.charge.delay("o")
    if ended:
        shop.redeliver()
    by_name = shop.charge.apply_async(("o",), link=thank.si("a"))
    by_place = shop.charge.apply_async(("o",), {}, None, None, thank.si("b"))
    assert _ids(shop) == ([] if ended else [first.id]) + [by_name.id, by_place.id]
    assert len({first.id, by_name.id, by_place.id}) == 3


def test_group_chain_and_chord_go_on(shop: Shop) -> None:
    """Of operations that have an outcome: every member is sent, and every result that was handed out comes."""
    shop.does = lambda order_id, cents: order_id
    for order in "abc":
        shop.charge.delay(order)
    shop.redeliver()
    frozen = shop.charge.si("a")
    handed_out = frozen.freeze()
    frozen.apply_async()
    a, b, c = (shop.charge.si(order) for order in "abc")
    results = [group(a, b).apply_async(), chain(a, b, c).apply_async(), chord([a, b], c).apply_async()]
    while shop.redeliver():
        pass
    assert [each.get(timeout=1) for each in (handed_out, *results)] == ["a", ["a", "b"], "c", "c"]
    assert shop.runs == ["a", "b", "c"]


def test_observing_publishes_all_and_tells_what_would_have_been_suppressed() -> None:
    """Under their own ids; where nothing is observed either, publishing costs nothing."""
    shop = Shop(replace(ONCE, mode="off"))
    ids = [shop.charge.delay("o").id for _ in range(2)]
    assert (shop.store.asked, _ids(shop)) == ([], ids)
    shop = Shop(replace(ONCE, mode="observe"))
    with signalled() as told:
        ids = [shop.charge.delay("o").id for _ in range(3)]
    assert _skipped(told) == [(ids[0], "queued", True)] * 2
    assert (_ids(shop), len(set(ids))) == (ids, 3)


def test_relay_of_an_outbox_publishes_once(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands in for a killed relay finds the operation announced, and cannot tell whether that was sent."""
    store = shop.app.conf.idempotency_store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    engine = create_engine(store._url)
    with Session(engine) as session:
        ids = [outbox.send(session, shop.charge, "o") for _ in range(3)]
        session.commit()
    with monkeypatch.context() as patch:
        patch.setattr(SQLStore, "forget", lambda store, published: None)
        assert (outbox.relay(shop.app), _ids(shop)) == (3, ids[:1])
    with engine.begin() as connection:
        connection.execute(update(schema.outbox).values(taken_until=0))
    assert (outbox.relay(shop.app), _ids(shop)) == (3, ids[:1])
    assert outbox.relay(shop.app) == 0
    engine.dispose()
    store.close()
