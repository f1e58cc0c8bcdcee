"""The orders that the benchmarks send."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["SIZES", "order", "result_of", "size_of"]

SIZES = (0, 1_000, 10_000, 100_000)
"""Least sizes of the serialised orders in bytes; the first one gives the smallest order."""


def order(number: int, size: int = 0) -> dict[str, Any]:
    """Order ``number``, with so many lines that its JSON has at least ``size`` bytes."""
    lines = [_line(0)]
    made = {"id": f"ord-{number:019d}", "customer": "cus-471142", "currency": "EUR", "total": 42.5, "lines": lines}
    missing = size - size_of(made)
    per_line = size_of(_line(0)) + 2
    lines.extend(_line(index) for index in range(1, 1 + -(missing // -per_line)))
    return made


def result_of(order: dict[str, Any]) -> dict[str, Any]:
    """What a body that charges ``order`` returns."""
    return {"order": order["id"], "charge": "ch_3PqkT2eZvKYlo2C", "amount": order["total"]}


def size_of(value: Any) -> int:
    """Bytes of the JSON of ``value``."""
    return len(json.dumps(value))


def _line(index: int) -> dict[str, Any]:
    return {"sku": f"s-{index:04d}", "qty": 1 + index % 9}
