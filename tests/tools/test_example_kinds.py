"""How the example of every kind of effect counts and judges."""

import io
import re
from collections import Counter

from rich.console import Console

from lab.kinds import tally
from lab.kinds.tally import KINDS, Kind

ORDERS = ["a", "b", "c"]


def _counts(**changed: dict[str, int]) -> dict[str, Counter[str]]:
    return {kind: Counter(changed.get(kind, dict.fromkeys(ORDERS, 1))) for kind in KINDS}


def test_effects_are_counted_by_order() -> None:
    """Once, more often, never; an order in doubt is not counted as never."""
    found = tally.tally(_counts(notify={"a": 2}), {"notify": 3}, {"notify": ["b"]}, ORDERS)

    assert found["notify"] == Kind(kills=3, once=0, more=1, never=1, unknown=1)
    assert found["charge"] == Kind(kills=0, once=3, more=0, never=0, unknown=0)


def test_every_breach_is_told() -> None:
    """Twice, never, or in doubt where no doubt is allowed."""
    good = Kind(kills=1, once=3, more=0, never=0, unknown=0)
    kept = dict.fromkeys(KINDS, good)

    assert tally.broken_promises({**kept, "notify": Kind(1, 2, 0, 0, 1)}) == []
    assert tally.broken_promises({**kept, "charge": Kind(1, 2, 1, 0, 0)}) == ["charge: 1 twice or more"]
    assert tally.broken_promises({**kept, "notify": Kind(1, 2, 0, 1, 0)}) == ["notify: 1 never"]
    assert tally.broken_promises({**kept, "book": Kind(1, 2, 0, 0, 1)}) == ["book: 1 UNKNOWN"]


def test_run_without_fire_proves_nothing() -> None:
    """Nobody killed, or nothing repeated by plain Celery."""
    good = Kind(kills=1, once=3, more=0, never=0, unknown=0)
    bad = Kind(kills=1, once=2, more=1, never=0, unknown=0)

    assert tally.missing_evidence(dict.fromkeys(KINDS, bad), dict.fromkeys(KINDS, good)) == []
    assert len(tally.missing_evidence(dict.fromkeys(KINDS, good), dict.fromkeys(KINDS, good))) == len(KINDS)
    assert tally.missing_evidence(dict.fromkeys(KINDS, bad), dict.fromkeys(KINDS, Kind(0, 3, 0, 0, 0)))


def test_table_fits_a_terminal() -> None:
    """Nothing is cut off or folded at 80 characters, nor with numbers of three digits."""
    shown = Console(width=80, record=True, file=io.StringIO())
    many = dict.fromkeys(KINDS, Kind(98, 997, 996, 995, 994))

    shown.print(tally.table(many, many, 999))
    table = shown.export_text()

    assert "…" not in table
    assert len(re.findall(r" 98 / 98 +997 +996 +995 +997 +996 +995 +994$", table, re.M)) == len(KINDS)
