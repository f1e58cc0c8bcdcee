"""A pool process that died in a body: its lease is ended, and only then its message goes back."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.concurrency.base import BasePool
from celery.utils.imports import symbol_by_name
from celery.worker.request import create_request_cls
from celery.worker.state import task_accepted
from kombu.asynchronous import Hub

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.engine import claim as claims
from celery_idempotent.engine.claim import Claim, claim, end_lease, new_nonce
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import OutcomeUnknown
from celery_idempotent.integration.broker import recovery
from celery_idempotent.integration.broker.recovery import mark
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.celeries import since_celery
from tests.support.deliveries import an_app, deliver, published, redeliver
from tests.support.scene import Scene, an_operation
from tests.support.waiting import wait_until

GONE = ":".join((*this_process().split(":")[:2], "1"))
"""A process of this machine that had this one's pid before it."""

JSON_TYPE = "application/json"


@pytest.fixture
def scene() -> Scene:
    """A fresh store and clock."""
    return Scene()


def _held(scene: Scene, process: str, **policy: Any) -> Record:
    decision = claim(scene.store, replace(an_operation("k", "f", **policy), process=process))
    assert isinstance(decision, Run)
    return decision.record


def test_claim_of_a_process_that_is_gone_is_taken_over_at_once(scene: Scene) -> None:
    """No lease is waited for, and the next attempt knows that it takes over."""
    held, begun = _held(scene, GONE), scene.clock.now()
    seen: list[Claim | None] = []
    scene.run(seen.append)
    (taken,) = seen
    assert taken is not None
    assert (taken.is_takeover, taken.number) == (True, 2)
    assert taken.fencing_token > held.fencing_token
    assert scene.clock.now() - begun < 1000


@pytest.mark.parametrize("process", ["", this_process(), f"{'0' * 16}:1:1"], ids=["unknown", "living", "elsewhere"])
def test_any_other_claim_waits_for_its_lease(scene: Scene, process: str) -> None:
    """Of a living process it is never taken early, and in doubt the lease counts."""
    held = _held(scene, process)
    assert isinstance(scene.run(lambda attempt: None), Conflict)
    assert scene.store.get("k") == held
    assert scene.runs == 0


def test_claim_of_a_worker_that_names_no_process_waits_for_its_lease(scene: Scene) -> None:
    """A version that does not know the field leaves in the row what the owner before it wrote there."""
    gone = _held(scene, GONE)
    end_lease(scene.store, gone, scene.clock)
    ended = scene.store.get("k")
    assert ended is not None
    living = replace(ended, owner=new_nonce(), revision=new_nonce(), lease_until=scene.clock.now() + 60_000)
    assert scene.store.swap(living, ended.revision) == living

    assert isinstance(scene.run(lambda attempt: None), Conflict)
    assert scene.store.get("k") == living


def test_attempt_that_must_not_be_repeated_ends_unknown(scene: Scene) -> None:
    """As if its lease had run out: the body may have begun."""
    _held(scene, GONE, on_takeover="refuse")
    with pytest.raises(OutcomeUnknown):
        scene.run(lambda attempt: None, on_takeover="refuse")
    assert scene.runs == 0


def test_body_that_kills_its_worker_is_poison_all_the_same(scene: Scene) -> None:
    """The attempts that never ended are counted, however fast they follow each other."""
    for _ in range(3):
        held = _held(scene, GONE, max_takeovers=2)
        end_lease(scene.store, held, scene.clock)
    with pytest.raises(OutcomeUnknown, match="3 attempts in a row"):
        scene.run(lambda attempt: None, max_takeovers=2)


def test_completion_under_way_when_its_process_died_counts(scene: Scene) -> None:
    """The kernel still delivers it, and the takeover comes a moment later."""
    held = _held(scene, GONE)
    done = replace(
        held, status=Status.COMPLETED, revision="done", expires_at=scene.clock.now(), result="7", content_type=JSON_TYPE
    )

    def arrives(seconds: float) -> None:
        scene.store.swap(done, held.revision)

    scene.clock.on_sleep = arrives
    assert scene.run(lambda attempt: None) == Outcome(7)
    assert scene.runs == 0


def test_takeover_has_its_whole_lease(scene: Scene) -> None:
    """The moment that the last writes are waited for does not count: a lease can be as short as that."""
    _held(scene, GONE)
    scene.run(lambda attempt: attempt.ensure_owned(), lease=0.5)  # type: ignore[union-attr]
    assert scene.runs == 1


# The worker that lost the process


