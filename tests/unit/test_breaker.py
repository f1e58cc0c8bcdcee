"""The circuit breaker: which claims are sent to a store that does not answer, and what people hear of the others."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import Policy, StoreMisconfigured, StoreUnavailable
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.circuit import CLOSED, FAILURES, Circuit, Closed, Open, admitted, failed, interrupted
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.deliveries import Ended, Shop, signalled
from tests.support.links import unlinked
from tests.support.scene import raising

DOWN, DAMAGED = StoreUnavailable("memory", "swap", "down"), StoreMisconfigured("memory", "read", "damaged")
OPENED = Open(since=0, trial_at=1)
TRYING = Open(since=0, trial_at=31)


@pytest.mark.parametrize(
    ("circuit", "now", "after", "is_sent"),
    [
        (Closed(4, "k"), 0, Closed(4, "k"), True),
        (OPENED, 0.999, Open(0, 1, unanswered=1), False),
        (OPENED, 1, TRYING, True),
        (TRYING, 30.999, Open(0, 31, unanswered=1), False),  # beside a trial no second one is made
        (TRYING, 31, Open(0, 61), True),  # one that hangs, or was killed, is not the last
    ],
)
def test_which_claims_are_sent(circuit: Circuit, now: float, after: Circuit, is_sent: bool) -> None:
    """All, or one trial after each pause."""
    assert admitted(circuit, now) == (after, is_sent)


@pytest.mark.parametrize(
    ("circuit", "is_trial", "draw", "after"),
    [
        (CLOSED, False, 1, Closed(1, "k")),
        (Closed(3, "other"), False, 1, Closed(4, "k")),
        (Closed(4, "k"), False, 1, Closed(4, "k")),  # somebody may hold that record alone
        (Closed(4, "other"), False, 1, Open(7, 8)),
        (Closed(4, "other"), False, 0, Open(7, 7.5)),
        (TRYING, True, 1, Open(0, 9, trials=1, unanswered=1)),
        (Open(0, 31, trials=3), True, 1, Open(0, 23, trials=4, unanswered=1)),
        (Open(0, 31, trials=4), True, 1, Open(0, 37, trials=5, unanswered=1)),
        (Open(0, 31, trials=400), True, 0, Open(0, 22, trials=401, unanswered=1)),
        (TRYING, False, 1, Open(0, 31, unanswered=1)),  # it was on its way when the circuit opened
    ],
)
def test_what_a_failure_changes(circuit: Circuit, is_trial: bool, draw: float, after: Circuit) -> None:
    """Five claims of different keys in a row open the circuit; pauses are random, and double up to half a minute."""
    assert FAILURES == 5
    assert failed(circuit, 7, "k", is_trial=is_trial, draw=draw) == after


@pytest.mark.parametrize(
    ("circuit", "is_trial", "after"), [(TRYING, True, Open(0, 7)), (TRYING, False, TRYING), (CLOSED, True, CLOSED)]
)
def test_an_interrupted_trial_makes_room_for_the_next(circuit: Circuit, is_trial: bool, after: Circuit) -> None:
    """A time limit says nothing about the store; whatever else is interrupted was no trial."""
    assert interrupted(circuit, 7, is_trial=is_trial) == after


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

    def fail(self, times: int = FAILURES, error: Exception = DOWN, key: str = "") -> None:
        """So many claims that end with an error."""
        self.answer = raising(error)
        for _ in range(times):
            with pytest.raises(type(error)):
                self.ask(key)
        self.answer = lambda: "an answer"


def test_a_store_that_does_not_answer_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """People hear of it once, and, with an answer to a trial, for how long it was so and how many came in vain."""
    claims = Claims()
    claims.fail(1000)
    assert (claims.sent, claims.breaker.is_open) == (FAILURES, True)
    claims.clock.advance(1_000)
    claims.fail(1)  # a trial
    claims.clock.advance(2_000)
    assert (claims.ask(), claims.breaker.is_open, claims.sent) == ("an answer", False, FAILURES + 2)
    opened, closed = map(unlinked, caplog.messages)
    assert opened.startswith("event=idempotency.store_circuit_opened store=memory:// failures=5 next_try_in=")
    assert opened.endswith("reason=down")
    assert closed == "event=idempotency.store_circuit_closed store=memory:// seconds=3.0 postponed=996"


def test_what_is_no_failure_of_the_store_does_not_open_it() -> None:
    """An answer in between, duplicates of one record that somebody holds, and a record that cannot be read."""
    claims = Claims()
    for _ in range(10):
        claims.fail(FAILURES - 1)
        claims.ask()
    claims.fail(100, DAMAGED)
    claims.fail(100, key="held")
    assert not claims.breaker.is_open
    claims.fail(FAILURES - 1)
    assert claims.breaker.is_open


@pytest.mark.parametrize(("error", "is_open"), [(DAMAGED, False), (TimeoutError(), True)])
def test_what_ends_a_trial(error: Exception, is_open: bool) -> None:
    """A record that cannot be read is an answer; a time limit is raised, and leaves it to the next."""
    claims = Claims()
    claims.fail()
    claims.clock.advance(1_000)
    claims.fail(1, error)
    assert (claims.breaker.is_open, claims.breaker.pause) == (is_open, 0)
    assert claims.ask() == "an answer"


def test_one_of_many_threads_tries() -> None:
    """The others do not wait for it; another process begins anew, as what a fork has copied is its parent's."""
    claims = Claims()
    claims.fail()
    claims.clock.advance(1_000)

    def meanwhile() -> str:
        with ThreadPoolExecutor() as others:
            refused = [others.submit(claims.ask).exception(timeout=60) for _ in range(20)]
        assert {type(each) for each in refused} == {StoreUnavailable}
        return "an answer"

    claims.answer = meanwhile
    assert (claims.ask(), claims.sent, claims.breaker.is_open) == ("an answer", FAILURES + 1, False)
    claims.fail()
    claims.breaker._process = -1
    assert claims.ask() == "an answer"


