"""The circuit breaker: which claims are sent to a store that does not answer, and what people hear of the others."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import IdempotentTask, Policy, StoreMisconfigured, StoreUnavailable, signals
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.circuit import CLOSED, FAILURES, Circuit, Open, admitted, failed, interrupted
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import Ended, an_app, deliver, published
from tests.support.links import unlinked

DOWN = StoreUnavailable("memory", "swap", "down")


def _opened(draw: float = 1.0) -> Circuit:
    """A circuit after as many failures as it takes, at 0 seconds."""
    circuit: Circuit = CLOSED
    for number in range(FAILURES):
        circuit = failed(circuit, 0, str(number), is_trial=False, draw=draw)
    return circuit


class TestDecisions:
    """The pure part."""

    def test_opens_after_failures_in_a_row(self) -> None:
        """One less does nothing."""
        circuit: Circuit = CLOSED
        for number in range(FAILURES - 1):
            circuit = failed(circuit, 0, str(number), is_trial=False, draw=1)
            assert admitted(circuit, 0) == (circuit, True)
        assert isinstance(failed(circuit, 0, "another", is_trial=False, draw=1), Open)

    @pytest.mark.parametrize(("draw", "pause"), [(0.0, 0.5), (1.0, 1.0)])
    def test_lets_one_trial_through_after_a_pause_at_random(self, draw: float, pause: float) -> None:
        """Neither before, nor a second one beside it."""
        circuit = _opened(draw)
        assert admitted(circuit, pause - 0.001)[1] is False
        trying, is_sent = admitted(circuit, pause)
        assert is_sent
        assert admitted(trying, pause + 29)[1] is False

    def test_a_trial_that_never_ends_is_not_the_last(self) -> None:
        """Its thread hangs, or was killed between being admitted and being sent; the store may be back for long."""
        trying, _ = admitted(_opened(), 1)
        again, is_sent = admitted(trying, 31)
        assert is_sent
        assert admitted(again, 60)[1] is False

    def test_pauses_grow_up_to_a_limit(self) -> None:
        """A store that is back is asked soon, and one that stays away seldom."""
        circuit, pauses, now = _opened(), [], 0.0
        for _ in range(40):
            assert isinstance(circuit, Open)
            pauses.append(circuit.trial_at - now)
            now = circuit.trial_at
            trying, _ = admitted(circuit, now)
            circuit = failed(trying, now, "k", is_trial=True, draw=1)
        assert pauses == [1, 2, 4, 8, 16, *[30] * 35]

    def test_a_failure_of_before_is_no_trial(self) -> None:
        """Claims that were on their way when it opened neither make pauses longer nor end a trial."""
        circuit, _ = admitted(_opened(), 1)
        after = failed(circuit, 1, "k", is_trial=False, draw=1)
        assert isinstance(after, Open)
        assert (after.trials, after.trial_at, after.unanswered) == (0, 31, 1)

    def test_an_interrupted_trial_makes_room_for_the_next(self) -> None:
        """A time limit says nothing about the store; whatever else is interrupted was no trial."""
        trying, _ = admitted(_opened(), 1)
        assert admitted(interrupted(trying, 1, is_trial=False), 1)[1] is False
        assert admitted(interrupted(trying, 1, is_trial=True), 1)[1] is True
        assert interrupted(CLOSED, 1, is_trial=True) is CLOSED


class Claims:
    """A breaker, its clock, and a store that answers or does not."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.breaker = Breaker("memory://", self.clock)
        self.answer: Callable[[], str] = lambda: "an answer"
        self.sent = 0

    def ask(self, key: str = "") -> str:
        """One claim; of a key of its own, unless one is named."""

        def claim() -> str:
            self.sent += 1
            return self.answer()

        return self.breaker.ask(key or f"key {self.sent}", claim)

    def fail(self, times: int = FAILURES, error: Exception = DOWN) -> None:
        """So many claims that end with an error."""
        self.answer = lambda: _raise(error)
        for _ in range(times):
            with pytest.raises(type(error)):
                self.ask()


@pytest.fixture
def claims() -> Claims:
    return Claims()


