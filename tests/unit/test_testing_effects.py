"""``assert_effect_once`` accepts what happens once, reports what does not, and hides nothing."""
# mypy: allow-untyped-decorators

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery, Task
from celery.exceptions import Reject
from sqlalchemy import Column, MetaData, String, Table, create_engine, func, select
from sqlalchemy.orm import Session

from celery_idempotent import AtMostOnce, IdempotencyWarning, IdempotentTask, Keyed, Policy, current_attempt
from celery_idempotent.engine import claim
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.operation import Operation, Replay, Run, Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import FaultyStore, assert_effect_once
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.scenarios import ScenarioStore, WorkerDied
from tests.support.deliveries import an_app, published

NOWHERE = "redis://127.0.0.1:1"


@pytest.fixture
def app() -> Celery:
    """An app whose broker and backend are out of reach, as they are where unit tests run."""
    app = an_app()
    app.conf.update(broker_url=NOWHERE, result_backend=NOWHERE)
    return app


@pytest.fixture
def outbox() -> list[str]:
    """A receiver that knows no keys."""
    return []


@pytest.fixture
def declare(app: Celery, outbox: list[str]) -> Callable[..., Task]:
    """Declares a task whose effect is one mail."""

    def declare(policy: Policy | None = None, body: Callable[[Any, str], Any] | None = None, **options: Any) -> Task:
        def send(self: Any, to: str) -> Any:
            outbox.append(to)
            return f"mail {len(outbox)}"

        defaults = {"name": "shop.mail", "base": IdempotentTask, "idempotent": policy or Policy(key="to")}
        return app.task(bind=True, shared=False, **{**defaults, **options})(body or send)

    return declare


def report_of(*args: Any, **kwargs: Any) -> str:
    """What it says against a task; it must say something."""
    with pytest.raises(AssertionError) as raised:
        assert_effect_once(*args, **kwargs)
    return str(raised.value)


def rows(report: str, marked: bool | None = None) -> dict[str, int]:
    """The report's table: by scenario, its effects; all rows, or only those that are marked as broken, or not."""
    table = report.split("\n\n")[1].splitlines()
    start = table[0].index("scenario")
    end = table[0].index("what its deliveries returned")
    return {
        line[start:end].strip(): int(line[1:start])
        for line in table[1:]
        if marked is None or line.startswith(">") is marked
    }


def test_effect_under_its_key_is_once(declare: Callable[..., Task]) -> None:
    """A receiver that knows effect keys has one effect in every scenario."""
    charges: dict[str, str] = {}

    def charge(self: Any, to: str) -> str:
        charges[current_attempt().effect_key("charge")] = to
        return "ch_1"

    assert_effect_once(declare(body=charge), "o-1", effects=charges)
    assert_effect_once(declare(body=charge), to="o-1", effects=lambda: len(charges))

    assert len(charges) == 32  # sixteen scenarios each, every one an operation of its own


