"""How the example of every kind of effect counts and judges."""

import io
import re
from collections import Counter
from dataclasses import replace

from rich.console import Console

from lab.kinds import tally
from lab.kinds.tally import KINDS, Kind

ORDERS = ["a", "b", "c"]


def _counts(**changed: dict[str, int]) -> dict[str, Counter[str]]:
    return {kind: Counter(changed.get(kind, dict.fromkeys(ORDERS, 1))) for kind in KINDS}


def test_every_order_is_in_one_column() -> None:
    """Once, more often, never, or in doubt, whatever the effect of the one in doubt was."""
    counts = _counts(notify={"a": 2, "b": 1, "c": 1})
    orders = [*ORDERS, "d", "e", "f"]
    found = tally.tally(counts, {"notify": 3}, {"notify": ["a", "b", "d"]}, orders)["notify"]

    assert found == Kind(kills=3, once=1, more=1, never=2, in_doubt=2, in_doubt_done=1)
    assert found.orders == found.once + found.more + found.never + found.in_doubt == len(orders)


GOOD = Kind(kills=1, once=3, more=0, never=0, in_doubt=0, in_doubt_done=0)


def test_every_breach_is_told() -> None:
    """Twice, never, or in doubt where no doubt is allowed."""
    kept = dict.fromkeys(KINDS, GOOD)

    assert tally.broken_promises({**kept, "notify": replace(GOOD, in_doubt=1)}) == []
    assert tally.broken_promises({**kept, "charge": replace(GOOD, more=1)}) == ["charge: 1 twice or more"]
    assert tally.broken_promises({**kept, "notify": replace(GOOD, never=1)}) == ["notify: 1 never"]
    assert tally.broken_promises({**kept, "book": replace(GOOD, in_doubt=1)}) == ["book: 1 in doubt"]


def test_run_without_fire_proves_nothing() -> None:
    """Nobody killed, or nothing repeated by plain Celery."""
    kept, repeated = dict.fromkeys(KINDS, GOOD), dict.fromkeys(KINDS, replace(GOOD, once=2, more=1))

    assert tally.missing_evidence(repeated, kept) == []
    assert len(tally.missing_evidence(kept, kept)) == len(KINDS)
    assert len(tally.missing_evidence(repeated, dict.fromkeys(KINDS, replace(GOOD, kills=0)))) == len(KINDS)


def test_table_fits_a_terminal() -> None:
    """Nothing is cut off or folded at 80 characters, nor with numbers of three digits."""
    shown = Console(width=80, record=True, file=io.StringIO())
    many = dict.fromkeys(KINDS, Kind(98, 997, 996, 995, 994, 993))

    shown.print(tally.table(many, many, 999))
    table = shown.export_text()

    assert "…" not in table
    assert len(re.findall(r" 98, 98 +997 +996 +997 +996 +995 +994$", table, re.M)) == len(KINDS)


def test_summary_fits_a_line() -> None:
    """Of a terminal of 80 characters, with its indent."""
    assert len(tally.summary(dict.fromkeys(KINDS, replace(GOOD, once=100)))) < 78
