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
    "receipt": ("receipt after it", "outbox"),
    "publish": ("search index", "fenced step"),
    "notify": ("text message", "step, at most once"),
}
"""By task, its receiver and its tool; all but the last are promised exactly once."""

AT_MOST_ONCE = "notify"


@dataclass(frozen=True, slots=True)
class Kind:
    """What became of one kind of effect: every order is in one of `once`, `more`, `never` and `in_doubt`."""

    kills: int
    once: int
    more: int
    never: int
    in_doubt: int  # ended UNKNOWN, which a person decides
    in_doubt_done: int  # those of them that had been done

    @property
    def orders(self) -> int:
        """All of them."""
        return self.once + self.more + self.never + self.in_doubt


def tally(
    counts: Mapping[str, Counter[str]],
    kills: Mapping[str, int],
    unknown: Mapping[str, Collection[str]],
    orders: Sequence[str],
) -> dict[str, Kind]:
    """Count orders by how often each effect happened to them."""
    found = {}
    for kind in KINDS:
        in_doubt = set(unknown.get(kind, ()))
        fates = Counter(_fate(counts[kind][order], order in in_doubt) for order in orders)
        found[kind] = Kind(
            kills=kills.get(kind, 0),
            once=fates["once"],
            more=fates["more"],
            never=fates["never"],
            in_doubt=fates["in doubt, done"] + fates["in doubt, not done"],
            in_doubt_done=fates["in doubt, done"],
        )
    return found


def _fate(times: int, in_doubt: bool) -> str:
    if times > 1:
        return "more"
    if in_doubt:
        return "in doubt, done" if times else "in doubt, not done"
    return "once" if times else "never"


def broken_promises(idempotent: Mapping[str, Kind]) -> list[str]:
    """What was promised and not kept; empty is good."""
    broken = [f"{name}: {kind.more} twice or more" for name, kind in idempotent.items() if kind.more]
    broken += [f"{name}: {kind.never} never" for name, kind in idempotent.items() if kind.never]
    broken += [
        f"{name}: {kind.in_doubt} in doubt"
        for name, kind in idempotent.items()
        if kind.in_doubt and name != AT_MOST_ONCE
    ]
    return broken


def missing_evidence(plain: Mapping[str, Kind], idempotent: Mapping[str, Kind]) -> list[str]:
    """Why a run without broken promises would still prove nothing; empty is good."""
    gaps = [f"{name}: nobody was killed" for name, kind in idempotent.items() if not kind.kills]
    gaps += [f"plain {name}: nothing was repeated" for name, kind in plain.items() if not kind.more]
    return gaps


def summary(idempotent: Mapping[str, Kind]) -> str:
    """The second act in a sentence."""
    text, exact = idempotent[AT_MOST_ONCE], [kind for name, kind in idempotent.items() if name != AT_MOST_ONCE]
    once, orders = sum(kind.once for kind in exact), sum(kind.orders for kind in exact)
    return f"Five kinds of effect: {once} of {orders} exactly once. Texts: {text.once} once, {text.in_doubt} in doubt."


def table(plain: Mapping[str, Kind], idempotent: Mapping[str, Kind], orders: int) -> Table:
    """Both columns side by side, on a terminal of 80 characters, too."""
    grid = Table(
        title=f"Six kinds of effect, {orders} orders each",
        title_style="bold",
        title_justify="left",
        caption=_caption(idempotent[AT_MOST_ONCE]),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    for name in ("receiver", "its tool"):
        grid.add_column(f"\n{name}", no_wrap=True)
    for name in ("\nkilled", "plain\nonce", "\nmore", "ours\nonce", "\nmore", "\nnever", "in\ndoubt"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name, (receiver, tool) in KINDS.items():
        before, now = plain[name], idempotent[name]
        cells = (str(before.once), _bad(before.more), str(now.once), _bad(now.more), _bad(now.never))
        grid.add_row(receiver, tool, f"{before.kills}, {now.kills}", *cells, str(now.in_doubt))
    return grid


def _caption(text: Kind) -> str:
    return (
        f"Of the {text.in_doubt} texts in doubt {text.in_doubt_done} had been sent and "
        f"{text.in_doubt - text.in_doubt_done} had not: a person decides."
    )


def _bad(count: int) -> Text:
    return Text(str(count), style="bold red" if count else "")
