"""The shop: its orders, its tasks on plain Celery and on `IdempotentTask`, and what goes wrong in them.

`celery -A lab.demo.shop worker`, configured by the environment of `lab.demo.settings`. The card is charged at a
provider that honours idempotency keys. Stock and mail are like most of the world: they do what they are told, as often
as they are told.

What goes wrong is decided by the order's number alone, so both columns meet the same fire: of every 40 orders two have
the child that runs `charge_card` killed before the charge, two after it, one has a `charge_card` that outlives the
visibility timeout, and one has its child killed after `reserve_stock`. A kill is a real SIGKILL and fires once.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from celery import Celery, current_task

from celery_idempotent import IdempotentTask, Policy, current_attempt
from lab.demo.gateway import Gateway
from lab.demo.settings import BACKOFF, LEASE, SLOW_BODY, Settings
from lab.ledger import Ledger, is_first
from lab.witness import note, observe

CHARGE, STOCK, MAIL = "charge_card", "reserve_stock", "send_receipt"

KILLS = {(CHARGE, "before"): (20, 3), (CHARGE, "after"): (20, 7), (STOCK, "after"): (40, 15)}
"""By task and point, the orders whose child dies there: their numbers, as modulus and remainder."""

SLOW = (40, 11)
SLOW_RUNS = 2
"""A body that always outlives the visibility timeout never ends on plain Celery: each copy's acknowledgement comes too
late and brings the next copy. Two slow runs per order show the duplicate and let the column end."""


def orders(count: int) -> list[str]:
    """Their ids. An id names the intent: publishing it again does not mean a second purchase."""
    return [f"order-{number:04}" for number in range(count)]


def messages(order: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks an order needs, as (task, keyword arguments)."""
    yield CHARGE, {"order": {"id": order, "cents": 100 + 7 * _number(order)}}
    yield STOCK, {"order_id": order, "sku": f"sku-{_number(order) % 7}"}
    yield MAIL, {"order_id": order, "email": f"buyer{_number(order)}@example.com"}


def kills_planned(count: int) -> int:
    """How many children die in a column of so many orders."""
    return sum(_is_hit(number, share) for number in range(count) for share in KILLS.values())


def _number(order: str) -> int:
    return int(order.rpartition("-")[2])


def _is_hit(number: int, share: tuple[int, int]) -> bool:
    return number % share[0] == share[1]


def _recipient(order_id: str, email: str) -> str:
    """One receipt per order and mailbox, however the address is written."""
    return f"{order_id}:{email.strip().lower()}"


POLICIES: dict[str, dict[str, Any]] = {
    CHARGE: {"key": "order.id"},  # a path into an argument
    STOCK: {"key": ("order_id", "sku")},  # two arguments
    MAIL: {"key": _recipient, "fingerprint": None},  # a function; the address may be written differently
}


class Shop:
    """What the tasks do to the world; plain and idempotent tasks share these bodies."""

    def __init__(self, settings: Settings) -> None:
        self.ledger = Ledger(settings.folder / "ledger.jsonl")
        self._gateway = Gateway(Ledger(settings.folder / "bank.jsonl"))
        self._marks = settings.folder / "faults"
        self._marks.mkdir(parents=True, exist_ok=True)

    def charge(self, order: str) -> None:
        """The provider gets a key derived from the same intent, so a re-run after a crash moves no money.

        On plain Celery there is none to give: a task id is new for every publication, and arguments are no identity.
        """
        key = current_attempt().effect_key("charge") if isinstance(current_task, IdempotentTask) else None
        self._gateway.charge(order, idempotency_key=key)

    def effect(self, order: str) -> None:
        """Reserve, or send: whatever the running task is called."""
        self._note("effect")

    def run(self, order: str, effect: Callable[[str], None]) -> str:
        self._note("run")
        self._strike("before", order)
        effect(order)
        self._strike("after", order)
        return order

    def _note(self, what: str, point: str = "") -> None:
        note(self.ledger, what, current_task, point=point)

    def _strike(self, point: str, order: str) -> None:
        """Kill or delay this process, if that is the fate of the order here. May not return."""
        task = current_task.name.rpartition(".")[2]
        share = KILLS.get((task, point))
        if share and _is_hit(_number(order), share) and is_first(self._marks / f"{task}-{point}-{order}"):
            self._note("kill", point)
            os.kill(os.getpid(), signal.SIGKILL)
        is_slow = (task, point) == (CHARGE, "before") and _is_hit(_number(order), SLOW)
        if is_slow and any(is_first(self._marks / f"slow-{order}-{run}") for run in range(SLOW_RUNS)):
            time.sleep(SLOW_BODY)


def make_app(settings: Settings) -> Celery:
    """An app with the tasks of both columns, named after them, which notes what happens to them."""
    app, shop = Celery("demo", set_as_current=False), Shop(settings)
    app.conf.update(settings.celery())

    def charge_card(order: dict[str, Any]) -> str:
        return shop.run(order["id"], shop.charge)

    def reserve_stock(order_id: str, sku: str) -> str:
        return shop.run(order_id, shop.effect)

    def send_receipt(order_id: str, email: str) -> str:
        return shop.run(order_id, shop.effect)

    for body in (charge_card, reserve_stock, send_receipt):
        policy = Policy(**POLICIES[body.__name__], lease=LEASE, backoff=BACKOFF)
        app.task(name=f"plain.{body.__name__}", shared=False)(body)
        app.task(name=f"idempotent.{body.__name__}", shared=False, base=IdempotentTask, idempotent=policy)(body)
    observe(shop.ledger)
    return app


if "LAB_FOLDER" in os.environ:
    app = make_app(Settings.from_environ())
    app.set_current()