@pytest.fixture
def app() -> Celery:
    """With one task."""
    app = an_app()

    @app.task(name="charge", shared=False, base=IdempotentTask, idempotent=Policy("order_id"))
    def charge(order_id: str) -> None: ...

    return app


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_LAST_WRITE", 0.01)
    monkeypatch.setattr(recovery, "_LOOK", 0.01)


class _Pool:
    """A pool, and how often it was asked to look for dead processes."""

    def __init__(self) -> None:
        self.looks = 0

    def maintain_pool(self) -> None:
        self.looks += 1


@pytest.fixture(params=["loop", "threads"])
def parent(request: pytest.FixtureRequest, app: Celery) -> Any:
    """What Celery gives a step: its loop is the worker's; without one, billiard's threads tell of lost processes."""
    has_loop = request.param == "loop"
    return SimpleNamespace(
        app=app,
        hub=Hub() if has_loop else None,
        pool=_Pool(),
        controller=SimpleNamespace(use_eventloop=has_loop),
        steps=[],
    )


@pytest.fixture
def step(parent: Any) -> Iterator[recovery.Recovery]:
    """The worker's step, started."""
    step = recovery.Recovery(parent)
    step.start(parent)
    yield step
    step.stop(parent)


@pytest.fixture
def loop(parent: Any, step: recovery.Recovery) -> Iterator[Hub | None]:
    """The worker's event loop, if it has one."""
    yield parent.hub
    if parent.hub is not None:
        parent.hub.close()


def test_step_that_never_started_can_be_stopped(parent: Any) -> None:
    """Celery stops every step when the connection is lost while an earlier one starts."""
    step = recovery.Recovery(parent)
    step.stop(parent)
    assert not parent.pool.looks


class _Lost:
    """A message whose pool process is lost, and what becomes of it."""

    def __init__(self, app: Celery, loop: Hub | None, process: str = GONE, order: str = "o") -> None:
        self._loop = loop
        self.store: Any = app.conf.idempotency_store
        self.task = app.tasks["charge"]
        self.task.delay(order_id=order)
        *_, self.message = published(app)
        self.message._state = "RECEIVED"
        self.rejected: list[bool] = []
        #: Whether the lease was over when the message went back.
        self.was_over: list[bool] = []
        self.request = symbol_by_name(self.task.Request)(
            self.message, app=app, task=self.task, hostname="celery@here", on_reject=self._on_reject
        )
        self.key = self.task.idempotency_key_for(order_id=order)
        operation = an_operation(self.key)
        decision = claim(self.store, replace(operation, process=process))
        assert isinstance(decision, Run)

    def _on_reject(self, logger: object, errors: object, requeue: bool) -> None:
        self.was_over.append(not MemoryStore.get(self.store, self.key).lease_until)  # type: ignore[union-attr]
        self.rejected.append(requeue)

    def is_rejected(self) -> None:
        """Celery's loop has come to it."""
        self.message._state = "REJECTED"

    def fails_by(self, error: BaseException) -> None:
        """Have Celery tell of the end, and wait until it has done with the message what it does."""
        self.tells(error)
        wait_until(self._goes_on, "the message went back")

    def tells(self, error: BaseException) -> None:
        """Have Celery tell of the end."""
        try:
            raise error
        except (WorkerLostError, SystemExit, Terminated):
            self.request.on_failure(ExceptionInfo())

    def _goes_on(self) -> bool:
        if self._loop is not None:
            self._loop.call_soon(lambda: None)
            self._loop.run_once()
        return bool(self.rejected)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(WorkerLostError("signal 9"), id="killed"),
        pytest.param(SystemExit(1), id="exited", marks=since_celery("5.7", "exits that are told of as losses")),
    ],
)
def test_message_goes_back_once_the_lease_is_over(app: Celery, loop: Hub | None, error: BaseException) -> None:
    """So whoever gets it next, on whichever machine, takes over at once."""
    lost = _Lost(app, loop)
    lost.fails_by(error)
    assert lost.rejected == [True]
    assert lost.was_over == [True]


def test_lease_of_a_revoked_task_is_over(app: Celery, loop: Hub | None) -> None:
    """``revoke(terminate=True, signal="SIGKILL")``: who publishes it again need not wait, on any machine."""
    lost, acknowledged = _Lost(app, loop), []
    lost.request._on_ack = lambda *args: acknowledged.append(lost.store.get(lost.key).lease_until)
    lost.tells(Terminated(9))
    wait_until(lambda: lost._goes_on() or acknowledged, "it is revoked")
    assert acknowledged == [0]


