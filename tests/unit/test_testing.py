"""What the test kit gives to users: stores, the check of concurrent histories, and ``assert_effect_once``."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from celery import Celery, Task
from celery.exceptions import Reject
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from celery_idempotent import AtMostOnce, IdempotencyWarning, IdempotentTask, Keyed, Policy, current_attempt, idempotent
from celery_idempotent.engine import claim
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.operation import Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import FakeStore, FaultyStore, assert_effect_once
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.contract.parallel import Exchange, is_linearizable, race
from celery_idempotent.testing.scenarios import ScenarioStore, WorkerDied
from celery_idempotent.testing.stores import installed
from tests.support.deliveries import an_app, published
from tests.support.scene import raising


def test_fake_store_keeps_time_by_hand_shows_its_records_and_meets_faults() -> None:
    """Its clock stands until it is advanced, forwards or backwards; what was planned happens to the coming swaps."""
    store = FakeStore("request lost", "reply lost")
    before = store.now()
    store.advance(1.5)
    store.advance(-2)
    assert store.now() == before - 500

    lost, written = a_record(), a_record()
    for record in (lost, written):
        with pytest.raises(StoreUnavailable, match=r"FakeStore\(\)"):
            store.swap(record, None)

    assert store.records == [written]
    assert [each.status for each in store.swaps] == [Status.IN_PROGRESS] * 2


def test_installed_store_gives_way_to_what_was_there() -> None:
    """A store, a URL or nothing, also if the block raises, and by any name: what is set afterwards counts again."""
    for before, namespace in ((None, ""), ("memory://", ""), (FakeStore(), ""), ("memory://", "CELERY")):
        app = Celery("a", set_as_current=False, namespace=namespace)
        if before is not None:
            app.conf.idempotency_store = before
        store: Store = FakeStore()
        with suppress(KeyError), installed(store, app):
            assert app.conf.idempotency_store is store
            raise KeyError
        assert app.conf.get("idempotency_store") is before
        app.conf.idempotency_store = store
        assert app.conf.idempotency_store is store


def test_store_is_behind_all_that_records() -> None:
    """Behind an app that is not named, in place of a ``store=``, and beside an app whose settings nobody can load."""
    broken, unnamed = Celery("broken", set_as_current=False, config_source="no.such.module"), an_app()
    store = FakeStore()

    @idempotent(Policy("order"), store="memory://")
    def ship(order: str) -> None: ...

    @idempotent(Policy("order"), app=unnamed)
    def pack(order: str) -> None: ...

    with installed(store, broken):
        ship("o-1")
        pack("o-1")

    assert len(store.records) == 2
    assert runtime_of(unnamed).store is not store


def calls(text: str) -> list[Exchange]:
    """``swap a>b=reply 0-1``, ``get =reply 0-1`` and ``delete a>=True 0-1``, with "-" for nothing."""
    words: dict[str, Any] = {"-": None, "": None, "True": True}
    found = []
    for kind, asked, during in (each.split(" ") for each in text.split(", ") if each):
        (expected, _, new), reply = asked.partition("=")[0].partition(">"), asked.partition("=")[2]
        given = [words.get(each, each) for each in (new, expected, reply)]
        found.append(Exchange(kind, *given, *map(int, during.split("-"))))
    return found


FIRST = "swap ->a=a 0-1"
POSSIBLE = {
    "nothing happened": "",
    "one after the other": f"{FIRST}, swap a>b=b 2-3, get =b 4-5",
    "a loser is told who won": "swap ->a=a 0-5, swap ->b=a 0-5",
    "a resend finds its own write": f"{FIRST}, swap ->a=a 2-3",
    "a read beside a write sees the old or the new": f"{FIRST}, swap a>b=b 2-9, get =a 3-4, get =b 5-6, get =b 7-8",
    "a key can be claimed again once deleted": f"{FIRST}, delete a>=True 2-9, swap ->b=b 2-9, swap ->c=b 2-9",
    "a replacement finds nothing beside a deletion": f"{FIRST}, swap a>b=- 2-9, delete a>=True 2-9",
}
IMPOSSIBLE = {
    "two winners of an empty key": "swap ->a=a 0-5, swap ->b=b 0-5",
    "two winners of one revision": f"{FIRST}, swap a>b=b 2-9, swap a>c=c 2-9",
    "a read that goes back": f"{FIRST}, swap a>b=b 2-9, get =b 3-4, get =a 5-6",
    "an acknowledged write that is not seen": f"{FIRST}, get =- 2-3",
    "a write seen before it was asked for": "get =a 0-1, swap ->a=a 2-3",
    "a loser that had won": "swap ->a=- 0-1, get =a 2-3",
    "a deletion of another revision": f"{FIRST}, delete b>=True 2-3",
    "two deletions of one revision": f"{FIRST}, delete a>=True 2-9, delete a>=True 2-9",
    "a record that comes back": f"{FIRST}, delete a>=True 2-3, get =a 4-5",
    "a resend that overwrites a successor": f"{FIRST}, swap a>b=b 2-3, swap ->a=a 4-5",
}


@pytest.mark.parametrize("name", [*POSSIBLE, *IMPOSSIBLE])
def test_history_is_accepted_if_it_is_possible(name: str) -> None:
    """In whatever order its calls are listed."""
    answers = {is_linearizable(each) for each in itertools.permutations(calls((POSSIBLE | IMPOSSIBLE)[name]))}
    assert answers == {name in POSSIBLE}


def test_race_without_one_of_its_threads_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are at the start do not wait for one that the system refuses."""
    start, fates = threading.Thread.start, iter([None, None, RuntimeError("can't start new thread")])

    def refuse_the_third(self: threading.Thread) -> None:
        if error := next(fates):
            raise error
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        race([int] * 4)


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

    def task(self, body: Callable[[Any, Any], Any] | None = None, policy: Policy | None = None, **options: Any) -> Any:
        def send(task: Any, to: Any) -> Any:
            return body(task, to) if body else self.outbox.append(to)

        usual = {"name": f"shop.mail-{uuid4()}", "base": IdempotentTask, "idempotent": policy or Policy("to")}
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


