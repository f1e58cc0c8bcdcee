"""A pool process that died in a body: its lease is ended, and only then its message goes back."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery.concurrency.base import BasePool
from celery.utils.imports import symbol_by_name
from celery.worker.request import create_request_cls
from celery.worker.state import task_accepted
from kombu.asynchronous import Hub

from celery_idempotent.engine import claim as claims
from celery_idempotent.engine.claim import claim, end_lease
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import OutcomeUnknown
from celery_idempotent.integration.broker import recovery
from celery_idempotent.integration.broker.recovery import mark
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.record import Record, Status
from tests.support.celeries import since_celery
from tests.support.deliveries import Shop, redeliver
from tests.support.scene import Scene, an_operation, raising
from tests.support.waiting import wait_until

GONE = ":".join((*this_process().split(":")[:2], "1"))
"""A process of this machine that had this one's pid before it."""

KILLED = WorkerLostError("signal 9")


def _held(store: Any, process: str, key: str = "k", **policy: Any) -> Record:
    decision = claim(store, an_operation(key, "f", **policy)._replace(process=process))
    assert isinstance(decision, Run)
    return decision.record


def test_claim_of_a_process_that_is_gone_is_taken_over_at_once(scene: Scene) -> None:
    """The next attempt knows that it takes over, and has its whole lease, however short."""
    held, begun, seen = _held(scene.store, GONE), scene.clock.now(), []

    def body(attempt: Any) -> None:
        attempt.ensure_owned()
        seen.append((attempt.is_takeover, attempt.number, attempt.fencing_token > held.fencing_token))

    scene.run(body, lease=0.5)
    assert seen == [(True, 2, True)]
    assert scene.clock.now() - begun < 1000


@pytest.mark.parametrize("takeovers", [{"on_takeover": "refuse"}, {"max_takeovers": 2}], ids=["refused", "poison"])
def test_what_must_not_be_repeated_ends_unknown(scene: Scene, takeovers: Any) -> None:
    """As if its lease had run out: the body may have begun. Attempts are counted however fast they come."""
    for _ in range(1 if "on_takeover" in takeovers else 3):
        held = _held(scene.store, GONE, **takeovers)
        if "max_takeovers" in takeovers:
            end_lease(scene.store, held, scene.clock)
    with pytest.raises(OutcomeUnknown):
        scene.run(lambda attempt: None, **takeovers)
    assert scene.runs == 0


@pytest.mark.parametrize("process", ["", this_process(), f"{'0' * 16}:1:1"], ids=["unknown", "living", "elsewhere"])
def test_any_other_claim_waits_for_its_lease(scene: Scene, process: str) -> None:
    """Of a living process it is never taken early, and in doubt the lease counts."""
    held = _held(scene.store, process)
    assert isinstance(scene.run(lambda attempt: None), Conflict)
    assert (scene.record, scene.runs) == (held, 0)


def test_completion_under_way_when_its_process_died_counts(scene: Scene) -> None:
    """The kernel still delivers it, and the takeover comes a moment later."""
    held = _held(scene.store, GONE)
    said: dict[str, Any] = {"result": "7", "content_type": "application/json", "expires_at": scene.clock.now()}
    done = held.but(status=Status.COMPLETED, revision="done", **said)

    def arrives(seconds: float) -> None:
        scene.store.swap(done, held.revision)

    scene.clock.on_sleep = arrives
    assert scene.run(lambda attempt: None) == Outcome(7)
    assert scene.runs == 0


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in ((claims, "_LAST_WRITE", 0.01), (recovery, "_LOOK", 0.01), (recovery, "_PATIENCE", 1)):
        monkeypatch.setattr(module, name, seconds)


class Worker:
    """A worker and its step; without an event loop, billiard's threads tell of lost processes."""

    def __init__(self, shop: Shop, has_loop: bool) -> None:
        self.shop, self.loop, self.looks = shop, Hub() if has_loop else None, 0
        controller = SimpleNamespace(use_eventloop=has_loop)
        self.parent = SimpleNamespace(app=shop.app, hub=self.loop, pool=self, controller=controller, steps=[])
        self.step = recovery.Recovery(self.parent)

    def maintain_pool(self) -> None:
        self.looks += 1

    def goes_on(self, until: Callable[[], Any] = bool) -> Any:
        """Turn the loop once; whether the condition holds then."""
        if self.loop is not None:
            self.loop.call_soon(lambda: None)
            self.loop.run_once()
        return until()

    def until(self, condition: Callable[[], Any], what: str = "the message went back") -> None:
        wait_until(lambda: self.goes_on(condition), what)


@pytest.fixture(params=["loop", "threads"])
def worker(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Worker]:
    worker = Worker(shop, request.param == "loop")
    worker.step.start(worker.parent)
    yield worker
    worker.step.stop(worker.parent)
    if worker.loop is not None:
        worker.loop.close()


