"""Events as signals and lines of the log: what is told of what, at which level, once, and how long it waited."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import (
    OutcomeUnknown,
    Policy,
    ResultLost,
    StoreUnavailable,
    current_attempt,
    idempotent,
)
from celery_idempotent.integration import events
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages import postpone
from celery_idempotent.protocol.record import damaged
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import Shop, deliver
from tests.support.scene import raising

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def told() -> Iterator[Told]:
    """Every signal that is sent, with what it tells."""
    told: Told = []

    def receive(*, event: str, signal: Any, **about: Any) -> None:
        told.append((event, about))

    with ExitStack() as stack:
        for name, signal in SIGNALS.items():
            receiver = partial(receive, event=str(name))
            signal.connect(receiver, weak=False)
            stack.callback(signal.disconnect, receiver)
        yield told


def _names(told: Told) -> str:
    return " ".join(name for name, _ in told)


DAMAGED = damaged("k", ValueError("'DONE'"), store="memory")
OUTAGE = StoreUnavailable("memory", "swap", "no answer")


def _doubts(*_: object) -> None:
    raise OutcomeUnknown(current_attempt().key, "no answer")


def test_result_that_cannot_be_kept_is_told_when_it_is_dropped_and_when_it_is_missed(told: Told) -> None:
    """First to those who can return something smaller, then to those whose caller has nothing."""
    shop = Shop(Policy("order_id"))
    shop.does = lambda *_: object()
    ends = [shop.deliver("o", task_id=task_id).value for task_id in ("first", "second")]
    assert isinstance(ends[1], ResultLost)
    assert _names(told) == "claimed completed result_dropped replayed result_lost"
    assert told[4][1]["reason"] == told[2][1]["reason"] != ""
    assert [(about["done_by"], about["attempt"]) for _, about in told[2:]] == [(None, 1), ("first", 1), ("first", 1)]


@pytest.mark.parametrize(
    ("error", "mode", "names", "reason"),
    [
        (DAMAGED, "enforce", "record_unreadable", "'DONE'"),
        (DAMAGED, "observe", "record_unreadable", "'DONE'"),
        (OUTAGE, "enforce", "store_unavailable", "no answer"),
        (OUTAGE, "observe", "store_unavailable", "no answer"),
    ],
)
def test_claim_that_meets_an_unreadable_record_is_no_outage(
    told: Told, error: Exception, mode: Any, names: str, reason: str
) -> None:
    """Nor the other way round; where the store answers, waiting mends nothing."""
    shop = Shop(Policy("order_id", mode=mode))
    shop.store.before_swap = raising(error)
    assert shop.deliver("o").state == ("RETRY" if mode == "enforce" else "SUCCESS")
    assert _names(told) == names
    assert (told[0][1]["key"], reason in told[0][1]["reason"]) == (shop.charge.idempotency_key_for("o"), True)


def test_publisher_that_meets_an_error_sends_and_tells(told: Told) -> None:
    """Its delivery will meet the same record; a store that is full is an outage."""
    shop = Shop(Policy("order_id", publish="once"))
    for error in (DAMAGED, OUTAGE, RecordTooLarge("over the limit")):
        shop.store.before_swap = raising(error)
        shop.charge.delay("o")
    assert _names(told) == "record_unreadable store_unavailable store_unavailable"
    assert len(shop.published()) == 3


def test_record_that_a_scan_passes_over_is_told(told: Told) -> None:
    """Nobody knows whose it is: there is no sender, and the key as far as it can be read."""
    assert list(readable(["k"], raising(DAMAGED), str)) == []
    ((name, about),) = told
    assert (name, about["sender"], about["key"], about["task_id"]) == ("record_unreadable", None, "k", None)


class Waits:
    """A shop whose first delivery gets no answer, and the clock of its workers, in seconds."""

    def __init__(self, patch: pytest.MonkeyPatch, told: Told) -> None:
        self.now, self.told, self.shop = 1_800_000_000.0, told, Shop(Policy("order_id"))
        ours = SimpleNamespace(time=lambda: self.now, sleep=lambda seconds: None)
        patch.setattr(postpone, "time", ours)
        patch.setattr(events, "time", ours)
        self.postpone(lambda: self.shop.deliver("o"))

    def postpone(self, deliver: Any) -> None:
        """A delivery that gets no answer."""
        self.shop.store.faults.extend(["request lost"] * 2)
        deliver()

    def come_back(self, after: float = 10) -> None:
        """The message comes back, so many seconds later."""
        self.now += after
        self.shop.redeliver()

    @property
    def waited(self) -> list[tuple[str, float | None]]:
        return [(name, about["waited"]) for name, about in self.told if name != "store_unavailable"]


@pytest.fixture
def waits(told: Told, monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch, told)


def test_delivery_tells_how_long_it_waited_over_all_its_postponements(waits: Waits) -> None:
    """From the first of them, until it may run or is answered; one that comes at once has not waited."""
    waits.postpone(waits.come_back)
    waits.postpone(waits.come_back)
    waits.come_back()
    waits.shop.deliver("o")
    assert waits.waited == [("claimed", 30.0), ("completed", None), ("replayed", None)]


def test_answered_delivery_has_waited_and_no_time_at_all_by_a_clock_that_is_behind(waits: Waits) -> None:
    """Two workers, two clocks."""
    waits.shop.deliver("o")
    waits.come_back(-10)
    assert waits.waited == [("claimed", None), ("completed", None), ("replayed", 0.0)]


def test_attempt_that_ends_in_doubt_has_waited_once(waits: Waits) -> None:
    """Its claim has told so; a replay of an outcome is no end of a body."""
    waits.shop.does = _doubts
    waits.come_back()
    assert waits.waited == [("claimed", 10.0), ("outcome_unknown", None)]


def test_retry_of_a_body_has_not_waited(waits: Waits) -> None:
    """What its message waits for is what the body asked for."""

    def retrying(*_: object) -> None:
        if waits.shop.charge.request.retries == 0:
            raise waits.shop.charge.retry(countdown=5)

    waits.shop.does = retrying
    waits.come_back()
    waits.come_back()
    assert [wait for name, wait in waits.waited if name == "claimed"] == [10.0, None]


@pytest.mark.parametrize("forged", ["soon", 1.5, True, 0, -1, None, 10**400])
def test_forged_time_of_a_wait_is_no_wait(told: Told, forged: Any) -> None:
    """Publishers write headers, too."""
    Shop(Policy("order_id")).deliver("o", request={"headers": {"idempotency_waiting_since": forged}})
    assert [about["waited"] for _, about in told] == [None, None]


@pytest.mark.parametrize("publish", ["always", "once"])
def test_two_services_that_share_a_task_name_are_told_loudly_once(
    publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all that is seen of an effect that never happens is a line at INFO, as of any duplicate."""
    store, name, tasks = MemoryStore(), f"send_invoice_{publish}", []
    for main in ("shop", "billing", None):
        shop = Shop(idempotency_store=store)
        shop.app.main = main
        tasks.append(shop.task(Policy("order", publish=publish), lambda order: None, name))
    of_shop, of_billing, of_an_app_without_a_name = tasks
    for order in ("o-1", "o-2"):
        for task in (of_shop, of_shop, of_an_app_without_a_name):
            deliver(task, order)
    assert "another_app" not in caplog.text

    for order in ("o-1", "o-2"):
        of_billing.delay(order) if publish == "once" else deliver(of_billing, order)
    (line,) = [each for each in caplog.records if "idempotency.another_app" in each.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"another_app task={name} app=billing done_in=shop key=" in line.getMessage()


@pytest.mark.parametrize(("is_task", "level"), [(True, logging.WARNING), (False, logging.ERROR)])
def test_doubt_that_a_delivery_raises_is_one_alarm(is_task: bool, level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Celery logs what a task raises as an error, and trackers take it; of a function nobody else may hear."""
    shop = Shop(Policy("order_id"))
    shop.does = _doubts
    function = idempotent(Policy(), app=shop.app, name="charge")(_doubts)
    for _ in range(2):
        if is_task:
            shop.deliver("o-1")
        else:
            with pytest.raises(OutcomeUnknown):
                function()
    lines = [each for each in caplog.records if "outcome_unknown" in each.getMessage()]
    assert [each.levelno for each in lines] == [level, level]