def rows(report: str, marks: str = "> ") -> dict[str, int]:
    """The report's table: by scenario, its effects; all rows, or only those with one of these marks."""
    table = report.split("\n\n")[1].splitlines()
    start, end = table[0].index("scenario"), table[0].index("what its deliveries returned")
    return {line[start:end].strip(): int(line[1:start]) for line in table[1:] if line[0] in marks}


def broken(report: str) -> dict[str, int]:
    return rows(report, ">")


def test_effect_under_its_key_is_once(shop: Rehearsals) -> None:
    """A receiver that knows effect keys has one effect in every scenario, each an operation of its own."""
    charges: set[str] = set()
    assert shop.report(lambda _, to: charges.add(current_attempt().effect_key("charge")), effects=charges) == ""
    assert len(charges) == 16
    keyed = Policy("to", effects={"charge": Keyed()})
    pay = shop.task(lambda _, to: current_attempt().step("charge", lambda step: charges.add(step.key)), keyed)
    assert shop.report(pay, effects=lambda: len(charges)) == ""


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
    ("policy", "promise", "marked", "word"),
    [
        (None, "exactly once", LOST_AT_THE_END, 'promise="at least once"'),
        (None, "at most once", LOST_AT_THE_END, ""),
        (None, "at least once", {}, ""),
        (REFUSE, "exactly once", LOST_AT_THE_CLAIM, "died, raised OutcomeUnknown, raised OutcomeUnknown"),
        (REFUSE, "at least once", LOST_AT_THE_CLAIM, 'promise="at most once"'),
        (REFUSE, "at most once", {}, ""),
    ],
)
@pytest.mark.parametrize("counts", [True, False], ids=["counted", "runs"])
def test_author_states_what_is_true(
    shop: Rehearsals, policy: Policy | None, promise: str, marked: dict[str, int], word: str, counts: bool
) -> None:
    """A plain effect is at least once under ``rerun`` and at most once under ``refuse``; uncounted, runs are."""
    report = shop.report(policy=policy, promise=promise, effects=shop.outbox if counts else None)

    assert bool(report) is bool(marked)
    if marked:
        assert broken(report) == marked
        assert set(rows(report, " ").values()) == {1}
        assert word in report
        assert ("Each run of the body to its end was counted" in report) is not counts


def test_task_that_is_not_protected_is_reported(shop: Rehearsals) -> None:
    """Without this library every duplicate is an effect more; the message says what to declare, or to set."""
    report = shop.report(base=Task, idempotent=None)

    repeated = {f"delivered {how}": 2 for how in ("twice", "again as the body begins", "again as the body ends")}
    died = {"the worker dies as the body begins": 2, "the worker dies as the body ends": 3}
    assert rows(report) == {"delivered once": 1, **repeated, **died}
    assert "base=IdempotentTask" in report

    report = shop.report(policy=Policy("to", mode="observe"))
    assert (broken(report)["delivered twice"], "mode='observe'" in report) == (2, True)