class Lost:
    """A message whose pool process is lost, and what becomes of it."""

    def __init__(self, shop: Shop, process: str = GONE, order: str = "o") -> None:
        self.shop, task = shop, shop.charge
        task.delay(order_id=order)
        *_, self.message = shop.published()
        self.message._state = "RECEIVED"
        #: Of each time that it was given back or acknowledged: which, and whether the lease was over.
        self.ended: list[tuple[str, bool]] = []
        self.key = task.idempotency_key_for(order_id=order)
        _held(shop.memory, process, self.key)
        request = symbol_by_name(task.Request)
        about = {"app": shop.app, "task": task, "hostname": "celery@here", "on_reject": self._on_reject}
        self.request = request(self.message, on_ack=lambda *given: self._note("acknowledged"), **about)

    def _on_reject(self, logger: object, errors: object, requeue: bool) -> None:
        self._note("requeued" if requeue else "rejected")

    def _note(self, how: str) -> None:
        record = self.shop.memory.get(self.key)
        self.ended.append((how, record is not None and not record.lease_until))

    def tells(self, error: BaseException, by: str = "on_failure") -> None:
        """Have Celery tell of the end."""
        try:
            raise error
        except BaseException:  # noqa: BLE001 - of any kind
            getattr(self.request, by)(ExceptionInfo())

    def fails(self, worker: Worker, error: BaseException = KILLED) -> list[tuple[str, bool]]:
        """Have Celery tell of the end, and wait until it has done with the message what it does."""
        self.tells(error)
        worker.until(lambda: self.ended)
        return self.ended

    @property
    def is_marked(self) -> bool:
        return bool(recovery._stopped[recovery._place(self.request.id)])