class TestBreaker:
    """Claims through it."""

    def test_asks_no_more_and_says_so_once(self, claims: Claims, caplog: pytest.LogCaptureFixture) -> None:
        """Whoever comes gets the same error as before, at once."""
        claims.fail(1000)
        assert claims.sent == FAILURES
        assert claims.breaker.is_open
        (line,) = map(unlinked, caplog.messages)
        assert line.startswith("event=idempotency.store_circuit_opened store=memory:// failures=5 next_try_in=")
        assert line.endswith("reason=down")
        claims.clock.advance(1_000)
        claims.fail(1)  # a trial
        assert [unlinked(each) for each in caplog.messages] == [line]

    def test_an_answer_to_a_trial_closes_it(self, claims: Claims, caplog: pytest.LogCaptureFixture) -> None:
        """People hear for how long it was open, and how many claims came in vain."""
        claims.fail(FAILURES + 10)
        claims.clock.advance(1_000)
        claims.fail(1)  # a trial
        claims.clock.advance(2_000)
        claims.answer = lambda: "an answer"
        caplog.clear()
        assert claims.ask() == "an answer"
        assert not claims.breaker.is_open
        (line,) = map(unlinked, caplog.messages)
        assert line == "event=idempotency.store_circuit_closed store=memory:// seconds=3.0 postponed=11"
        assert claims.sent == FAILURES + 2

    def test_an_answer_begins_the_count_anew(self, claims: Claims) -> None:
        """Only failures in a row count."""
        for _ in range(10):
            claims.fail(FAILURES - 1)
            claims.answer = lambda: "an answer"
            claims.ask()
        assert not claims.breaker.is_open

    def test_a_record_that_somebody_holds_is_one_failure(self, claims: Claims) -> None:
        """Its duplicates time out one after the other, and say nothing about the other records."""
        claims.answer = lambda: _raise(DOWN)
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                claims.ask("held")
        assert not claims.breaker.is_open
        claims.fail(FAILURES - 1)
        assert claims.breaker.is_open

    def test_a_record_that_cannot_be_read_is_an_answer(self, claims: Claims) -> None:
        """It is one record's affair; held-back claims would run unprotected under ``on_outage="run"``."""
        claims.fail(100, StoreMisconfigured("memory", "read", "damaged"))
        assert claims.sent == 100
        claims.fail()
        claims.clock.advance(1_000)
        claims.fail(1, StoreMisconfigured("memory", "read", "damaged"))
        assert not claims.breaker.is_open

    def test_a_time_limit_in_a_trial_leaves_it_to_the_next(self, claims: Claims) -> None:
        """And is raised."""
        claims.fail()
        claims.clock.advance(1_000)
        claims.fail(1, TimeoutError())
        claims.answer = lambda: "an answer"
        assert claims.ask() == "an answer"

    def test_one_of_many_threads_tries(self, claims: Claims) -> None:
        """The others do not wait for it."""
        claims.fail()
        claims.clock.advance(1_000)
        began, go_on = threading.Event(), threading.Event()

        def slow() -> str:
            began.set()
            assert go_on.wait(60)
            return "an answer"

        claims.answer = slow
        trial = threading.Thread(target=claims.ask)
        trial.start()
        assert began.wait(60)
        for _ in range(20):
            with pytest.raises(StoreUnavailable, match="not asked"):
                claims.ask()
        go_on.set()
        trial.join(60)
        assert claims.sent == FAILURES + 1
        assert not claims.breaker.is_open

    def test_another_process_begins_anew(self, claims: Claims) -> None:
        """What a fork has copied is its parent's."""
        claims.fail()
        claims.answer = lambda: "an answer"
        claims.breaker._process = -1
        assert claims.ask() == "an answer"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long deliveries were kept that got no answer."""
    pauses: list[float] = []
    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.time.sleep", pauses.append)
    return pauses


class Shop:
    """A task of an app whose store can be away."""

    def __init__(self, **policy: Any) -> None:
        self.store = FaultyStore(MemoryStore())
        self.store.before_swap = self._count
        self.is_away = False
        self.asked = 0
        self.body: Callable[[], str] = lambda: "done"
        self.app = an_app()
        self.app.conf.idempotency_store = self.store
        # Or a slow machine would let a trial pass among the deliveries that are counted.
        runtime_of(self.app).opened.breaker._clock = SimpleNamespace(monotonic=lambda: 1.0)

        def charge(order_id: str) -> str:
            return self.body()

        self.task = self.app._task_from_fun(
            charge, name="charge", base=IdempotentTask, idempotent=Policy("order_id", **policy), shared=False
        )

    def _count(self, record: Record) -> None:
        self.asked += 1
        if self.is_away:
            self.store.faults.append("request lost")

    def deliver(self, count: int) -> list[Ended]:
        """So many messages."""
        return [deliver(self.task, str(number)) for number in range(count)]

    def wait(self) -> None:
        """Let the pause before the next trial pass."""
        circuit = runtime_of(self.app).opened.breaker._circuit
        assert isinstance(circuit, Open)
        runtime_of(self.app).opened.breaker._circuit = Open(circuit.since, 0, unanswered=circuit.unanswered)


def test_a_backlog_is_postponed_in_silence(caplog: pytest.LogCaptureFixture, pauses: list[float]) -> None:
    """Signals tell of each, the log once; everything runs when the store is back."""
    shop, heard = Shop(), Counter[str]()

    def hear(**told: Any) -> None:
        heard["store_unavailable"] += 1

    signals.store_unavailable.connect(hear, sender=shop.task)
    shop.is_away = True
    with caplog.at_level(logging.DEBUG):
        assert {ended.state for ended in shop.deliver(100)} == {"RETRY"}
    levels = Counter(record.levelname for record in caplog.records if "store_unavailable" in record.getMessage())
    assert levels == {"WARNING": FAILURES - 1, "DEBUG": 100 - FAILURES + 1}
    assert sum("store_circuit_opened" in message for message in caplog.messages) == 1
    assert shop.asked == 2 * FAILURES, "a claim asks twice"
    assert heard["store_unavailable"] == len(published(shop.app)) == 100
    shop.is_away = False
    shop.wait()
    assert {ended.value for ended in shop.deliver(100)} == {"done"}
    assert sum(f"postponed={100 - FAILURES}" in message for message in caplog.messages) == 1


def test_process_without_an_answer_does_not_eat_the_queue(pauses: list[float]) -> None:
    """While it asks nothing it keeps each message for a moment: others have an answer, and run the rest."""
    shop = Shop()
    shop.is_away = True
    shop.deliver(FAILURES - 1)
    assert not any(pauses)
    shop.deliver(2)
    assert 0.5 <= pauses[-1] <= 1
    breaker = runtime_of(shop.app).opened.breaker
    breaker._circuit = Open(0, 31)
    shop.deliver(1)
    assert pauses[-1] == 2, "a shutdown waits for it"
    breaker._circuit = Open(-60, -30)
    assert breaker.pause == 0, "the trial is due"


@pytest.mark.parametrize("limit", ["of the task", "of the message"])
def test_pause_is_over_long_before_a_hard_time_limit(limit: str, pauses: list[float]) -> None:
    """What it kills is acknowledged: a message that nobody has run would be lost."""
    shop = Shop()
    shop.is_away = True
    shop.deliver(FAILURES)
    runtime_of(shop.app).opened.breaker._circuit = Open(0, 31)
    request: dict[str, Any] = {}
    if limit == "of the task":
        shop.task.time_limit = 3
    else:
        request["timelimit"] = [3, None]

    assert deliver(shop.task, "1", request=request).state == "RETRY"
    assert pauses[-1] == 1.5


def test_soft_time_limit_that_strikes_in_the_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has run that could fail: the message is postponed, as any other in an outage."""

    def strike(seconds: float) -> None:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr("celery_idempotent.integration.messages.postpone.time.sleep", strike)
    shop = Shop()
    shop.is_away = True

    assert {each.state for each in shop.deliver(FAILURES + 1)} == {"RETRY"}


