"""``assert_effect_once`` accepts what happens once, reports what does not, and hides nothing."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Task
from celery.exceptions import Reject
from sqlalchemy import create_engine, text
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

REFUSE = Policy(key="to", on_takeover="refuse")
LOST_AT_THE_END = {"the worker dies as the body ends": 2, "the worker dies before the completion": 2}
LOST_AT_THE_CLAIM = dict.fromkeys(
    ("the worker dies as the body begins", "two answers are lost at the claim", "the worker dies after the claim"), 0
)


class Rehearsals:
    """Tasks of an app whose broker and backend are out of reach, and a receiver of mails that knows no keys."""

    def __init__(self) -> None:
        self.app = an_app(broker_url=NOWHERE, result_backend=NOWHERE)
        self.outbox: list[Any] = []
        self.numbers = itertools.count(1)

    def task(self, body: Callable[[Any, Any], Any] | None = None, policy: Policy | None = None, **options: Any) -> Any:
        def send(task: Any, to: Any) -> Any:
            if body is not None:
                return body(task, to)
            self.outbox.append(to)
            return f"mail {len(self.outbox)}"

        usual = {"name": f"shop.mail{next(self.numbers)}", "base": IdempotentTask, "idempotent": policy or Policy("to")}
        return self.app.task(bind=True, shared=False, **{**usual, **options})(send)

    def report(self, body: Any = None, policy: Policy | None = None, *, effects: Any = "", **options: Any) -> str:
        """What is said against a new task, or one that is given; nothing if its promise holds."""
        arguments = {name: options.pop(name) for name in ("promise", "reset") if name in options}
        task = body if isinstance(body, Task) else self.task(body, policy, **options)
        try:
            assert_effect_once(task, "a@b", effects=self.outbox if effects == "" else effects, **arguments)
        except AssertionError as error:
            return str(error)
        return ""


@pytest.fixture
def shop() -> Rehearsals:
    return Rehearsals()


def rows(report: str, marked: bool | None = None) -> dict[str, int]:
    """The report's table: by scenario, its effects; all rows, or only those that are marked as broken, or not."""
    table = report.split("\n\n")[1].splitlines()
    start, end = table[0].index("scenario"), table[0].index("what its deliveries returned")
    return {
        line[start:end].strip(): int(line[1:start])
        for line in table[1:]
        if marked is None or line.startswith(">") is marked
    }


def broken(report: str) -> dict[str, int]:
    return rows(report, marked=True)


def test_effect_under_its_key_is_once(shop: Rehearsals) -> None:
    """A receiver that knows effect keys has one effect in every scenario, each an operation of its own."""
    charges: set[str] = set()

    def charge(task: Any, to: str) -> None:
        charges.add(current_attempt().effect_key("charge"))

    def pay(task: Any, to: str) -> None:
        current_attempt().step("charge", lambda step: charges.add(step.key))

    assert shop.report(charge, effects=charges) == ""
    assert len(charges) == 16
    assert shop.report(pay, Policy("to", effects={"charge": Keyed()}), effects=lambda: len(charges)) == ""


def test_scenarios_cover_every_write(shop: Rehearsals) -> None:
    """Each end of the body, and each write with a lost request, a lost reply, an outage, and a death on either side."""
    fates = ("one request is lost at", "one reply is lost at", "two answers are lost at")
    deaths = ("the worker dies before", "the worker dies after")
    deliveries = ("once", "twice", "again as the body begins", "again as the body ends")

    assert set(rows(shop.report())) == {
        *(f"{what} {write}" for write in ("the claim", "the completion") for what in (*fates, *deaths)),
        *(f"delivered {how}" for how in deliveries),
        *(f"the worker dies as the body {does}" for does in ("begins", "ends")),
    }