SLEEP = "celery_idempotent.integration.messages.postpone.time.sleep"


class Outage(Shop):
    """A shop whose store is away; and for how long deliveries were kept that got no answer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(Policy("order_id"))
        self.pauses: list[float] = []
        patch.setattr(SLEEP, self.pauses.append)
        # Or a slow machine would let a trial pass among the deliveries that are counted.
        self.breaker._clock = SimpleNamespace(monotonic=lambda: 1.0)
        self.store.away = {"swap": DOWN}

    @property
    def breaker(self) -> Breaker:
        return runtime_of(self.app).opened.breaker

    def deliver_many(self, count: int) -> list[Ended]:
        return [self.deliver(str(number)) for number in range(count)]


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


def test_a_backlog_is_postponed_in_silence(shop: Outage, caplog: pytest.LogCaptureFixture) -> None:
    """Signals tell of each, the log once; everything runs when the store is back."""
    with caplog.at_level(logging.DEBUG), signalled() as told:
        assert {ended.state for ended in shop.deliver_many(100)} == {"RETRY"}
    levels = Counter(record.levelname for record in caplog.records if "store_unavailable" in record.getMessage())
    assert levels == {"WARNING": FAILURES - 1, "DEBUG": 100 - FAILURES + 1}
    assert len(shop.store.asked) == 2 * FAILURES, "a claim asks twice"
    assert [name for name, _ in told] == ["store_unavailable"] * len(shop.published())
    shop.store.away = {}
    shop.breaker._circuit = Open(0, 0)
    assert {ended.value for ended in shop.deliver_many(100)} == {"charged 1"}


def test_process_without_an_answer_does_not_eat_the_queue(shop: Outage) -> None:
    """While it asks nothing it keeps each message for a moment: others have an answer, and run the rest."""
    shop.deliver_many(FAILURES - 1)
    assert not any(shop.pauses)
    shop.deliver_many(2)
    assert 0.5 <= shop.pauses[-1] <= 1
    shop.breaker._circuit = TRYING
    shop.deliver_many(1)
    assert shop.pauses[-1] == 2, "a shutdown waits for it"


def test_pause_ends_with_or_before_a_time_limit(shop: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hard one kills is acknowledged, so the message would be lost; a soft one postpones it."""
    shop.breaker._circuit = TRYING
    shop.deliver("1", request={"timelimit": [3, None]})
    shop.charge.time_limit = 3
    shop.deliver("2")
    assert shop.pauses == [1.5, 1.5]
    monkeypatch.setattr(SLEEP, raising(SoftTimeLimitExceeded()))
    assert {each.state for each in shop.deliver_many(FAILURES + 1)} == {"RETRY"}


def test_what_a_body_has_to_record_is_tried_all_the_same(shop: Outage) -> None:
    """A claim that was granted is not held back from its end; another store has another breaker."""

    def meanwhile(*_: object) -> str:
        shop.store.away = {"swap": DOWN}
        shop.deliver_many(20)
        shop.store.away = {}
        return "done"

    shop.store.away = {}
    shop.does = meanwhile
    assert shop.deliver("first").value == "done"
    assert shop.breaker.is_open
    assert shop.record.status is Status.COMPLETED
    shop.app.conf.idempotency_store = MemoryStore()
    assert not shop.breaker.is_open