def _writes_anything(store: Any, new: Record, expected: str | None, *writes: Any) -> Record:
    memory = store.store
    memory._records[new.key] = new
    memory.committed.extend(*writes or [[]])
    return new


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong"),
    [
        (claim.Claim, "complete", lambda *_, **__: Written()),
        (claim, "_twice", lambda swap, *write: _writes_anything(swap.__self__, *write)),
    ],
)
def test_broken_guard_is_reported(
    shop: Rehearsals, owner: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that does not keep its promise fails the weakest of them, in the scenarios that one expects."""
    monkeypatch.setattr(owner, attribute, wrong)
    report = shop.report(promise="at least once")
    assert broken(report).keys() >= {"delivered twice", "delivered again as the body ends"}
    assert "although no worker died" in report


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_task_that_loses_messages_is_reported(shop: Rehearsals, option: str) -> None:
    """A message dies with its worker then, and no library brings it back."""
    task = shop.task(None, None, **{option: False})
    with pytest.warns(IdempotencyWarning, match=option):
        shop.app.finalize()
    report = shop.report(task, promise="at least once")
    assert broken(report)["the worker dies before the claim"] == 0
    assert [each for each in ("task_acks_late", "task_reject_on_worker_lost") if each not in report] == []


def test_failing_body_is_reported_as_such(shop: Rehearsals) -> None:
    """It gives its claim back and runs again, unless its failure is an outcome; by default it is no effect."""

    def fail(task: Any, to: str) -> None:
        shop.outbox.append(to)
        raise ValueError("no such mailbox")

    report = shop.report(fail, promise="at least once")
    assert (rows(report)["delivered twice"], "The body raised ValueError" in report) == (2, True)
    assert "A single delivery had 0 effects" in shop.report(fail, effects=None)
    assert shop.report(fail, Policy("to", remember=(ValueError,)), promise="at least once") == ""


def test_retries_and_rejected_messages_are_followed_to_their_end(shop: Rehearsals) -> None:
    """A retry that was published right before the death is delivered, and so is each message that comes back."""
    charges: set[str] = set()

    def retry(task: Any, to: str) -> None:
        if task.request.retries < 2:
            raise task.retry(countdown=3600)
        shop.outbox.append(to)

    report = shop.report(retry)

    assert "  died, postponed, postponed, None, None, None\n" in report
    assert broken(report) == {"the worker dies before the completion of delivery 3": 2}

    def reject_first(task: Any, to: str) -> None:
        if not task.request.delivery_info["redelivered"]:
            raise Reject("busy", requeue=True)
        charges.add(current_attempt().effect_key("charge"))

    assert shop.report(reject_first, effects=charges) == ""
    assert charges


def test_delivery_that_does_not_settle_is_given_up(shop: Rehearsals) -> None:
    """A body that rejects its message, or postpones it for ever, has no effect and ends the rehearsal."""

    rejecting = shop.report(raising(Reject("never again", requeue=False)))
    postponing = shop.report(lambda task, to: task.retry(countdown=1, max_retries=None), max_retries=None)
    assert rows(rejecting) == rows(postponing) == {"delivered once": 0}
    assert postponing.count("postponed") == 50
    assert ", ignored" in shop.report(policy=Policy("to", on_conflict="skip"))


def test_every_delivery_gets_its_own_arguments_as_off_the_wire(shop: Rehearsals) -> None:
    """A body that changes its arguments does not change those of the next delivery, and tuples come as lists."""
    seen: list[Any] = []

    def consume(task: Any, to: Any) -> None:
        seen.append([*to] if isinstance(to, list) else to)
        shop.outbox.append(to.pop())

    assert_effect_once(shop.task(consume), to=("a", "b"), effects=shop.outbox, promise="at least once")
    assert seen == [["a", "b"]] * len(seen)


def test_receiver_can_be_reset(shop: Rehearsals) -> None:
    """A receiver that knows the arguments again is reset before each scenario."""
    paid: set[str] = set()
    task = shop.task(lambda task, to: paid.add(to))
    assert rows(shop.report(task, effects=paid))["delivered twice"] == 0
    assert shop.report(task, effects=paid, reset=paid.clear) == ""


def test_what_a_body_publishes_goes_its_way(shop: Rehearsals) -> None:
    """Only the task's own retries are caught; other messages reach the app's broker."""
    shop.app = an_app()
    task = shop.task(lambda task, to: (task.apply_async(("other",)), shop.outbox.append(to)))  # type: ignore[func-returns-value]
    assert shop.report(task, promise="at least once") == ""
    assert len(published(shop.app)) == len(shop.outbox)


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (KeyError,)}], ids=["", "autoretry"])
def test_nothing_stays_behind(shop: Rehearsals, options: Any) -> None:
    """Store and task are as before in either case; Celery keeps an autoretried body in an attribute of its own."""
    task, store = shop.task(**options), shop.app.conf.idempotency_store
    before = dict(vars(task))
    assert shop.report(task, promise="at least once") == ""
    assert shop.report(task)
    assert (vars(task), shop.app.conf.idempotency_store, list(store.scan())) == (before, store, [])


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"effects": 7}, TypeError, "effects="),
        ({"promise": "exactly-once"}, ValueError, "must be one of"),
        *(({"task": each}, TypeError, "must be a Celery task") for each in (len, "shop.mail")),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_anything_runs(
    shop: Rehearsals, arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    """What does not count, a promise that is misspelt, a function or a name in place of a task."""
    task = arguments.pop("task", shop.task())
    with pytest.raises(error, match=told):
        assert_effect_once(task, "a@b", **{"effects": shop.outbox, **arguments})
    assert shop.outbox == []


def test_finished_step_protects_what_knows_no_keys(shop: Rehearsals) -> None:
    """Only between the effect and its record is it repeated: nowhere else, as a bare effect is."""

    def send(task: Any, to: str) -> None:
        current_attempt().step("mail", lambda step: shop.outbox.append(to))
        current_attempt().step("note", lambda step: None)

    report = shop.report(send)

    assert broken(report) == {"the worker dies before the end of step 'mail'": 2}
    assert {"the worker dies as the body ends", "the worker dies before the end of step 'note'"} <= rows(report).keys()
    assert shop.report(send, promise="at least once") == ""


def test_step_at_most_once_is_at_most_once(shop: Rehearsals) -> None:
    """What began is not made again; where that loses the effect, the report says what can be stated, or done."""
    policy = Policy("to", effects={"text": AtMostOnce()})
    task = shop.task(lambda _, to: current_attempt().step("text", lambda step: shop.outbox.append(to)), policy)
    assert shop.report(task, promise="at most once") == ""
    report = shop.report(task)

    places = ("two answers are lost at the beginning of", "the worker dies after the beginning of")
    assert broken(report) == {f"{each} step 'text'": 0 for each in places}
    assert 'State promise="at most once"; or declare it Keyed()' in report


def test_commit_is_once_and_reported_without_its_condition(shop: Rehearsals, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes is kept in the rehearsal's store; it is one of the writes at which all is tried."""
    write = {"Update": {"TableName": "stock", "Key": {"sku": "a"}}}
    task = shop.task(lambda task, to: current_attempt().commit("reserved", [write]))
    count: dict[str, Any] = {"effects": lambda: len(shop.app.conf.idempotency_store.committed)}
    assert shop.report(task, **count) == ""
    monkeypatch.setattr(FaultyStore, "swap_with", _writes_anything)
    lost = dict.fromkeys(("one reply is lost at the commit", "two answers are lost at the commit"), 2)
    assert broken(shop.report(task, **count)) == lost


class Ledger:
    """A table of the user's, in a SQLite file that is also the app's store."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE ledger (text TEXT)"))

    def insert(self, word: str) -> Any:
        return text(f"INSERT INTO ledger VALUES ('{word}')")

    def booked(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM ledger")).scalar_one())


@pytest.fixture
def ledger(shop: Rehearsals, tmp_path: Path) -> Iterator[Ledger]:
    url = shop.app.conf.idempotency_store = f"sqlite:///{tmp_path}/shop.sqlite"
    with closing(open_store(url)) as store:
        store.provision()
    ledger = Ledger(url)
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
    with closing(SQLStore(shop.app.conf.idempotency_store)) as outbox:
        messages = outbox.take(100, hold=1)

    assert len(messages) == ledger.booked() == 16  # the scenarios; what was rolled back has left nothing
    ledger.engine.dispose()
    assert not [each for each in psutil.Process().open_files() if each.path == ledger.engine.url.database]


@pytest.mark.parametrize("setting", [None, "memory://", MemoryStore()], ids=["none", "url", "store"])
def test_transaction_without_a_database_is_refused_with_the_remedy(shop: Rehearsals, setting: Any) -> None:
    """It needs an SQL store; that is said, not left to be guessed from a count of 0."""
    shop.app.conf.idempotency_store = setting
    report = shop.report(lambda task, to: current_attempt().transaction().__enter__())
    assert "to rehearse attempt.transaction(), give the test's app an SQL store" in report


def test_dead_attempt_writes_nothing_any_more() -> None:
    """Whatever its handlers try, in its own thread or in the heartbeat's; the next delivery is not concerned."""
    store, record = ScenarioStore(), a_record()
    completed, released = (record.but(status=each, revision=each) for each in (Status.COMPLETED, Status.RELEASED))
    store.plan({1: "dies before"})
    with store.delivering(), ThreadPoolExecutor(1) as heartbeat:
        store.swap(record, None)
        for _ in range(3):
            with pytest.raises(WorkerDied):
                store.swap(completed, record.revision)
        assert isinstance(heartbeat.submit(store.swap, released, record.revision).exception(), StoreUnavailable)
    assert store.get(record.key) == record
    with store.delivering():
        assert store.swap(released, record.revision) == released

    store, record = ScenarioStore(), a_record()
    store.plan({0: "dies after"})
    with store.delivering(), pytest.raises(WorkerDied):
        store.swap(record, None)
    assert store.get(record.key) == record, "the request had arrived; only the reply found nobody"