@pytest.mark.parametrize(
    ("policy", "promise", "marked", "words"),
    [
        (None, "exactly once", LOST_AT_THE_END, ["effect_key", 'promise="at least once"', "died, 'mail 7', 'mail 7'"]),
        (None, "at most once", LOST_AT_THE_END, []),
        (None, "at least once", {}, []),
        (REFUSE, "exactly once", LOST_AT_THE_CLAIM, ["died, raised OutcomeUnknown, raised OutcomeUnknown"]),
        (REFUSE, "at least once", LOST_AT_THE_CLAIM, ['promise="at most once"']),
        (REFUSE, "at most once", {}, []),
    ],
)
@pytest.mark.parametrize("counts", [True, False], ids=["counted", "runs"])
def test_author_states_what_is_true(
    shop: Rehearsals, policy: Policy | None, promise: str, marked: dict[str, int], words: list[str], counts: bool
) -> None:
    """A plain effect is at least once under ``rerun`` and at most once under ``refuse``, not the other way round.

    Without a count every run of the body is an effect, as of a receiver that knows no repetition; it is said.
    """
    effects = shop.outbox if counts else None
    report = shop.report(policy=policy, promise=promise, effects=effects)

    assert bool(report) is bool(marked)
    if marked:
        assert report.startswith(
            f"the effect of shop.mail1 was promised {promise}; {len(marked)} of 16 scenarios broke"
        )
        assert broken(report) == marked
        assert set(rows(report, marked=False).values()) == {1}
        assert [each for each in words if each not in report] == []
        assert ("Each run of the body to its end was counted" in report) is not counts


def test_plain_task_is_reported(shop: Rehearsals) -> None:
    """Without this library every duplicate is an effect more; the message says what to declare."""
    report = shop.report(base=Task, idempotent=None)

    delivered = {f"delivered {how}": 2 for how in ("twice", "again as the body begins", "again as the body ends")}
    died = {f"the worker dies as the body {does}": count for does, count in (("begins", 2), ("ends", 3))}
    assert rows(report) == {"delivered once": 1, **delivered, **died}
    assert "base=IdempotentTask" in report


_decide: Any = protocol.decide