def test_loss_that_a_thread_is_told_of_leaves_the_loop_alone(app: Celery, step: recovery.Recovery) -> None:
    """A loop is no other thread's to use; here nobody runs it."""
    lost = _Lost(app, None)
    thread = threading.Thread(target=lost.tells, args=(WorkerLostError("signal 9"),))
    thread.start()
    thread.join()
    wait_until(lambda: lost.rejected, "the message went back")
    assert lost.was_over == [True]


def test_worker_that_shuts_down_deals_with_it_first(app: Celery, parent: Any, step: recovery.Recovery) -> None:
    """Its loop does not run any more, and its threads would end with it."""
    lost = _Lost(app, None)
    lost.tells(WorkerLostError("signal 9"))
    step.shutdown(parent)
    assert lost.rejected == [True]
    assert lost.was_over == [True]
    assert not step.under_way


def test_worker_that_loses_its_broker_deals_with_it_first(
    app: Celery, parent: Any, step: recovery.Recovery, loop: Hub | None
) -> None:
    """Celery before 5.6 forgets what its loop has still to do: nobody would ever be told of the failure."""
    lost = _Lost(app, loop)
    lost.tells(WorkerLostError("signal 9"))
    if loop is not None:
        loop.timer.clear()
    step.stop(parent)
    wait_until(lost._goes_on, "the message went back")
    assert lost.was_over == [True]