def test_bodies_run_unprotected_where_they_may() -> None:
    """Under ``on_outage="run"``, as in every outage."""
    shop = Shop(on_outage="run")
    shop.is_away = True
    assert {ended.value for ended in shop.deliver(20)} == {"done"}
    assert shop.asked == 2 * FAILURES


def test_what_a_body_has_to_record_is_tried_all_the_same(pauses: list[float]) -> None:
    """A claim that was granted is not held back from its end."""
    shop = Shop()

    def meanwhile() -> str:
        shop.is_away = True
        shop.body = lambda: "never"
        shop.deliver(20)
        shop.is_away = False
        return "done"

    shop.body = meanwhile
    assert deliver(shop.task, "first").value == "done"
    assert runtime_of(shop.app).opened.breaker.is_open
    (record,) = shop.store.scan()
    assert record.status is Status.COMPLETED


def test_another_store_has_another_breaker() -> None:
    """A new setting is a new store, which has failed nobody."""
    shop = Shop()
    shop.is_away = True
    shop.deliver(FAILURES)
    assert runtime_of(shop.app).opened.breaker.is_open
    shop.app.conf.idempotency_store = MemoryStore()
    assert not runtime_of(shop.app).opened.breaker.is_open


def _raise(error: Exception) -> str:
    raise error