def _runs_always(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    return Run(_decide(None, operation, now, **nonces).record, record.revision if record else None)


def _replays_nothing(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    decision = _decide(record, operation, now, **nonces)
    return _runs_always(record, operation, now, **nonces) if isinstance(decision, Replay) else decision


def _writes_anything(store: Any, new: Record, expected: str | None, *writes: Any) -> Record:
    memory = store.store
    memory._records[new.key] = new
    memory.committed.extend(*writes or [[]])
    return new


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong", "scenarios"),
    [
        (claim, "decide", _runs_always, ["twice", "again as the body begins"]),
        (claim, "decide", _replays_nothing, ["twice"]),
        (claim.Claim, "complete", lambda *_, **__: Written(), ["twice", "again as the body ends"]),
        (claim, "_swap", _writes_anything, ["twice", "again as the body begins", "again as the body ends"]),
    ],
)
def test_broken_guard_is_reported(
    shop: Rehearsals, owner: Any, attribute: str, wrong: Any, scenarios: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that does not keep its promise fails the weakest of them, and in the scenarios one expects."""
    monkeypatch.setattr(owner, attribute, wrong)
    report = shop.report(promise="at least once")

    assert broken(report).keys() >= {f"delivered {each}" for each in scenarios}
    assert "although no worker died" in report


@pytest.mark.parametrize(
    ("options", "promise", "row", "effects", "word"),
    [
        ({"idempotent": Policy("to", mode="observe")}, "exactly once", "delivered twice", 2, "mode='observe'"),
        ({"idempotent": Policy("to", mode="off")}, "exactly once", "delivered twice", 2, "mode='off'"),
        # A message dies with its worker then, and no library brings it back.
        ({"acks_late": False}, "at least once", "the worker dies before the claim", 0, "task_reject_on_worker_lost"),
        ({"reject_on_worker_lost": False}, "at least once", "the worker dies before the claim", 0, "task_acks_late"),
    ],
)
def test_task_that_protects_nothing_or_loses_messages_is_reported(
    shop: Rehearsals, options: Any, promise: str, row: str, effects: int, word: str
) -> None:
    """With what to set."""
    task, option = shop.task(**options), next(iter(options))
    with pytest.warns(IdempotencyWarning, match=option) if effects == 0 else nullcontext():
        shop.app.finalize()
    report = shop.report(task, promise=promise)

    assert broken(report)[row] == effects
    assert word in report


def test_failing_body_is_reported_as_such(shop: Rehearsals) -> None:
    """It gives its claim back and runs again, unless its failure is an outcome; by default it is no effect."""

    def fail(task: Any, to: str) -> None:
        shop.outbox.append(to)
        raise ValueError("no such mailbox")

    report = shop.report(fail, promise="at least once")
    assert (rows(report)["delivered twice"], "the worker dies before the release" in rows(report)) == (2, True)
    assert "raised ValueError('no such mailbox')" in report
    assert "The body raised ValueError" in report
    assert "A single delivery had 0 effects" in shop.report(fail, effects=None)
    assert shop.report(fail, Policy("to", remember=(ValueError,)), promise="at least once") == ""


def test_retries_are_followed_to_their_end(shop: Rehearsals) -> None:
    """A task that retries itself is delivered again, with its count, until it is done; also when it dies on the way."""
    retries: list[int] = []

    def retry(task: Any, to: str) -> Any:
        retries.append(task.request.retries)
        if task.request.retries < 2:
            raise task.retry(countdown=3600)
        shop.outbox.append(to)
        return "sent"

    report = shop.report(retry)

    assert retries[:3] == [0, 1, 2]
    # A retry that was published right before the death is delivered, and so is the message that comes back.
    assert "  died, postponed, postponed, 'sent', 'sent', 'sent'\n" in report
    assert broken(report) == {"the worker dies before the completion of delivery 3": 2}
    assert rows(report)["the worker dies after the release"] == 1


def test_rejected_message_comes_back(shop: Rehearsals) -> None:
    """A message that its body gives back to the broker is delivered again, marked as such."""
    charges: set[str] = set()
    redelivered: list[bool] = []

    def reject_first(task: Any, to: str) -> None:
        redelivered.append(task.request.delivery_info["redelivered"])
        if not redelivered[-1]:
            raise Reject("busy", requeue=True)
        charges.add(current_attempt().effect_key("charge"))

    assert shop.report(reject_first, effects=charges) == ""
    assert redelivered[:2] == [False, True]


def test_every_ending_is_told(shop: Rehearsals) -> None:
    """A delivery that was skipped, rejected or failed is called so; fifty that do not settle are given up."""

    def reject(task: Any, to: str) -> None:
        raise Reject("never again", requeue=False)

    def postpone(task: Any, to: str) -> None:
        raise task.retry(countdown=1, max_retries=None)

    skipping, raising = (shop.report(policy=Policy("to", on_conflict=how)) for how in ("skip", "raise"))
    rejecting, postponing = shop.report(reject), shop.report(postpone, max_retries=None)

    assert "  delivered again as the body begins      'mail 3', ignored\n" in skipping
    assert ", raised InFlight\n" in raising
    assert rows(rejecting) == rows(postponing) == {"delivered once": 0}
    assert "  rejected\n" in rejecting
    assert postponing.count("postponed") == 50


def test_deliveries_at_once_overlap(shop: Rehearsals) -> None:
    """Unprotected, both are in the body at the same time; protected, the second comes while the first is in it."""
    inside: list[int] = []
    most: list[int] = []
    scenarios: list[None] = []
    meeting = threading.Barrier(2, timeout=30)

    def run(task: Any, to: str) -> None:
        inside.append(threading.get_ident())
        most.append(len(set(inside)))
        if len(scenarios) == 3:  # as the body begins
            meeting.wait()
        inside.remove(threading.get_ident())
        shop.outbox.append(to)

    shop.report(run, base=Task, idempotent=None, reset=lambda: scenarios.append(None))
    assert max(most) == 2
    scenarios.clear()
    most.clear()
    report = shop.report(run)

    assert max(most) == 1
    for end in ("begins", "ends  "):
        assert f"  delivered again as the body {end}      None, postponed, None\n" in report


def test_every_delivery_gets_its_own_arguments_as_off_the_wire(shop: Rehearsals) -> None:
    """A body that changes its arguments does not change those of the next delivery, and tuples come as lists."""
    seen: list[Any] = []

    def consume(task: Any, to: Any) -> None:
        seen.append((type(to), [*to]))
        shop.outbox.append(to.pop())

    assert_effect_once(shop.task(consume), to=("a", "b"), effects=shop.outbox, promise="at least once")
    assert {(kind, *values) for kind, values in seen} == {(list, "a", "b")}


def test_receiver_can_be_reset(shop: Rehearsals) -> None:
    """A receiver that knows the arguments again is reset before each scenario."""
    paid: set[str] = set()
    task = shop.task(lambda task, to: paid.add(to))

    assert rows(shop.report(task, effects=paid))["delivered twice"] == 0
    assert shop.report(task, effects=paid, reset=paid.clear) == ""


def test_what_a_body_publishes_goes_its_way() -> None:
    """Only the task's own retries are caught; other messages reach the app's broker."""
    app = an_app()
    runs: list[str] = []

    @app.task(shared=False, name="shop.notify")
    def notify(to: str) -> None: ...

    @app.task(base=IdempotentTask, bind=True, shared=False, name="shop.mail", idempotent=Policy(key="to"))
    def mail(task: Any, to: str) -> None:
        notify.delay(to)
        mail.apply_async(("other",))
        runs.append(to)

    assert_effect_once(mail, "self", effects=runs, promise="at least once")
    names = [message.headers["task"] for message in published(app)]
    assert [names.count(each) for each in ("shop.notify", "shop.mail")] == [len(runs)] * 2


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (KeyError,)}], ids=["", "autoretry"])
def test_nothing_stays_behind(shop: Rehearsals, options: Any) -> None:
    """The app's store and the task are as they were, whether the promise held or not.

    Celery wraps the body of a task with autoretry in an attribute of its own.
    """
    task, store = shop.task(**options), shop.app.conf.idempotency_store
    before = dict(vars(task))
    assert ("run" in before) is bool(options)

    assert shop.report(task, promise="at least once") == ""
    assert shop.report(task)

    assert vars(task) == before
    assert shop.app.conf.idempotency_store is store
    assert list(store.scan()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"effects": 7}, TypeError, "effects="),
        ({"effects": object()}, TypeError, "effects="),
        ({"promise": "exactly-once"}, ValueError, "must be one of"),
        *(({"task": each}, TypeError, "must be a Celery task") for each in (len, "shop.mail", None)),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_anything_runs(
    shop: Rehearsals, arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    """What does not count, a promise that is misspelt; a function, a name or a signature in place of a task."""
    task = arguments.pop("task", shop.task())
    with pytest.raises(error, match=told):
        assert_effect_once(task or shop.task().s("a@b"), "a@b", **{"effects": shop.outbox, **arguments})
    assert shop.outbox == []


def test_miscounting_is_told_apart_from_repetition(shop: Rehearsals) -> None:
    """If one delivery alone has no effect, or two, the count or the arguments are wrong, and nothing else is tried."""
    for number in (0, 2):
        report = shop.report(effects=lambda: number * len(shop.outbox))  # noqa: B023
        assert rows(report) == {"delivered once": number}
        assert f"A single delivery had {number} effects" in report


def test_finished_step_protects_what_knows_no_keys(shop: Rehearsals) -> None:
    """Only between the effect and its record is it repeated: nowhere else, as a bare effect is."""

    def send(task: Any, to: str) -> None:
        current_attempt().step("mail", lambda step: shop.outbox.append(to))
        current_attempt().step("note", lambda step: None)

    report = shop.report(send)

    assert broken(report) == {"the worker dies before the end of step 'mail'": 2}
    unbroken = {"the worker dies as the body ends", "the worker dies before the end of step 'note'"}
    assert unbroken <= rows(report, marked=False).keys()
    assert [tool for tool in ("step.key", "attempt.commit()", "AtMostOnce") if tool not in report] == []
    assert shop.report(send, promise="at least once") == ""


def test_step_at_most_once_is_at_most_once(shop: Rehearsals) -> None:
    """What began is not made again; where that loses the effect, the report says what can be stated, or done."""
    policy = Policy("to", effects={"text": AtMostOnce()})
    task = shop.task(lambda _, to: current_attempt().step("text", lambda step: shop.outbox.append(to)), policy)
    assert shop.report(task, promise="at most once") == ""
    report = shop.report(task)

    places = ("two answers are lost at the beginning of", "the worker dies after the beginning of")
    assert broken(report) == {f"{each} step 'text'": 0 for each in places}
    assert "died, raised OutcomeUnknown, raised OutcomeUnknown" in report
    assert 'State promise="at most once"; or declare it Keyed()' in report


def test_step_that_takes_its_beginning_back_is_followed(shop: Rehearsals) -> None:
    """A call that says it had no effect is made again, and each of its three writes is died at."""

    def begin(task: Any, to: str) -> None:
        def send(step: Any) -> None:
            if not task.request.retries:
                raise task.retry(countdown=1)
            shop.outbox.append(to)

        current_attempt().step("text", send)

    task = shop.task(begin, Policy("to", effects={"text": AtMostOnce()}))
    assert shop.report(task, promise="at most once") == ""
    assert "the worker dies before the withdrawal of step 'text'" in rows(shop.report(task))


def test_commit_is_once_and_reported_without_its_condition(shop: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is kept in the rehearsal's store; it is one of the writes at which all is tried."""
    write = {"Update": {"TableName": "stock", "Key": {"sku": "a"}}}
    task = shop.task(lambda task, to: current_attempt().commit("reserved", [write]))

    def count() -> int:
        return len(shop.app.conf.idempotency_store.committed)

    assert shop.report(task, effects=count) == ""
    monkeypatch.setattr(FaultyStore, "swap_with", _writes_anything)
    report = shop.report(task, effects=count)

    assert broken(report) == {"one reply is lost at the commit": 2, "two answers are lost at the commit": 2}
    assert {f"the worker dies {when} the commit" for when in ("before", "after")} <= set(rows(report))


class Ledger:
    """A table of the user's, in a SQLite file that is also the app's store."""

    def __init__(self, file: Path) -> None:
        self.url = f"sqlite:///{file}"
        self.engine = create_engine(self.url)
        self.do("CREATE TABLE ledger (text TEXT)")

    def insert(self, word: str) -> Any:
        return text(f"INSERT INTO ledger VALUES ('{word}')")

    def do(self, statement: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement) if isinstance(statement, str) else statement)

    def booked(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM ledger")).scalar_one())


@pytest.fixture
def ledger(shop: Rehearsals, tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "shop.sqlite")
    with closing(open_store(ledger.url)) as store:
        store.provision()
    shop.app.conf.idempotency_store = ledger.url
    yield ledger
    ledger.engine.dispose()


@pytest.mark.parametrize("using", [lambda engine: nullcontext(), Session], ids=["", "session"])
def test_transaction_is_once(shop: Rehearsals, ledger: Ledger, using: Any) -> None:
    """Rows and messages are in the app's own database, once each in every way to die at the commit."""

    def book(task: Any, to: str) -> Any:
        with suppress(LookupError), current_attempt().transaction() as tx:
            tx.execute(ledger.insert("undone"))  # a rollback of the body's own leaves no row and no record
            raise LookupError
        with using(ledger.engine) as session, current_attempt().transaction(session) as tx:
            (session or tx).execute(ledger.insert(to))
            tx.send(task, "follow-up")
            return tx.done("booked")

    assert shop.report(book, effects=ledger.booked) == ""
    with closing(SQLStore(ledger.url)) as outbox:
        messages = outbox.take(100, hold=1)

    assert len(messages) == ledger.booked() == 16  # the scenarios; what was rolled back has left nothing
    ledger.engine.dispose()
    assert not [each for each in psutil.Process().open_files() if each.path == ledger.engine.url.database]


def test_effect_beside_the_transaction_is_reported(shop: Rehearsals, ledger: Ledger) -> None:
    """What is done on another connection is not undone with it; a commit without an answer is no excuse."""

    def book(task: Any, to: str) -> Any:
        with current_attempt().transaction() as tx:
            done = tx.done("booked")
        ledger.do(ledger.insert(to))
        return done

    def book_early(task: Any, to: str) -> Any:
        ledger.do(ledger.insert(to))
        with current_attempt().transaction() as tx:
            return tx.done("booked")

    late, early = {"the worker dies after the commit": 0}, ("one request is lost at", "the worker dies before")
    assert broken(shop.report(book, effects=ledger.booked)) == late
    assert broken(shop.report(book_early, effects=ledger.booked)) == {f"{each} the commit": 2 for each in early}


@pytest.mark.parametrize("setting", [None, "memory://", MemoryStore()], ids=["none", "url", "store"])
def test_transaction_without_a_database_is_refused_with_the_remedy(shop: Rehearsals, setting: Any) -> None:
    """It needs an SQL store; that is said, not left to be guessed from a count of 0."""

    def book(task: Any, to: str) -> Any:
        with current_attempt().transaction() as tx:
            shop.outbox.append(to)
            return tx.done("booked")

    shop.app.conf.idempotency_store = setting

    assert "to rehearse attempt.transaction(), give the test's app an SQL store" in shop.report(book)
    assert shop.outbox == []


def test_transaction_of_a_claim_that_is_gone_writes_nothing(ledger: Ledger) -> None:
    """Its swap tells whose record it is, as that of a real store does."""
    record = a_record()
    theirs = record.but(revision="theirs", owner="theirs")

    with closing(ScenarioStore(ledger.url)) as store:
        store.swap(theirs, None)
        transaction = store.begin()
        transaction.connection.execute(ledger.insert("o-1"))
        assert transaction.swap(record.but(revision="completed", status=Status.COMPLETED), record.revision) == theirs
        transaction.rollback()

    assert ledger.booked() == 0


def test_dead_attempt_writes_nothing_any_more() -> None:
    """Whatever its handlers try, in its own thread or in the heartbeat's; the next delivery is not concerned."""
    store, record = ScenarioStore(), a_record()
    completed, released = (record.but(status=each, revision=each) for each in (Status.COMPLETED, Status.RELEASED))
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
    assert (errors, store.get(record.key)) == ([StoreUnavailable], record)

    with store.delivering():
        assert store.swap(released, record.revision) == released

    store, record = ScenarioStore(), a_record()
    store.plan((0, "dies after"))
    with store.delivering(), pytest.raises(WorkerDied):
        store.swap(record, None)
    assert store.get(record.key) == record, "the request had arrived; only the reply found nobody"


def test_writes_have_names_that_people_know() -> None:
    """A claim may take several requests; what comes after it is called by what it does."""
    store, record = ScenarioStore(), a_record()
    renewed, taken_over = record.but(revision="renewed"), record.but(revision="taken over")
    theirs = record.but(revision="theirs", status=Status.RELEASED)

    store.plan(None)
    with store.delivering():
        store.swap(record, None)
        store.swap(renewed, record.revision)
        store.swap(theirs, renewed.revision)
    with store.delivering():
        store.swap(record, None)
        store.swap(taken_over, theirs.revision)

    assert store.writes == [
        *("the claim", "a write of the body", "the release"),
        *("the claim of delivery 2", "the claim of delivery 2, again"),
    ]
