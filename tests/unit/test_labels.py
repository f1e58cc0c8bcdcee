"""What people call an operation: taken from the arguments of its first call, and never in its way."""

from typing import Any
from uuid import UUID

import pytest

from celery_idempotent import Policy, signals
from celery_idempotent.protocol.record import bounded
from tests.support.deliveries import Shop, settle

NUMBER = UUID("0af76519-16cd-43dd-8448-eb211c80319c")


@pytest.mark.parametrize(
    ("label", "args", "text"),
    [
        ("order_id", ("o-1",), "o-1"),
        ("order_id", (17,), "17"),
        ("order_id.id", ({"id": 7},), "7"),
        ("order_id", ("half of a pair: \ud83d",), r"half of a pair: \ud83d"),
        ("order_id", ("x" * 1000,), bounded("x" * 1000)),  # every store has room for it
        (("cents", "order_id"), (17, "acme"), "acme/17"),
        (lambda order_id, cents: f"{cents}#{order_id}", (17, "acme"), "acme#17"),
        (lambda order_id, cents: (cents, order_id), (17, "shop"), "shop/17"),
        (lambda order_id, cents: NUMBER, (17,), str(NUMBER)),
        # A call that lacks a part has none.
        ("cents", (17, None), ""),
        (("order_id", "cents"), (17, None), ""),
        ("order_id.id.x", ({"id": 7},), ""),
        # Where the label would stand, it says why there is none: no call is given up for it.
        ("order_id", ({"id": 7},), "(no label: a dict is neither text nor number)"),
        (lambda order_id, cents: 1 / 0, (17,), "(no label: ZeroDivisionError)"),
        (lambda order_id, cents: 10**5000, (17,), "(no label: ValueError)"),
    ],
)
def test_a_label_is_text_of_the_arguments(label: Any, args: Any, text: str) -> None:
    """Texts and numbers as they are, parts joined by a slash; the call runs whatever it gives."""
    shop = Shop(Policy(lambda order_id, cents: "k", fingerprint=None, label=label))
    assert shop.deliver(*args).state == "SUCCESS"
    assert shop.record.label == text


def test_the_first_call_names_the_operation() -> None:
    """A retry with other arguments is the same operation, and keeps its name."""
    shop = Shop(Policy("order_id", fingerprint=None, label="cents"))
    shop.does = lambda order_id, cents: 1 / (cents - 1)
    assert [shop.deliver(1, cents).state for cents in (1, 2)] == ["FAILURE", "SUCCESS"]
    assert (shop.record.attempts, shop.record.label) == (2, "1")


def test_an_operation_that_begins_after_an_outage_has_its_label(caplog: pytest.LogCaptureFixture) -> None:
    """Its first claim is that of a postponed message, whose header has no label; signals and log lines tell it."""
    shop, told = Shop(Policy("order_id", label=("cents", "order_id"))), []

    def tell(label: str, **_: Any) -> None:
        told.append(label)

    signals.completed.connect(tell, sender=shop.charge)
    shop.store.faults.extend(["request lost"] * 2)
    postponed = shop.deliver("o", "acme")
    with caplog.at_level("DEBUG", logger="celery_idempotent"):
        assert (postponed.state, settle(shop.app, shop.charge, postponed).state) == ("RETRY", "SUCCESS")
    assert (shop.record.label, told, "label=acme/o" in caplog.text) == ("acme/o", ["acme/o"], True)