BACK, BACK_LEASED = [("requeued", True)], [("requeued", False)]


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        pytest.param(KILLED, BACK, id="killed"),
        pytest.param(SystemExit(1), BACK, id="exited", marks=since_celery("5.7", "exits that are told of as losses")),
        pytest.param(Terminated(9), [("acknowledged", True)], id="revoked"),
    ],
)
def test_message_goes_back_once_the_lease_is_over(
    shop: Shop, worker: Worker, error: BaseException, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets it next takes over at once; Celery is told of an end before the process has come to it."""
    answers = iter([False, False])
    monkeypatch.setattr(recovery, "is_gone", lambda process: next(answers, True))
    assert Lost(shop).fails(worker, error) == ended


def test_loss_that_a_thread_is_told_of_leaves_the_loop_alone(shop: Shop, worker: Worker) -> None:
    """A loop is no other thread's to use; here nobody runs it."""
    lost = Lost(shop)
    thread = threading.Thread(target=lost.tells, args=(KILLED,))
    thread.start()
    thread.join()
    wait_until(lambda: lost.ended, "the message went back")
    assert lost.ended == BACK


@pytest.mark.parametrize("reason", ["shutdown", "broker"])
def test_worker_that_stops_deals_with_it_first(shop: Shop, worker: Worker, reason: str, caplog: Any) -> None:
    """Its loop ends with it, or Celery before 5.6 empties that. What cannot go back, as the broker is away, comes."""
    broken, lost = Lost(shop), Lost(shop, order="another")
    broken.request._on_reject = raising(OSError("away"))
    broken.tells(KILLED)
    lost.tells(KILLED)
    if reason == "shutdown":
        worker.step.shutdown(worker.parent)
    else:
        if worker.loop is not None:
            worker.loop.timer.clear()
        worker.step.stop(worker.parent)
        worker.until(lambda: lost.ended and not worker.step.under_way)
    assert (lost.ended, worker.step.under_way) == (BACK, {})
    assert "message_not_returned" in caplog.text


def test_dead_processes_are_looked_for_often(shop: Shop) -> None:
    """Celery's own look may come before the process can be waited for, and the next after five seconds."""
    worker = Worker(shop, has_loop=True)
    assert worker.loop is not None
    worker.step.start(worker.parent)
    worker.until(lambda: worker.looks > 1, "it looked")
    worker.step.stop(worker.parent)
    looks = worker.looks
    worker.loop.call_later(2 * recovery._DEATHS_EVERY, lambda: None)
    worker.until(lambda: not worker.loop.timer.queue, "the timers are over")  # type: ignore[union-attr]
    worker.loop.close()
    assert worker.looks == looks


def test_lease_that_is_not_this_workers_to_end_goes_on(shop: Shop, worker: Worker, monkeypatch: Any) -> None:
    """A process that lives, an outcome that it left, or SQLite, where no fork may inherit the file open."""
    done = Lost(shop, order="done")
    completed = shop.change(status=Status.COMPLETED)
    done.fails(worker)
    assert shop.record == completed
    assert Lost(shop, this_process(), "living").fails(worker) == BACK_LEASED
    monkeypatch.setattr(shop.store, "dialect", "sqlite", raising=False)
    shop.store.away = {"get": AssertionError("the file was opened")}
    assert Lost(shop).fails(worker) == BACK_LEASED


def test_message_goes_back_whatever_goes_wrong(shop: Shop, worker: Worker, caplog: Any, monkeypatch: Any) -> None:
    """A store that raises, or no thread: the lease counts, and of an error the log names the type alone."""
    lost, unthreaded = Lost(shop), Lost(shop, order="another")
    shop.store.away = {"get": ValueError("a password")}
    assert lost.fails(worker) == BACK_LEASED
    assert "ValueError" in caplog.text
    assert "password" not in caplog.text
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    assert unthreaded.fails(worker) == BACK_LEASED
    assert "no thread can be started" in caplog.text


def test_end_in_a_pool_without_processes_is_told_as_it_was(shop: Shop) -> None:
    """Celery tells of an exit as of a success. The process that the claim names is this one, so its lease goes on."""
    task, pool = shop.charge, SimpleNamespace(apply_async=None)
    task.Request = create_request_cls(symbol_by_name(task.Request), task, pool, "celery@here", None, app=shop.app)
    exited, returned = Lost(shop, this_process()), Lost(shop, this_process(), order="another")
    exited.tells(WorkerLostError("SystemExit(3)"), by="on_success")
    wait_until(lambda: exited.ended, "the message went back")
    returned.request.on_success((False, "result", 0.1))
    assert (exited.ended, returned.ended) == (BACK_LEASED, [("acknowledged", False)])


@pytest.mark.parametrize("how", ["cancel", "terminate", "as a whole"])
def test_body_that_its_worker_ends_is_known_to_be_stopped(shop: Shop, how: str) -> None:
    """Before its pool acts, or where that cannot stop it; a message that comes again under the id is not."""
    lost = Lost(shop)
    lost.request.time_start = 1.0 if how == "cancel" else None
    if how == "as a whole":
        task_accepted(lost.request)
        recovery.ColdShutdown(None).terminate(None)
    else:
        getattr(lost.request, how)(BasePool(1))
    assert lost.is_marked
    redeliver(shop.app, lost.message)
    assert not lost.is_marked


@pytest.mark.parametrize(
    ("soft", "acknowledges", "is_stopped"),
    [
        (False, True, True),
        pytest.param(False, False, False, marks=since_celery("5.7", "messages that are given back after a time limit")),
        (True, True, False),
    ],
)
def test_body_past_a_hard_limit_is_stopped_unless_its_message_comes_again(
    shop: Shop, soft: bool, acknowledges: bool, is_stopped: bool
) -> None:
    """One that comes again is to end UNKNOWN, if it is too long each time; a soft limit is the body's own affair."""
    lost = Lost(shop)
    shop.charge.acks_late, shop.charge.acks_on_timeout = True, acknowledges
    lost.request.on_timeout(soft, 1)
    assert lost.is_marked is is_stopped


@pytest.mark.parametrize("error", [None, OSError("away")])
def test_sqs_shows_the_message_again_at_once(
    shop: Shop, worker: Worker, error: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery's rejection hides it for as long as a worker polls. A store that hangs takes no time from this."""
    caplog.set_level("INFO")
    hanging, lost, channel = threading.Event(), Lost(shop), Mock()
    channel.sqs.return_value.change_message_visibility = change = Mock(side_effect=error)
    about = {"sqs_queue": "url", "sqs_message": {"ReceiptHandle": "r"}, "routing_key": "orders"}
    lost.message.channel, lost.message.delivery_info = channel, about
    monkeypatch.setattr(shop.store, "get", lambda key: hanging.wait(30))
    assert lost.fails(worker) == BACK_LEASED
    worker.goes_on()
    change.assert_not_called()
    lost.message._state = "REJECTED"  # Celery's loop has come to it
    worker.until(lambda: change.called, "SQS was asked")
    change.assert_called_once_with(QueueUrl="url", ReceiptHandle="r", VisibilityTimeout=0)
    assert not hanging.is_set()
    if error:
        worker.until(lambda: "comes_later" in caplog.text, "it is told")
    hanging.set()


@pytest.mark.parametrize(("timeout", "waits"), [(None, True), (5.0, False)])
def test_wait_for_the_store_ends_with_a_soft_shutdown(shop: Shop, monkeypatch: Any, timeout: Any, waits: bool) -> None:
    """A process that is told to end then has had the time that Celery gives; without it, somebody else decides."""
    shop.app.conf.worker_soft_shutdown_timeout = timeout
    monkeypatch.setattr("time.sleep", pause := Mock())

    def stopped(order_id: Any, cents: Any) -> None:
        shop.store.faults.extend(["request lost"] * 4)
        mark("stopped", is_stopped=True)

    shop.does = stopped
    assert shop.deliver("o", task_id="stopped").state == ("SUCCESS" if waits else "RETRY")
    assert pause.called is waits