def test_repetition_after_a_death_is_reported_where_it_happens(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Under ``rerun`` a worker that dies between effect and completion repeats the effect; the table says so."""
    report = report_of(declare(), "a@b", effects=outbox)

    assert rows(report, marked=True) == {
        "the worker dies as the body ends": 2,
        "the worker dies before the completion": 2,
    }
    assert set(rows(report, marked=False).values()) == {1}
    assert report.startswith("the effect of shop.mail was promised exactly once; 2 of 16 scenarios broke that:\n")
    assert "  died, 'mail 7', 'mail 7'\n" in report
    assert "effect_key" in report
    assert 'promise="at least once"' in report


def test_scenarios_cover_every_write(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Each end of the body, and each write with a lost request, a lost reply, an outage, and a death on either side."""
    writes = {
        f"{what} {write}"
        for write in ("the claim", "the completion")
        for what in (
            "one request is lost at",
            "one reply is lost at",
            "two answers are lost at",
            "the worker dies before",
            "the worker dies after",
        )
    }
    deliveries = {"once", "twice", "again as the body begins", "again as the body ends"}

    assert set(rows(report_of(declare(), "a@b", effects=outbox))) == writes | {
        *(f"delivered {how}" for how in deliveries),
        *(f"the worker dies as the body {does}" for does in ("begins", "ends")),
    }


def test_author_states_what_is_true(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A plain effect is at least once under ``rerun`` and at most once under ``refuse``, not the other way round."""
    rerun, refuse = declare(), declare(Policy(key="to", on_takeover="refuse"), name="shop.once")

    assert_effect_once(rerun, "a@b", effects=outbox, promise="at least once")
    assert_effect_once(refuse, "a@b", effects=outbox, promise="at most once")
    too_often = report_of(rerun, "a@b", effects=outbox, promise="at most once")
    missing = report_of(refuse, "a@b", effects=outbox, promise="at least once")
    either = report_of(refuse, "a@b", effects=outbox)

    assert set(rows(too_often, marked=True).values()) == {2}
    assert (
        rows(missing, marked=True)
        == rows(either, marked=True)
        == {
            "the worker dies as the body begins": 0,
            "two answers are lost at the claim": 0,
            "the worker dies after the claim": 0,
        }
    )
    assert "died, raised OutcomeUnknown, raised OutcomeUnknown" in missing
    assert 'promise="at most once"' in missing


def test_plain_task_is_reported(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Without this library every duplicate is an effect more; the message says what to declare."""
    report = report_of(declare(base=Task, idempotent=None), "a@b", effects=outbox)

    assert rows(report) == {
        "delivered once": 1,
        "delivered twice": 2,
        "delivered again as the body begins": 2,
        "delivered again as the body ends": 2,
        "the worker dies as the body begins": 2,
        "the worker dies as the body ends": 3,
    }
    assert "plain Celery task" in report
    assert "base=IdempotentTask" in report


def _runs_always(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    return Run(_decide(None, operation, now, **nonces).record, record.revision if record else None)


def _replays_nothing(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    decision = _decide(record, operation, now, **nonces)
    return _runs_always(record, operation, now, **nonces) if isinstance(decision, Replay) else decision


def _writes_anything(store: Any, new: Record, expected: str | None) -> Record:
    store.store._records[new.key] = new
    return new


_decide: Any = protocol.decide

BROKEN_GUARDS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "grants every claim": (claim, "decide", _runs_always, {"delivered twice", "delivered again as the body begins"}),
    "replays nothing": (claim, "decide", _replays_nothing, {"delivered twice"}),
    "records no completion": (
        claim.Claim,
        "complete",
        lambda self, encoded, lost=None: Written(),
        {"delivered twice", "delivered again as the body ends"},
    ),
    "writes without a condition": (
        claim,
        "_swap",
        _writes_anything,
        {"delivered twice", "delivered again as the body begins", "delivered again as the body ends"},
    ),
}


@pytest.mark.parametrize("name", BROKEN_GUARDS)
def test_broken_guard_is_reported(
    name: str, declare: Callable[..., Task], outbox: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that does not keep its promise fails the weakest of them, and in the scenarios one expects."""
    owner, attribute, broken, expected = BROKEN_GUARDS[name]
    monkeypatch.setattr(owner, attribute, broken)

    report = report_of(declare(), "a@b", effects=outbox, promise="at least once")

    assert set(rows(report, marked=True)) >= expected
    assert "although no worker died" in report


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_policy_that_protects_nothing_is_reported(mode: Any, declare: Callable[..., Task], outbox: list[str]) -> None:
    """Neither watching nor being off keeps an effect to one."""
    report = report_of(declare(Policy(key="to", mode=mode)), "a@b", effects=outbox)

    assert rows(report)["delivered twice"] == 2
    assert f"mode='{mode}'" in report


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_message_lost_with_its_worker_is_reported(
    option: str, app: Celery, declare: Callable[..., Task], outbox: list[str]
) -> None:
    """Without late acknowledgement a message dies with its worker, and no library brings it back."""
    task = declare(**{option: False})
    with pytest.warns(IdempotencyWarning, match=option):
        app.finalize()

    report = report_of(task, "a@b", effects=outbox, promise="at least once")

    assert rows(report)["the worker dies before the claim"] == 0
    assert "task_reject_on_worker_lost" in report


def test_failing_body_is_reported_as_such(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A body that raises gives its claim back and runs again, unless its failure is an outcome."""

    def fail(self: Any, to: str) -> None:
        outbox.append(to)
        raise ValueError("no such mailbox")

    report = report_of(declare(body=fail), "a@b", effects=outbox, promise="at least once")
    assert rows(report)["delivered twice"] == 2
    assert "the worker dies before the release" in rows(report)
    assert "raised ValueError('no such mailbox')" in report
    assert "The body raised ValueError" in report

    remembering = declare(Policy(key="to", remember=(ValueError,)), body=fail, name="shop.remembering")
    assert_effect_once(remembering, "a@b", effects=outbox, promise="at least once")


def test_retries_are_followed_to_their_end(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A task that retries itself is delivered again, with its count, until it is done; also when it dies on the way."""
    retries: list[int] = []

    def retry(self: Any, to: str) -> Any:
        retries.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=3600)
        outbox.append(to)
        return "sent"

    report = report_of(declare(body=retry), "a@b", effects=outbox)

    assert retries[:3] == [0, 1, 2]
    assert "postponed, postponed, 'sent'" in report
    # A retry that was published right before the death is delivered, and so is the message that comes back.
    assert "  died, postponed, postponed, 'sent', 'sent', 'sent'\n" in report
    assert rows(report, marked=True) == {"the worker dies before the completion of delivery 3": 2}
    assert rows(report)["the worker dies after the release"] == 1


def test_task_that_never_settles_is_given_up(declare: Callable[..., Task], outbox: list[str]) -> None:
    """After fifty deliveries of one message; it had no effect, and that is said."""

    def postpone(self: Any, to: str) -> None:
        raise self.retry(countdown=1, max_retries=None)

    report = report_of(declare(body=postpone, max_retries=None), "a@b", effects=outbox)

    assert rows(report) == {"delivered once": 0}
    assert report.count("postponed") == 50
    assert "A single delivery had 0 effects" in report


def test_rejected_message_comes_back(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A message that its body gives back to the broker is delivered again, marked as such."""
    charges: set[str] = set()
    redelivered: list[bool] = []

    def reject_first(self: Any, to: str) -> None:
        redelivered.append(self.request.delivery_info["redelivered"])
        if not self.request.delivery_info["redelivered"]:
            raise Reject("busy", requeue=True)
        charges.add(current_attempt().effect_key("charge"))

    assert_effect_once(declare(body=reject_first), "a@b", effects=charges)
    assert redelivered[:2] == [False, True]


def test_every_ending_is_told(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A delivery that was skipped, rejected or failed is called so."""

    def reject(self: Any, to: str) -> None:
        raise Reject("never again", requeue=False)

    skipping = report_of(declare(Policy(key="to", on_conflict="skip"), name="shop.skipping"), "a@b", effects=outbox)
    raising = report_of(declare(Policy(key="to", on_conflict="raise"), name="shop.raising"), "a@b", effects=outbox)
    rejecting = report_of(declare(body=reject), "a@b", effects=outbox)

    assert "  delivered again as the body begins      'mail 3', ignored\n" in skipping
    assert ", raised InFlight\n" in raising
    assert rows(rejecting) == {"delivered once": 0}
    assert "  rejected\n" in rejecting


def test_deliveries_at_once_overlap(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Unprotected, both are in the body at the same time; protected, the second comes while the first is in it."""
    inside: list[int] = []
    most = {"protected": 0, "plain": 0}

    def body(name: str) -> Callable[[Any, str], None]:
        def run(self: Any, to: str) -> None:
            inside.append(threading.get_ident())
            most[name] = max(most[name], len(set(inside)))
            meeting.wait(0.05)
            inside.remove(threading.get_ident())
            outbox.append(to)

        return run

    meeting = threading.Event()
    report_of(declare(body=body("plain"), base=Task, idempotent=None), "a@b", effects=outbox)
    meeting.set()
    report = report_of(declare(body=body("protected"), name="shop.protected"), "a@b", effects=outbox)

    assert most == {"plain": 2, "protected": 1}
    assert "  delivered again as the body begins      None, postponed, None\n" in report
    assert "  delivered again as the body ends        None, postponed, None\n" in report


def test_every_delivery_gets_its_own_arguments_as_off_the_wire(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A body that changes its arguments does not change those of the next delivery, and tuples come as lists."""
    seen: list[Any] = []

    def consume(self: Any, to: Any) -> None:
        seen.append(list(to))
        assert isinstance(to, list)
        outbox.append(to.pop())

    assert_effect_once(declare(body=consume), ("a", "b"), effects=outbox, promise="at least once")
    assert all(each == ["a", "b"] for each in seen)


def test_receiver_can_be_reset(declare: Callable[..., Task]) -> None:
    """A receiver that knows the arguments again is reset before each scenario."""
    paid: set[str] = set()

    def pay(self: Any, to: str) -> None:
        paid.add(to)

    task = declare(body=pay)
    assert rows(report_of(task, "o-1", effects=paid))["delivered twice"] == 0
    assert_effect_once(task, "o-1", effects=paid, reset=paid.clear)


def test_what_a_body_publishes_goes_its_way(outbox: list[str]) -> None:
    """Only the task's own retries are caught; other messages reach the app's broker."""
    app = an_app()
    queue = app.conf.task_default_queue

    @app.task(shared=False, name="shop.notify")
    def notify(to: str) -> None: ...

    @app.task(base=IdempotentTask, bind=True, shared=False, name="shop.mail", idempotent=Policy(key="to"))
    def mail(self: Any, to: str) -> None:
        notify.delay(to)
        if to == "self":
            mail.apply_async(("other",))
        outbox.append(to)

    assert_effect_once(mail, "self", effects=outbox, promise="at least once")
    names = [message.headers["task"] for message in published(app, queue)]
    assert {name: names.count(name) for name in set(names)} == {"shop.notify": len(outbox), "shop.mail": len(outbox)}


def test_nothing_stays_behind(declare: Callable[..., Task], outbox: list[str], app: Celery) -> None:
    """The app's store and the task are as they were, whether the promise held or not."""
    task, store = declare(), app.conf.idempotency_store
    before = dict(vars(task))

    assert_effect_once(task, "a@b", effects=outbox, promise="at least once")
    report_of(task, "a@b", effects=outbox)

    assert vars(task) == before
    assert app.conf.idempotency_store is store
    assert isinstance(store, MemoryStore)
    assert list(store.scan()) == []


def test_task_with_autoretry_stays_whole(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Celery wraps the body of such a task in an attribute of its own, which must be there afterwards."""
    task = declare(autoretry_for=(KeyError,))
    before = dict(vars(task))
    assert "run" in before

    assert_effect_once(task, "a@b", effects=outbox, promise="at least once")

    assert vars(task) == before


def test_without_a_count_every_run_of_the_body_is_an_effect(declare: Callable[..., Task]) -> None:
    """Which is true of a receiver that knows no repetition; the report says what was counted."""
    rerun, refuse = declare(), declare(Policy(key="to", on_takeover="refuse"), name="shop.once")

    assert_effect_once(rerun, "a@b", promise="at least once")
    assert_effect_once(refuse, "a@b", promise="at most once")
    report = report_of(rerun, "a@b")

    assert set(rows(report, marked=True).values()) == {2}
    assert "Each run of the body to its end was counted as an effect" in report


def test_body_that_fails_is_no_effect_by_default(declare: Callable[..., Task]) -> None:
    """It did not come to its end."""

    def fail(self: Any, to: str) -> None:
        raise LookupError(to)

    assert "A single delivery had 0 effects" in report_of(declare(body=fail), "a@b")


@pytest.mark.parametrize("effects", [7, object()])
def test_effects_must_count(effects: Any, declare: Callable[..., Task]) -> None:
    """Neither a function nor a container is refused before anything runs."""
    with pytest.raises(TypeError, match="effects="):
        assert_effect_once(declare(), "a@b", effects=effects)


def test_task_must_be_one(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A function, a signature or a name is refused before anything runs."""
    for task in (len, declare().s("a@b"), "shop.mail"):
        with pytest.raises(TypeError, match="must be a Celery task"):
            assert_effect_once(task, "a@b", effects=outbox)
    assert outbox == []


def test_promise_must_be_one(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A misspelt promise is refused before anything runs."""
    with pytest.raises(ValueError, match="must be one of"):
        assert_effect_once(declare(), "a@b", effects=outbox, promise="exactly-once")  # type: ignore[arg-type]
    assert outbox == []


def test_miscounting_is_told_apart_from_repetition(declare: Callable[..., Task], outbox: list[str]) -> None:
    """If one delivery alone has no effect, or two, the count or the arguments are wrong, and nothing else is tried."""
    task = declare()
    for effects, number in ((lambda: 0, 0), (lambda: 2 * len(outbox), 2)):
        report = report_of(task, "a@b", effects=effects)
        assert rows(report) == {"delivered once": number}
        assert f"A single delivery had {number} effects" in report


def test_step_under_its_key_is_once(declare: Callable[..., Task]) -> None:
    """Each end of its call is the worker's end once, and the receiver knows the repetition."""
    charges: dict[str, str] = {}

    def pay(self: Any, to: str) -> Any:
        return current_attempt().step("charge", lambda step: charges.setdefault(step.key, to))

    assert_effect_once(declare(Policy(key="to", effects={"charge": Keyed()}), body=pay), "o-1", effects=charges)


def test_finished_step_protects_what_knows_no_keys(declare: Callable[..., Task], outbox: list[str]) -> None:
    """Only between the effect and its record is it repeated: nowhere else, as a bare effect is."""

    def send(self: Any, to: str) -> None:
        current_attempt().step("mail", lambda step: outbox.append(to))
        current_attempt().step("note", lambda step: None)

    task = declare(body=send)
    report = report_of(task, "a@b", effects=outbox)

    assert rows(report, marked=True) == {"the worker dies before the end of step 'mail'": 2}
    assert rows(report)["the worker dies as the body ends"] == 1
    assert rows(report)["the worker dies before the end of step 'note'"] == 1
    assert all(tool in report for tool in ("step.key", "attempt.commit()", "AtMostOnce"))
    assert_effect_once(task, "a@b", effects=outbox, promise="at least once")


def test_step_at_most_once_is_at_most_once(declare: Callable[..., Task], outbox: list[str]) -> None:
    """What began is not made again; where that loses the effect, the report says what can be stated, or done."""

    def text(self: Any, to: str) -> None:
        current_attempt().step("text", lambda step: outbox.append(to))

    task = declare(Policy(key="to", effects={"text": AtMostOnce()}), body=text)
    assert_effect_once(task, "a@b", effects=outbox, promise="at most once")
    report = report_of(task, "a@b", effects=outbox)

    assert rows(report, marked=True) == {
        "two answers are lost at the beginning of step 'text'": 0,
        "the worker dies after the beginning of step 'text'": 0,
    }
    assert "died, raised OutcomeUnknown, raised OutcomeUnknown" in report
    assert 'State promise="at most once"; or declare it Keyed()' in report


def test_step_that_takes_its_beginning_back_is_followed(declare: Callable[..., Task], outbox: list[str]) -> None:
    """A call that says it had no effect is made again, and each of its three writes is died at."""

    def text(self: Any, to: str) -> None:
        def send(step: Any) -> None:
            if not self.request.retries:
                raise self.retry(countdown=1)
            outbox.append(to)

        current_attempt().step("text", send)

    task = declare(Policy(key="to", effects={"text": AtMostOnce()}), text)
    assert_effect_once(task, "a@b", effects=outbox, promise="at most once")

    assert "the worker dies before the withdrawal of step 'text'" in rows(report_of(task, "a@b", effects=outbox))


@pytest.fixture
def reserve(declare: Callable[..., Task]) -> Task:
    """A task whose effect is committed with its record."""

    def reserve(self: Any, to: str) -> Any:
        return current_attempt().commit("reserved", [{"Update": {"TableName": "stock", "Key": {"sku": to}}}])

    return declare(body=reserve)


def test_commit_is_once(app: Celery, reserve: Task) -> None:
    """What it writes is kept in the rehearsal's store; every way to die at the commit leaves it once."""
    assert_effect_once(reserve, "a", effects=lambda: len(app.conf.idempotency_store.committed))


def test_commit_without_its_condition_is_reported(app: Celery, reserve: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is one of the writes at which answers are lost and workers die."""

    def unconditional(faulty: Any, new: Record, expected: str, writes: Any) -> Record:
        faulty.store._records[new.key] = new
        faulty.store.committed.extend(writes)
        return new

    monkeypatch.setattr(FaultyStore, "swap_with", unconditional)
    report = report_of(reserve, "a", effects=lambda: len(app.conf.idempotency_store.committed))

    assert rows(report, marked=True) == {"one reply is lost at the commit": 2, "two answers are lost at the commit": 2}
    assert {f"the worker dies {when} the commit" for when in ("before", "after")} <= set(rows(report))


class _Ledger:
    """A table of the user's, in a SQLite file that is also the app's store."""

    def __init__(self, file: Path) -> None:
        self.url = f"sqlite:///{file}"
        self.engine = create_engine(self.url)
        self._table = Table("ledger", MetaData(), Column("text", String(100)))
        self._table.metadata.create_all(self.engine)

    def insert(self, text: str) -> Any:
        return self._table.insert().values(text=text)

    def booked(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(self._table)).scalar_one()


@pytest.fixture
def ledger(app: Celery, tmp_path: Path) -> Iterator[_Ledger]:
    ledger = _Ledger(tmp_path / "shop.sqlite")
    store = open_store(ledger.url)
    store.provision()
    store.close()
    app.conf.idempotency_store = ledger.url
    yield ledger
    ledger.engine.dispose()


def test_transaction_is_once(declare: Callable[..., Task], ledger: _Ledger) -> None:
    """Rows and messages are in the app's own database, once each in every way to die at the commit."""

    def book(self: Any, to: str) -> Any:
        with current_attempt().transaction() as tx:
            tx.execute(ledger.insert(to))
            tx.send(self, "follow-up")
            return tx.done("booked")

    task = declare(body=book)
    outbox = SQLStore(ledger.url)

    assert_effect_once(task, "o-1", effects=ledger.booked)
    messages = outbox.take(100, hold=1)
    outbox.close()

    assert len(messages) == ledger.booked() == 16  # the scenarios; what was rolled back has left nothing
    ledger.engine.dispose()
    assert not [each for each in psutil.Process().open_files() if each.path == ledger.engine.url.database]


def test_session_of_the_users_is_rehearsed(declare: Callable[..., Task], ledger: _Ledger) -> None:
    """The transaction may be one of an ORM session's."""

    def book(self: Any, to: str) -> Any:
        with Session(ledger.engine) as session, current_attempt().transaction(session) as tx:
            session.execute(ledger.insert(to))
            return tx.done("booked")

    assert_effect_once(declare(body=book), "o-1", effects=ledger.booked)


def test_effect_beside_the_transaction_is_reported(declare: Callable[..., Task], ledger: _Ledger) -> None:
    """What is done on another connection is not undone with it; a commit without an answer is no excuse."""

    def book(self: Any, to: str) -> Any:
        with current_attempt().transaction() as tx:
            done = tx.done("booked")
        with ledger.engine.begin() as connection:
            connection.execute(ledger.insert(to))
        return done

    def book_early(self: Any, to: str) -> Any:
        with ledger.engine.begin() as connection:
            connection.execute(ledger.insert(to))
        with current_attempt().transaction() as tx:
            return tx.done("booked")

    late = report_of(declare(body=book), "o-1", effects=ledger.booked)
    early = report_of(declare(body=book_early, name="shop.early"), "o-1", effects=ledger.booked)

    assert rows(late, marked=True) == {"the worker dies after the commit": 0}
    assert rows(early, marked=True) == {"one request is lost at the commit": 2, "the worker dies before the commit": 2}


def test_body_that_goes_on_after_a_failed_commit_is_followed(declare: Callable[..., Task], ledger: _Ledger) -> None:
    """A rollback of the body's own leaves no row and no record."""

    def book(self: Any, to: str) -> Any:
        with suppress(LookupError), current_attempt().transaction() as tx:
            tx.execute(ledger.insert(to))
            raise LookupError
        with current_attempt().transaction() as tx:
            tx.execute(ledger.insert(to))
            return tx.done("booked")

    assert_effect_once(declare(body=book), "o-1", effects=ledger.booked)


@pytest.mark.parametrize("setting", [None, "memory://", MemoryStore()], ids=["none", "url", "store"])
def test_transaction_without_a_database_is_refused_with_the_remedy(
    setting: Any, app: Celery, declare: Callable[..., Task], outbox: list[str]
) -> None:
    """It needs an SQL store; that is said, not left to be guessed from a count of 0."""

    def book(self: Any, to: str) -> Any:
        with current_attempt().transaction() as tx:
            outbox.append(to)
            return tx.done("booked")

    app.conf.idempotency_store = setting
    report = report_of(declare(body=book), "o-1", effects=outbox)

    assert "has no transactions; to rehearse attempt.transaction(), give the test's app an SQL store" in report
    assert outbox == []


def test_transaction_of_a_claim_that_is_gone_writes_nothing(ledger: _Ledger) -> None:
    """Its swap tells whose record it is, as that of a real store does."""
    record = a_record()
    theirs = replace(record, revision="theirs", owner="theirs")
    completed = replace(record, revision="completed", status=Status.COMPLETED)

    with closing(ScenarioStore(ledger.url)) as store:
        store.swap(theirs, None)
        transaction = store.begin()
        transaction.connection.execute(ledger.insert("o-1"))
        assert transaction.swap(completed, record.revision) == theirs
        transaction.rollback()

    assert ledger.booked() == 0


def test_dead_attempt_writes_nothing_any_more() -> None:
    """Whatever its handlers try, in its own thread or in the heartbeat's; the next delivery is not concerned."""
    store, record = ScenarioStore(), a_record()
    completed, released = (
        a_record().__class__(**{**record.to_fields(), "status": status, "revision": str(status)})
        for status in (Status.COMPLETED, Status.RELEASED)
    )
    errors: list[type[BaseException]] = []

    def beside() -> None:
        with pytest.raises(StoreUnavailable) as raised:
            store.swap(released, record.revision)
        errors.append(raised.type)

    store.plan((1, "dies before"))
    with store.delivering():
        store.swap(record, None)
        for _ in range(3):
            with pytest.raises(WorkerDied):
                store.swap(completed, record.revision)
        heartbeat = threading.Thread(target=beside)
        heartbeat.start()
        heartbeat.join()
    assert errors == [StoreUnavailable]
    assert store.get(record.key) == record

    with store.delivering():
        assert store.swap(released, record.revision) == released


def test_death_after_a_write_leaves_it_stored() -> None:
    """The request had arrived; only the reply found nobody."""
    store, record = ScenarioStore(), a_record()

    store.plan((0, "dies after"))
    with store.delivering(), pytest.raises(WorkerDied):
        store.swap(record, None)

    assert store.get(record.key) == record


def test_writes_have_names_that_people_know() -> None:
    """A claim may take several requests; what comes after it is called by what it does."""
    store, record = ScenarioStore(), a_record()
    renewed = a_record().__class__(**{**record.to_fields(), "revision": "renewed"})
    theirs = a_record().__class__(**{**record.to_fields(), "revision": "theirs", "status": Status.RELEASED})
    taken_over = a_record().__class__(**{**record.to_fields(), "revision": "taken over"})

    store.plan(None)
    with store.delivering():
        store.swap(record, None)
        store.swap(renewed, record.revision)
        store.swap(theirs, renewed.revision)
    with store.delivering():
        store.swap(record, None)
        store.swap(taken_over, theirs.revision)

    assert store.writes == [
        "the claim",
        "a write of the body",
        "the release",
        "the claim of delivery 2",
        "the claim of delivery 2, again",
    ]
