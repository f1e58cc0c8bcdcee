"""Events as signals and lines of the log: what is told of what, at which level, once, and how long it waited."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import OutcomeUnknown, Policy, ResultLost, StoreUnavailable, current_attempt, idempotent
from celery_idempotent.integration import events
from celery_idempotent.integration.messages import postpone
from celery_idempotent.protocol.record import damaged
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.stores import Fault
from tests.support.deliveries import Shop, deliver, redeliver, signalled
from tests.support.scene import raising

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def told() -> Iterator[Told]:
    """Every signal that is sent."""
    with signalled() as told:
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


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A shop whose first delivery gets no answer, and whose message comes back when a test says, by its clock."""
    shop, clock = Shop(Policy("order_id")), SimpleNamespace(now=1_800_000_000.0)
    for module in (postpone, events):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now, sleep=lambda seconds: None))
    shop.store.faults.extend(["request lost"] * 2)
    shop.deliver("o")

    def come_back(after: float = 10, *faults: Fault) -> None:
        clock.now += after
        shop.store.faults.extend(faults)
        shop.redeliver()

    return SimpleNamespace(shop=shop, clock=clock, come_back=come_back)


def _waited(told: Told) -> list[tuple[str, float | None]]:
    return [(name, about["waited"]) for name, about in told if name != "store_unavailable"]


def test_delivery_tells_how_long_it_waited_over_all_its_postponements(told: Told, waits: Any) -> None:
    """From the first of them, until it may run or is answered; one that comes at once has not waited."""
    waits.come_back(10, "request lost", "request lost")
    (message,) = waits.shop.published()
    for seconds in (10, -100):  # the second time by another worker's clock, which is behind
        waits.clock.now += seconds
        redeliver(waits.shop.app, message)
    waits.shop.deliver("o")
    assert _waited(told) == [("claimed", 20.0), ("completed", None), ("replayed", 0.0), ("replayed", None)]


def test_retry_of_a_body_has_not_waited_and_doubt_at_its_end_has_waited_once(told: Told, waits: Any) -> None:
    """What its message waits for is what the body asked for; an end is not told of what its claim has told."""

    def retrying(*_: object) -> None:
        if waits.shop.charge.request.retries == 0:
            raise waits.shop.charge.retry(countdown=5)
        _doubts()

    waits.shop.does = retrying
    waits.come_back()
    waits.come_back()
    assert _waited(told) == [("claimed", 10.0), ("released", None), ("claimed", None), ("outcome_unknown", None)]


@pytest.mark.parametrize("forged", ["soon", True, -1, 10**400])
def test_forged_time_of_a_wait_is_no_wait(told: Told, forged: Any) -> None:
    """Publishers write headers, too."""
    Shop(Policy("order_id")).deliver("o", request={"headers": {"idempotency_waiting_since": forged}})
    assert [about["waited"] for _, about in told] == [None, None]


@pytest.mark.parametrize("publish", ["always", "once"])
def test_two_services_that_share_a_task_name_are_told_loudly_once(publish: Any, caplog: Any) -> None:
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
def test_doubt_that_a_delivery_raises_is_one_alarm(is_task: bool, level: int, caplog: Any) -> None:
    """Celery logs what a task raises as an error, and trackers take it; of a function nobody else may hear."""
    shop = Shop(Policy("order_id"))
    shop.does = _doubts
    function = idempotent(Policy(), app=shop.app, name="charge")(_doubts)
    for _ in range(2):
        with suppress(OutcomeUnknown):
            shop.deliver("o-1") if is_task else function()
    lines = [each for each in caplog.records if "outcome_unknown" in each.getMessage()]
    assert [each.levelno for each in lines] == [level, level]
