"""The table, and what it says in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from lab.demo.audit import Tally

REDIS_BROKER = (
    "Children are killed, not whole workers: what a worker is fetching from Redis at that moment is lost with it, "
    "before any task could know of it. A lost message would show as an order never charged."
)
CRASH_AFTER = "A crash right after an effect looks like one right before it; no library can tell them apart."


def table(plain: Tally, idempotent: Tally, store: str, broker: str) -> Table:
    """Both columns side by side, on a terminal of 80 characters, too."""
    grid = Table(
        title=f"The same {plain.orders} orders under the same fire (store {store}, broker {broker})",
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
    grid.add_column("plain Celery", justify="right")
    grid.add_column("IdempotentTask", justify="right")

    def row(label: str, field: str, bad: bool = False) -> None:
        grid.add_row(label, *(_cell(getattr(column, field), bad) for column in (plain, idempotent)))

    row("published (every third order twice)", "published")
    row("tasks delivered again while they ran", "redelivered")
    row("processes killed before the effect", "killed_before")
    row("processes killed after the effect", "killed_after")
    if idempotent.store_kills:
        row("store killed and back", "store_kills")
        row("deliveries that found it away, and were postponed", "store_missed")
    row("bodies run", "runs")
    grid.add_section()
    row("orders charged exactly once", "charged_once")
    row("orders charged twice or more", "charged_more", bad=True)
    row("orders never charged", "charged_never", bad=True)
    row("second charges that the bank recognised", "recognised")
    grid.add_section()
    row("stock and mail, which know no keys: once", "others_once")
    row("repeated, after a kill right after the effect", "others_more_excused")
    row("repeated, without such a kill", "others_more", bad=True)
    row("never", "others_never", bad=True)
    grid.add_section()
    row("duplicates replayed", "replayed")
    row("conflicts postponed", "conflicted")
    row("takeovers", "taken_over")
    row("leases lost by a living worker", "leases_lost")
    row("seconds", "seconds")
    return grid


def _cell(value: float, bad: bool) -> Text:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return Text(text, style="bold red" if bad and value else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an act has shown: in sentences, what was promised and not kept, and why it would prove nothing."""

    summary: Sequence[str]
    broken: Sequence[str]
    missing: Sequence[str]


def summary(plain: Tally, ours: Tally) -> list[str]:
    """The run in four sentences."""
    return [
        f"{plain.kills + ours.kills} worker processes were killed, right before an effect or right after it.",
        f"Plain Celery charged {plain.charged_more} of {plain.orders} orders more than once.",
        f"IdempotentTask charged {ours.charged_once} of {ours.orders} exactly once:"
        f" {ours.taken_over} takeovers, {ours.replayed} replays.",
        f"Stock and mail know no keys: plain repeated {_repeated(plain)},"
        f" ours {_repeated(ours)} ({ours.others_more_excused} after a kill).",
    ]


def _repeated(column: Tally) -> int:
    return column.others_more + column.others_more_excused
