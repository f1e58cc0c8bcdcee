"""From counts at the receivers to a table and a verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

KINDS: Mapping[str, tuple[str, str]] = {
    "charge": ("payment API", "step with a key"),
    "reserve": ("stock in DynamoDB", "commit"),
    "book": ("ledger in SQL", "transaction"),
    "receipt": ("receipt that follows", "outbox"),
    "publish": ("search index", "fenced step"),
    "notify": ("text message", "step at most once"),
}
"""By task, its receiver and its tool; all but the last are promised exactly once."""

AT_MOST_ONCE = "notify"


@dataclass(frozen=True, slots=True)
class Kind:
    """What became of one kind of effect."""

    kills: int
    once: int
    more: int
    never: int
    unknown: int


def tally(
    counts: Mapping[str, Counter[str]],
    kills: Mapping[str, int],
    unknown: Mapping[str, Collection[str]],
    orders: Sequence[str],
) -> dict[str, Kind]:
    """Count orders by how often each effect happened to them; "never" is what nobody knows to be in doubt."""
    found = {}
    for kind in KINDS:
        times = [counts[kind][order] for order in orders]
        in_doubt = unknown.get(kind, ())
        found[kind] = Kind(
            kills=kills.get(kind, 0),
            once=times.count(1),
            more=sum(each > 1 for each in times),
            never=sum(not each and order not in in_doubt for order, each in zip(orders, times, strict=True)),
            unknown=len(in_doubt),
        )
    return found


def broken_promises(idempotent: Mapping[str, Kind]) -> list[str]:
    """What was promised and not kept; empty is good."""
    broken = [f"{name}: {kind.more} twice or more" for name, kind in idempotent.items() if kind.more]
    broken += [f"{name}: {kind.never} never" for name, kind in idempotent.items() if kind.never]
    broken += [
        f"{name}: {kind.unknown} UNKNOWN" for name, kind in idempotent.items() if kind.unknown and name != AT_MOST_ONCE
    ]
    return broken


def missing_evidence(plain: Mapping[str, Kind], idempotent: Mapping[str, Kind]) -> list[str]:
    """Why a run without broken promises would still prove nothing; empty is good."""
    gaps = [f"{name}: nobody was killed" for name, kind in idempotent.items() if not kind.kills]
    gaps += [f"plain {name}: nothing was repeated" for name, kind in plain.items() if not kind.more]
    return gaps


def table(plain: Mapping[str, Kind], idempotent: Mapping[str, Kind], orders: int) -> Table:
    """Both columns side by side, on a terminal of 80 characters, too."""
    grid = Table(
        title=f"Every kind of effect, {orders} orders, processes killed at random",
        title_style="bold",
        caption="Orders, by how often it happened. plain: plain Celery. ours: IdempotentTask.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    grid.add_column("receiver\n  its tool", no_wrap=True)
    for name in ("\nkilled", "plain:\nonce", "\nmore", "\nnever", "ours:\nonce", "\nmore", "\nnever", "\nUNKNOWN"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, (receiver, tool) in KINDS.items():
        before, now = plain[name], idempotent[name]
        kills, unknown = Text(f"{before.kills} / {now.kills}"), Text(str(now.unknown))
        grid.add_row(f"{receiver}\n  {tool}", kills, *_cells(before), *_cells(now), unknown)
    return grid


def _cells(kind: Kind) -> list[Text]:
    return [Text(str(kind.once)), _bad(kind.more), _bad(kind.never)]


def _bad(count: int) -> Text:
    return Text(str(count), style="bold red" if count else "")