def test_worker_shuts_down_though_a_message_cannot_go_back(
    app: Celery, parent: Any, step: recovery.Recovery, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is away, and gives it again by itself; the others go back."""
    broken, lost = _Lost(app, None), _Lost(app, None, order="another")

    def away(*args: object) -> None:
        raise OSError("away")

    broken.request._on_reject = away
    broken.tells(WorkerLostError("signal 9"))
    lost.tells(WorkerLostError("signal 9"))
    step.shutdown(parent)
    assert lost.rejected == [True]
    assert not step.under_way
    assert "message_not_returned" in caplog.text


def test_dead_processes_are_looked_for_often(parent: Any, step: recovery.Recovery, loop: Hub | None) -> None:
    """Celery's own look may come before the process can be waited for, and the next after five seconds."""
    if loop is not None:
        loop.call_soon(lambda: None)
        wait_until(lambda: loop.run_once() or parent.pool.looks > 1, "it looked")
    step.stop(parent)
    looks = parent.pool.looks
    if loop is not None:
        loop.call_later(2 * recovery._DEATHS_EVERY, lambda: None)
        wait_until(lambda: loop.run_once() or not loop.timer.queue, "the timers are over")
    assert parent.pool.looks == looks


def test_every_worker_recovers(app: Celery) -> None:
    """The step comes with the first task that is bound."""
    assert app.tasks["charge"]
    assert recovery.Recovery in app.steps["consumer"]


def test_sqlite_is_left_to_the_next_delivery(app: Celery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on this machine and sees the same; a process forked meanwhile would inherit what tears the file."""
    lost = _Lost(app, loop)
    lost.store.dialect = "sqlite"
    monkeypatch.setattr(lost.store, "get", lambda key: pytest.fail("the file was opened"))
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.was_over == [False]


def test_store_that_hangs_does_not_keep_the_message(
    app: Celery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the worker's loop: after a while the message goes back, and the lease counts."""
    monkeypatch.setattr(recovery, "_PATIENCE", 0.2)
    lost, hanging = _Lost(app, loop), threading.Event()
    monkeypatch.setattr(lost.store, "get", lambda key: hanging.wait(30))
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.was_over == [False]
    assert not hanging.is_set()
    hanging.set()


def test_living_process_keeps_its_lease(app: Celery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery may take a process for lost that is there, or the claim is that of another delivery."""
    monkeypatch.setattr(recovery, "_PATIENCE", 0.2)
    lost = _Lost(app, loop, process=this_process())
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.was_over == [False]


def test_outcome_that_the_process_left_is_not_written_again(app: Celery, loop: Hub | None) -> None:
    """It died after its body: there is no lease to end."""
    lost = _Lost(app, loop)
    claimed = lost.store.get(lost.key)
    completed = replace(claimed, status=Status.COMPLETED, revision="completed")
    assert lost.store.swap(completed, claimed.revision) == completed
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.rejected == [True]
    assert lost.store.get(lost.key) == completed


def test_process_that_ends_a_moment_later_is_waited_for(
    app: Celery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery is told of an end before the process has come to it."""
    answers = iter([False, False])
    monkeypatch.setattr(recovery, "is_gone", lambda process: next(answers, True))
    lost = _Lost(app, loop)
    lost.fails_by(WorkerLostError("exit 1"))
    assert lost.was_over == [True]


def test_message_goes_back_whatever_goes_wrong(
    app: Celery, loop: Hub | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that cannot be derived, or a store that raises: the log names the type, and nothing else of it."""
    lost = _Lost(app, loop)

    def breaks(key: str) -> None:
        raise ValueError("a password")

    monkeypatch.setattr(lost.store, "get", breaks)
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.rejected == [True]
    assert "ValueError" in caplog.text
    assert "password" not in caplog.text


def test_message_goes_back_where_no_thread_can_be_started(
    app: Celery, loop: Hub | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine at its limit of threads: the lease counts."""
    lost = _Lost(app, loop)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    lost.fails_by(WorkerLostError("signal 9"))
    assert lost.was_over == [False]
    assert "no thread can be started" in caplog.text


def test_other_failures_are_told_at_once(app: Celery) -> None:
    """Of a body that raised, the child has settled the claim itself."""
    told: list[str] = []
    lost = _Lost(app, None)
    lost.request._on_ack = lambda *args: told.append("acknowledged")
    try:
        raise ValueError("no")
    except ValueError:
        lost.request.on_failure(ExceptionInfo(), return_ok=True)
    assert told == ["acknowledged"]


@pytest.fixture
def in_threads(app: Celery) -> _Lost:
    """A message in a worker whose pool has no processes, of which Celery makes a class for the task."""
    task = app.tasks["charge"]
    pool = SimpleNamespace(apply_async=None)
    task.Request = create_request_cls(symbol_by_name(task.Request), task, pool, "celery@here", None, app=app)
    return _Lost(app, None, this_process())


def test_exit_in_a_pool_without_processes_gives_the_message_back(in_threads: _Lost) -> None:
    """Celery tells of it as of a success. The process that the claim names is this one, so its lease goes on."""
    try:
        raise WorkerLostError("SystemExit(3)")
    except WorkerLostError:
        in_threads.request.on_success(ExceptionInfo())
    wait_until(lambda: in_threads.rejected, "the message went back")
    assert in_threads.rejected == [True]
    assert in_threads.was_over == [False]


def test_success_is_told_as_it_was(in_threads: _Lost) -> None:
    """What a body returned is Celery's affair."""
    told: list[str] = []
    in_threads.request._on_ack = lambda *args: told.append("acknowledged")
    in_threads.request.on_success((False, "result", 0.1))
    assert told == ["acknowledged"]
    assert not in_threads.rejected


def test_cold_shutdown_lets_a_body_end_that_its_pool_cannot_stop(app: Celery) -> None:
    """Celery asks every pool, in a signal handler: under solo an error of it would be raised in the body."""
    request = _Lost(app, None).request
    request.time_start = 1.0
    request.cancel(BasePool(1))
    assert _is_marked(request)


def test_revoked_body_is_known_to_be_stopped(app: Celery) -> None:
    """Before its pool acts on it."""
    request = _Lost(app, None).request
    request.terminate(BasePool(1))
    assert _is_marked(request)


def test_body_whose_pool_is_ended_as_a_whole_is_known_to_be_stopped(app: Celery) -> None:
    """As at a cold shutdown of Celery 5.4, which cancels no request."""
    request = _Lost(app, None).request
    task_accepted(request)
    assert recovery.ColdShutdown in app.steps["worker"]
    recovery.ColdShutdown(None).terminate(None)
    assert _is_marked(request)


@pytest.mark.parametrize(
    ("soft", "acknowledges", "is_stopped"),
    [
        (False, True, True),
        pytest.param(False, False, False, marks=since_celery("5.7", "messages that are given back after a time limit")),
        (True, True, False),
    ],
)
def test_body_past_a_hard_limit_is_stopped_unless_its_message_comes_again(
    app: Celery, soft: bool, acknowledges: bool, is_stopped: bool
) -> None:
    """One that comes again is to end UNKNOWN, if it is too long each time; a soft limit is the body's own affair."""
    lost = _Lost(app, None)
    lost.task.acks_late, lost.task.acks_on_timeout = True, acknowledges
    lost.request.on_timeout(soft, 1)
    assert _is_marked(lost.request) is is_stopped


def test_message_that_comes_again_is_not_known_to_be_stopped(app: Celery) -> None:
    """Its task id may be one that this worker has stopped before."""
    lost = _Lost(app, None)
    lost.request.terminate(BasePool(1))
    redeliver(app, lost.message)
    assert not _is_marked(lost.request)


def _is_marked(request: Any) -> bool:
    return bool(recovery._stopped[recovery._place(request.id)])


class _Sqs:
    """A channel of SQS, and what it was asked for."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self._fails = fails

    def canonical_queue_name(self, queue: str) -> str:
        return queue

    def sqs(self, queue: str) -> Any:
        assert queue == "orders"
        return SimpleNamespace(change_message_visibility=self._change)

    def _change(self, **asked: Any) -> None:
        self.asked.append(asked)
        if self._fails:
            raise OSError("away")


@pytest.mark.parametrize("fails", [False, True])
def test_sqs_shows_the_message_again_at_once(
    app: Celery, loop: Hub | None, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery's rejection hides it for as long as a worker polls; where that cannot be changed, it comes then."""
    caplog.set_level("INFO")
    lost, channel = _Lost(app, loop), _Sqs(fails)
    lost.message.channel = channel
    lost.message.delivery_info = {"sqs_queue": "url", "sqs_message": {"ReceiptHandle": "r"}, "routing_key": "orders"}
    lost.fails_by(WorkerLostError("signal 9"))
    assert not lost._goes_on() or not channel.asked
    lost.is_rejected()
    wait_until(lambda: lost._goes_on() and bool(channel.asked), "SQS was asked")
    assert channel.asked == [{"QueueUrl": "url", "ReceiptHandle": "r", "VisibilityTimeout": 0}]
    if fails:
        wait_until(lambda: "comes_later" in caplog.text, "it is told")


def test_sqs_shows_the_message_at_once_though_the_store_hangs(
    app: Celery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that the store has taken is not taken from the broker."""
    monkeypatch.setattr(recovery, "_PATIENCE", 0.5)
    lost, channel, hanging = _Lost(app, loop), _Sqs(), threading.Event()
    monkeypatch.setattr(lost.store, "get", lambda key: hanging.wait(30))
    lost.message.channel = channel
    lost.message.delivery_info = {"sqs_queue": "url", "sqs_message": {"ReceiptHandle": "r"}, "routing_key": "orders"}
    lost.fails_by(WorkerLostError("signal 9"))
    lost.is_rejected()
    wait_until(lambda: lost._goes_on() and bool(channel.asked), "SQS was asked")
    hanging.set()


def test_message_that_celery_never_settles_is_not_waited_for_without_end(
    app: Celery, step: recovery.Recovery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker shows it again by itself; what is under way must come to its end, or no worker would."""
    monkeypatch.setattr(recovery, "_PATIENCE", 0.2)
    lost, channel = _Lost(app, loop), _Sqs()
    lost.message.channel = channel
    lost.message.delivery_info = {"sqs_queue": "url", "sqs_message": {"ReceiptHandle": "r"}, "routing_key": "orders"}
    lost.fails_by(WorkerLostError("signal 9"))
    wait_until(lambda: lost._goes_on() and not step.under_way, "it is over")
    assert not channel.asked


def test_other_brokers_are_not_asked_to_show_a_message(
    app: Celery, step: recovery.Recovery, loop: Hub | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do at once, and have no such request."""
    asked: list[object] = []
    monkeypatch.setattr(recovery, "make_visible", lambda *given: asked.append(given))
    lost = _Lost(app, loop)
    lost.fails_by(WorkerLostError("signal 9"))
    wait_until(lambda: lost._goes_on() and not step.under_way, "it is over")
    assert not asked


@pytest.mark.parametrize(("timeout", "waits"), [(None, True), (5.0, False)])
def test_wait_for_the_store_ends_with_the_soft_shutdown(
    app: Celery, monkeypatch: pytest.MonkeyPatch, timeout: float | None, waits: bool
) -> None:
    """A process that is told to end then has had the time that Celery gives; without it, somebody else decides."""
    app.conf.worker_soft_shutdown_timeout = timeout
    store = app.conf.idempotency_store = FaultyStore(MemoryStore())
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)

    @app.task(base=IdempotentTask, shared=False, name="wait", idempotent=Policy())
    def wait() -> None:
        store.faults.extend(["request lost"] * 4)
        mark(wait.request.id, is_stopped=True)

    assert deliver(wait).state == ("SUCCESS" if waits else "RETRY")
    assert bool(pauses) is waits
