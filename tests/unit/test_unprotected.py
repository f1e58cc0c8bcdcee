"""Bodies that no claim protects: their effects happen, under the keys of a delivery, and nothing is recorded."""

from typing import Any

import pytest

from celery_idempotent import AtMostOnce, Policy, PolicyError, StoreUnavailable, current_attempt
from celery_idempotent.protocol.steps import Step
from tests.support.deliveries import Shop, deliver


def test_step_is_made_with_the_key_of_a_delivery() -> None:
    """So a receiver that honours keys recognises it; every call makes it again, as a function does."""
    shop, seen = Shop(), list[Step]()
    shop.does = lambda *_: current_attempt().step("charge", seen.append)
    for call in (shop.charge, shop.charge, shop.deliver):
        call("o-1")

    assert len({each.key for each in seen}) == 1
    assert [each.fencing_token > 0 for each in seen] == [False, False, True]


def test_tools_of_an_attempt_do_what_they_can_without_a_record() -> None:
    """A block is a block, a step at most once is made all the same, a fenced one has the smallest token of all."""
    shop, calls = Shop(Policy(mode="off", effects={"text": AtMostOnce()})), list[Any]()

    def body(*_: Any) -> str:
        attempt = current_attempt()
        with attempt.before_effects():
            calls.append("checked")
        attempt.step("text", lambda step: calls.append("sent"))
        return str(
            attempt.fenced_step(
                "index",
                fence=lambda step: calls.append(step.fencing_token),
                probe=lambda step: calls.append("probe"),
                act=lambda step: "entry",
            )
        )

    shop.does = body
    assert shop.deliver("o-1").value == "entry"
    assert (calls, [*shop.memory.scan()]) == (["checked", "sent", 0, "probe"], [])


def test_follow_up_is_published_under_the_id_of_a_delivery() -> None:
    """A duplicate of it is recognised, whoever published it."""
    shop = Shop()
    receipt = shop.task(body=lambda order_id: None, name="receipt")
    shop.does = lambda order_id, cents: current_attempt().send("receipt", receipt, order_id)
    ids = [shop.charge("o-1"), shop.deliver("o-1").value]
    shop.does = lambda order_id, cents: current_attempt().send("receipt", receipt.s(order_id))
    ids.append(shop.charge("o-2"))

    assert ids[0] == ids[1]
    published = [(message.headers["id"], message.payload[0]) for message in shop.published()]
    assert published == [(ids[0], ["o-1"]), (ids[1], ["o-1"]), (ids[2], ["o-2"])]


@pytest.mark.parametrize("policy", [Policy(on_outage="run"), Policy(mode="observe")], ids=["outage", "observed"])
def test_what_needs_a_record_is_refused_where_there_is_none(policy: Policy) -> None:
    """Effects without a record would not be exactly once; a step has its effect all the same."""
    shop = Shop(policy)
    commits = shop.task(policy, lambda: current_attempt().commit(current_attempt().number, [{"Put": {}}]), "commits")
    shop.does = lambda *_: current_attempt().step("charge", lambda step: "ch_1")
    if policy.mode == "observe":
        assert deliver(commits).value == 1
    else:
        shop.store.away["swap"] = StoreUnavailable("store", "swap", "down")

    assert [shop.deliver("o-1").value for _ in range(2)] == ["ch_1", "ch_1"]
    assert isinstance(deliver(commits).value, PolicyError)
    assert len(shop.memory.committed) == (policy.mode == "observe")
