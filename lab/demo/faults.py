"""What goes wrong, and when: decided by the order's number alone, so both columns meet the same fire.

Of every 40 orders two have the child that runs `charge_card` killed before the charge, two after it, one has
a `charge_card` that outlives the visibility timeout, and one has its child killed after `reserve_stock`.
A kill is a real SIGKILL and fires once per order.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

from lab.demo.ledger import Ledger, Row
from lab.demo.orders import number_of
from lab.demo.settings import SLOW_BODY

Point = Literal["before", "after"]

# (task, point) -> order numbers, as (modulus, remainder)
KILLS: dict[tuple[str, Point], tuple[int, int]] = {
    ("charge_card", "before"): (20, 3),
    ("charge_card", "after"): (20, 7),
    ("reserve_stock", "after"): (40, 15),
}
SLOW_POINT = ("charge_card", "before")
SLOW = (40, 11)
# A body that always outlives the visibility timeout never ends on plain Celery: each copy's acknowledgement
# comes too late and brings the next copy. Two slow runs per order show the duplicate and let the column end.
SLOW_RUNS = 2


def kills_planned(orders: int) -> int:
    """How many children die in a column of `orders` orders."""
    return sum(number % modulus == rest for number in range(orders) for modulus, rest in KILLS.values())


class Faults:
    """Injects the faults; `folder` remembers, across processes, which ones have fired."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ledger = ledger

    def strike(self, task: str, point: Point, order: str) -> None:
        """Kill or delay this process, if that is the fate of `order` here. May not return."""
        number = number_of(order)
        if _hits(number, KILLS.get((task, point))) and self._once(f"{task}-{point}-{order}"):
            self._ledger.append(Row(what="kill", task=task, point=point, order=order))
            os.kill(os.getpid(), signal.SIGKILL)
        if (task, point) == SLOW_POINT and _hits(number, SLOW) and self._slow_run_left(order):
            time.sleep(SLOW_BODY)

    def _slow_run_left(self, order: str) -> bool:
        return any(self._once(f"slow-{order}-{run}") for run in range(SLOW_RUNS))

    def _once(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _hits(number: int, share: tuple[int, int] | None) -> bool:
    return share is not None and number % share[0] == share[1]
