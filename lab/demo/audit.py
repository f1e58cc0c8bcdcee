"""From ledger rows to figures, and from figures to a verdict. Pure: rows in, counts and reasons out.

What the verdict demands is what the library promises, no more:

- the charge, whose provider honours a derived key: **exactly once for every order**;
- stock and mail, which know no keys: exactly once for every order whose worker was not killed (and did not
  lose its lease) between effect and completion, and at least once for those. A crash after such an effect
  looks like a crash before it; no library can tell them apart.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from lab.demo.shop import CHARGE, MAIL, STOCK
from lab.ledger import Row

COLUMNS = {"plain": "plain Celery", "idempotent": "IdempotentTask"}  # by name, its title
CRASH_AFTER = "A crash right after an effect looks like one right before it; no library can tell them apart."
REDIS_BROKER = (
    "Children are killed, not whole workers: what a worker is fetching from Redis at that moment is lost with it, "
    "before any task could know of it. A lost message would show as an order never charged."
)

Figures = Mapping[str, float]
"""What one column shows. "Others" are the effects that know no keys, two for each order."""

LINES = (
    ("published (every third order twice)", "published"),
    ("tasks delivered again while they ran", "redelivered"),
    ("processes killed before the effect", "killed_before"),
    ("processes killed after the effect", "killed_after"),
    ("store killed and back", "store_killed"),
    ("deliveries that found it away, and were postponed", "store_unavailable"),
    ("bodies run", "run"),
    ("", ""),
    ("orders charged exactly once", "charged_once"),
    ("orders charged twice or more", "charged_more"),
    ("orders never charged", "charged_never"),
    ("second charges that the bank recognised", "recognised"),
    ("", ""),
    ("stock and mail, which know no keys: once", "others_once"),
    ("repeated, after a kill right after the effect", "others_excused"),
    ("repeated, without such a kill", "others_more"),
    ("never", "others_never"),
    ("", ""),
    ("duplicates replayed", "replayed"),
    ("conflicts postponed", "conflicted"),
    ("takeovers", "taken_over"),
    ("leases lost by a living worker", "lease_lost"),
    ("seconds", "seconds"),
)
BAD = {
    "charged_more": "charged twice or more",
    "charged_never": "never charged",
    "others_more": "stock or mail repeated without a kill between effect and completion",
    "others_never": "stock or mail missing",
}
"""What was promised not to be."""


def figures(rows: Sequence[Row], *, orders: Iterable[str], published: int, seconds: float) -> Figures:
    effects = Counter((row.task, row.order) for row in rows if row.what == "effect")
    excused, found = _excused(rows), Counter[str](row.what for row in rows)
    found.update(f"killed_{row.point}" for row in rows if row.what == "kill")
    for order in orders:
        for task in (CHARGE, STOCK, MAIL):
            repeated = "excused" if task != CHARGE and (task, order) in excused else "more"
            times = {0: "never", 1: "once"}.get(effects[task, order], repeated)
            found[f"{'charged' if task == CHARGE else 'others'}_{times}"] += 1
    found["redelivered"] = len(_followed(rows)[1])
    return {**dict.fromkeys((key for _, key in LINES), 0), **found, "published": published, "seconds": seconds}


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
        elif row.what in ("returned", "kill"):
            at.pop(row.pid, None)
    return at, again


def _excused(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """(task, order) pairs for which only "at least once" is promised."""
    killed = {(row.task, row.order) for row in rows if row.what == "kill" and row.point == "after"}
    order_of = {row.task_id: (row.task, row.order) for row in rows if row.what == "run"}
    lost = {order_of[row.task_id] for row in rows if row.what == "lease_lost" and row.task_id in order_of}
    return killed | lost


def broken_promises(found: Mapping[str, Figures]) -> list[str]:
    """What `IdempotentTask` promised and did not keep; empty is good."""
    return [f"{count} x {claim}" for key, claim in BAD.items() if (count := found["idempotent"][key])]


def missing_evidence(found: Mapping[str, Figures], *, kills: int, store_kills: int) -> list[str]:
    """Why a run without broken promises would still prove nothing; empty is good."""
    gaps = {
        "plain Celery made no duplicate charge, so there was nothing to prevent": not found["plain"]["charged_more"],
        "no duplicate was replayed": not found["idempotent"]["replayed"],
        "no killed worker's claim was taken over": not found["idempotent"]["taken_over"],
    }
    for name, column in found.items():
        died, lost = column["killed_before"] + column["killed_after"], column["store_killed"]
        gaps[f"{name}: {died} kills instead of {kills}"] = died != kills
        gaps[f"{name}: no task was delivered again while it ran, for all the timeout"] = not column["redelivered"]
        gaps[f"{name}: the store was killed {lost} times instead of {store_kills}"] = lost != store_kills
    return [gap for gap, is_so in gaps.items() if is_so]


def table(found: Mapping[str, Figures], orders: int, store: str, broker: str) -> Table:
    """Both columns side by side, on a terminal of 80 characters, too."""
    grid = Table(
        title=f"The same {orders} orders under the same fire (store {store}, broker {broker})",
        title_style="bold",
        title_justify="left",
        caption=f"{CRASH_AFTER} {REDIS_BROKER}" if broker == "redis" else CRASH_AFTER,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    grid.add_column("")
    for title in COLUMNS.values():
        grid.add_column(title, justify="right")
    for label, key in LINES:
        if not key:
            grid.add_section()
        elif found["idempotent"]["store_killed"] or not key.startswith("store_"):
            cells = (found[name][key] for name in COLUMNS)
            styles = "bold red" if key in BAD else ""
            grid.add_row(label, *(Text(str(each), style=styles if each else "") for each in cells))
    return grid


def summary(found: Mapping[str, Figures], orders: int) -> list[str]:
    plain, ours = found["plain"], found["idempotent"]
    kills = sum(each["killed_before"] + each["killed_after"] for each in found.values())
    repeated = [each["others_more"] + each["others_excused"] for each in (plain, ours)]
    return [
        f"{kills} worker processes were killed, right before an effect or right after it.",
        f"Plain Celery charged {plain['charged_more']} of {orders} orders more than once.",
        f"IdempotentTask charged {ours['charged_once']} of {orders} exactly once:"
        f" {ours['taken_over']} takeovers, {ours['replayed']} replays.",
        f"Stock and mail know no keys: plain repeated {repeated[0]},"
        f" ours {repeated[1]} ({ours['others_excused']} after a kill).",
    ]
