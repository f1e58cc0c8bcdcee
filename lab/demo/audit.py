"""From ledger rows to numbers, and from numbers to a verdict. Pure: rows in, counts and reasons out.

What the verdict demands is what the library promises, no more:

- the charge, whose provider honours a derived key: **exactly once for every order**;
- stock and mail, which know no keys: exactly once for every order whose worker was not killed (and did not
  lose its lease) between effect and completion, and at least once for those. A crash after such an effect
  looks like a crash before it; no library can tell them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.demo.ledger import Row

KEYED = "charge_card"
UNKEYED = ("reserve_stock", "send_receipt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """One column of the table. "Others" are the effects that know no keys, two for each order."""

    orders: int
    published: int
    deliveries: int
    redelivered: int  # tasks that were delivered again while they ran
    runs: int
    killed_before: int
    killed_after: int
    charged_once: int
    charged_more: int
    charged_never: int
    recognised: int  # charges asked for again and refused by the provider, which knew the key
    others_once: int
    others_more_excused: int  # the worker was killed, or its lease lost, between effect and completion
    others_more: int
    others_never: int
    replayed: int
    conflicted: int
    taken_over: int
    leases_lost: int
    store_kills: int
    store_missed: int  # times that a delivery found the store away
    seconds: float

    @property
    def kills(self) -> int:
        """How many worker processes were killed."""
        return self.killed_before + self.killed_after


def tally(rows: Sequence[Row], *, orders: Iterable[str], published: int, seconds: float) -> Tally:
    """Count what the ledger says about `orders`."""
    ids = list(orders)
    what = Counter(row.what for row in rows)
    points = Counter(row.point for row in rows if row.what == "kill")
    effects = Counter((row.task, row.order) for row in rows if row.what == "effect")
    excused = _excused(rows)
    charges = [effects[KEYED, order] for order in ids]
    others = [(effects[task, order], (task, order) in excused) for task in UNKEYED for order in ids]
    return Tally(
        orders=len(ids),
        published=published,
        deliveries=what["delivery"],
        redelivered=len(_followed(rows)[1]),
        runs=what["run"],
        killed_before=points["before"],
        killed_after=points["after"],
        charged_once=charges.count(1),
        charged_more=sum(times > 1 for times in charges),
        charged_never=charges.count(0),
        recognised=what["recognised"],
        others_once=sum(times == 1 for times, _ in others),
        others_more_excused=sum(times > 1 and excuse for times, excuse in others),
        others_more=sum(times > 1 and not excuse for times, excuse in others),
        others_never=sum(times == 0 for times, _ in others),
        replayed=what["replayed"],
        conflicted=what["conflicted"],
        taken_over=what["taken_over"],
        leases_lost=what["lease_lost"],
        store_kills=what["store_killed"],
        store_missed=what["store_unavailable"],
        seconds=seconds,
    )


def unended(rows: Sequence[Row]) -> int:
    """How many deliveries a worker process is still at.

    An empty queue does not tell: of a message that was delivered twice, kombu's Redis transport forgets both copies
    when one is acknowledged.
    """
    return len(_followed(rows)[0])


def _followed(rows: Sequence[Row]) -> tuple[dict[int, str], set[str]]:
    """Which process is at which task in the end, and which tasks were delivered again while a process was at them."""
    at: dict[int, str] = {}
    again = set()
    for row in rows:
        if row.what == "delivery":
            if row.task_id in at.values():
                again.add(row.task_id)
            at[row.pid] = row.task_id
        elif row.what in ("ended", "kill"):
            at.pop(row.pid, None)
    return at, again


def _excused(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """(task, order) pairs for which only "at least once" is promised."""
    killed = {(row.task, row.order) for row in rows if row.what == "kill" and row.point == "after"}
    order_of = {row.task_id: (row.task, row.order) for row in rows if row.what == "run"}
    lost = {order_of[row.task_id] for row in rows if row.what == "lease_lost" and row.task_id in order_of}
    return killed | lost


def broken_promises(idempotent: Tally) -> list[str]:
    """What `IdempotentTask` promised and did not keep; empty is good."""
    claims = {
        "charged twice or more": idempotent.charged_more,
        "never charged": idempotent.charged_never,
        "stock or mail repeated without a kill between effect and completion": idempotent.others_more,
        "stock or mail missing": idempotent.others_never,
    }
    return [f"{count} x {claim}" for claim, count in claims.items() if count]


def missing_evidence(plain: Tally, idempotent: Tally, *, kills: int, store_kills: int) -> list[str]:
    """Why a run without broken promises would still prove nothing; empty is good."""
    gaps = []
    for name, column in (("plain", plain), ("idempotent", idempotent)):
        if column.kills != kills:
            gaps.append(f"{name}: {column.kills} kills instead of {kills}")
        if not column.redelivered:
            gaps.append(f"{name}: no task was delivered again while it ran, as the visibility timeout should have it")
        if column.store_kills != store_kills:
            gaps.append(f"{name}: the store was killed {column.store_kills} times instead of {store_kills}")
    if not plain.charged_more:
        gaps.append("plain Celery made no duplicate charge, so there was nothing to prevent")
    if not idempotent.replayed:
        gaps.append("no duplicate was replayed")
    if not idempotent.taken_over:
        gaps.append("no killed worker's claim was taken over")
    return gaps
