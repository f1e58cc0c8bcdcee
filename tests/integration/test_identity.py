"""One operation stays one on real brokers, whatever its body, its messages and its limits do."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from tests.integration.cluster import IdempotentSetup, on_redis, record_of
from tests.integration.idempotent_tasks import charge, fulfil
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker


def test_a_body_that_changes_its_own_argument_and_is_retried_is_one_operation(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store
) -> None:
    """Each of its two steps has its effect once, and a duplicate of the first message is answered with its result."""
    order = {"id": "o-1", "cents": 500}
    assert fulfil.delay(order).get(timeout=60) == fulfil.delay(order).get(timeout=60)
    assert len(ledger.rows("effect")) == 2
    assert len({row.key for row in ledger.rows("effect")}) == 2
    assert [record.key for record in store.scan()] == [fulfil.idempotency_key_for(order)]


YAML: dict[str, Any] = {"accept_content": ["json", "yaml"], "result_accept_content": ["json"]}


@pytest.mark.worker(settings=YAML)
def test_a_conflict_comes_back_with_the_serialiser_it_came_with(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Arguments that JSON would change, or could not carry at all, are the same when the message comes again."""
    arguments = ("o", "go", {1: {"a", "b"}})
    holder = charge.apply_async(arguments, serializer="yaml")
    ledger.wait_for("begin")
    waiting = charge.apply_async(arguments, serializer="yaml")
    ledger.wait_for("conflicted", count=2)
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1


def test_items_of_a_list_are_operations(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """What was done by itself before is replayed in a starmap, and the other way round."""
    assert charge.delay("a").get(timeout=60) == "a by attempt 1"
    done = ["a by attempt 1", "b by attempt 1"]
    assert charge.starmap([("a",), ("b",)]).delay().get(timeout=60) == done
    assert charge.delay("b").get(timeout=60) == done[1]
    assert [row.key for row in ledger.rows("effect")] == ["a", "b"]


@on_redis
def test_a_soft_time_limit_during_the_completion_waits_for_it(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """The body has returned: Celery reports the limit, and the same call sent again is answered and has no effect."""
    ledger.open("go:1")
    with faults.losing(b"PutItem", b"COMPLETED") as cut:
        limited = charge.apply_async(("o", "go"), soft_time_limit=2)
        wait_until(lambda: cut.struck, "the completion is under way")
        wait_until(lambda: "Soft time limit" in celery_setup.worker.logs(), "the worker announces the limit")
        tries = cut.struck
        wait_until(lambda: cut.struck > tries + 1, "the limit has struck, before the second try from now on")
    with pytest.raises(SoftTimeLimitExceeded):
        limited.get(timeout=60)
    assert record_of(store, charge.idempotency_key_for("o", "go")).status is Status.COMPLETED
    assert charge.delay("o", "go").get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("effect")) == 1
