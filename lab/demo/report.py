"""The one table, and what its words mean."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lab.demo.audit import Tally
from lab.demo.faults import SLOW, SLOW_RUNS
from lab.demo.settings import SLOW_BODY, VISIBILITY_TIMEOUT

LEGEND = {
    "columns": (
        "Same load, faults and settings (acks_late, reject_on_worker_lost), one after the other. "
        "A column ends when its queue is empty and nothing runs. "
        "The numbers come from a ledger without unique constraint."
    ),
    "killed": (
        "A worker's child got SIGKILL inside the body. "
        "Seen from later, a crash after an effect looks like one before it."
    ),
    "charged": (
        "The provider honours idempotency keys. Plain Celery has none to give; IdempotentTask derives one "
        "from the intent, which a re-run after a crash presents again. "
        "This is the promise: exactly once for every order, whatever was killed."
    ),
    "stock + mail": (
        "They honour no key. Promised is exactly once, unless the worker is killed between effect and "
        "completion: then, and only then, at least once. No library can do better for such an effect."
    ),
    "slow": (
        f"1 order in {SLOW[0]} works for {SLOW_BODY:g} s; the visibility timeout is {VISIBILITY_TIMEOUT} s. "
        "Plain Celery repeats that forever on SQS, so such an order is slow for its first "
        f"{SLOW_RUNS} runs only: thus the plain column comes to an end."
    ),
}
STORE_KILLED = (
    "It got SIGKILL in the middle of the load and came back about a second later, with all that it had "
    "acknowledged. Tasks that found it away ran nothing and were postponed."
)
REDIS_BROKER = (
    "Children are killed, not whole workers: what a worker is fetching from Redis at that moment is lost with it, "
    "before any task could know of it. A lost message would show as an order never charged."
)


def table(plain: Tally, idempotent: Tally, store: str, broker: str) -> RenderableType:
    """Both columns side by side, with the legend."""
    grid = Table(title=f"The same orders under the same fire (store {store}, broker {broker})", title_style="bold")
    grid.add_column("")
    grid.add_column("plain Celery", justify="right")
    grid.add_column("IdempotentTask", justify="right")

    def row(label: str, field: str, bad: bool = False) -> None:
        grid.add_row(label, *(_cell(getattr(column, field), bad) for column in (plain, idempotent)))

    row("orders", "orders")
    row("orders published, duplicates included", "published")
    row("deliveries to a worker process", "deliveries")
    row("tasks delivered again while they ran", "redelivered")
    row("bodies run", "runs")
    row("children killed before the effect", "killed_before")
    row("children killed after the effect", "killed_after")
    row("store killed and back", "store_kills")
    grid.add_section()
    row("orders charged exactly once", "charged_once")
    row("orders charged twice or more", "charged_more", bad=True)
    row("orders never charged", "charged_never", bad=True)
    row("second charges the provider recognised", "recognised")
    grid.add_section()
    row("stock + mail: exactly once", "others_once")
    row("stock + mail: repeated, killed after effect", "others_more_excused")
    row("stock + mail: repeated, no such excuse", "others_more", bad=True)
    row("stock + mail: never", "others_never", bad=True)
    grid.add_section()
    row("duplicates replayed", "replayed")
    row("conflicts retried", "conflicted")
    row("takeovers", "taken_over")
    row("leases lost by a living worker", "leases_lost")
    row("found the store away", "store_missed")
    row("seconds", "seconds")
    legend = dict(LEGEND)
    if idempotent.store_kills:
        legend["store"] = STORE_KILLED
    if broker == "redis":
        legend["broker"] = REDIS_BROKER
    return Group(grid, _legend(legend))


def _legend(legend: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for word, meaning in legend.items():
        grid.add_row(Text(word, style="bold"), Text(meaning, style="dim"))
    return grid


def _cell(value: float, bad: bool) -> Text:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return Text(text, style="bold red" if bad and value else "")
