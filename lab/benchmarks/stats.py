"""The arithmetic of the benchmarks: medians and quartiles, of values and of ratios of pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

__all__ = ["Spread", "added", "ratios", "shuffled", "spread"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of ``count`` values. No mean: one preempted call would decide it."""

    median: float
    p25: float
    p75: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of ``values``.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values to summarise")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), lower, upper, len(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios of pairs that were measured one right after the other.

    Whatever slows the machine down slows both halves of a pair, so it cancels out of the ratio.

    Raises:
        ValueError: The sequences differ in length, or are empty.
    """
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def added(values: Sequence[float], bases: Sequence[float]) -> Spread:
    """The spread of what each value has over its base, in that base: 3 to 1 has added 2.

    Raises:
        ValueError: The sequences differ in length, or are empty.
    """
    return spread([(above - below) / below for above, below in zip(values, bases, strict=True)])


def shuffled(items: Sequence[_T], seed: int) -> list[_T]:
    """``items`` in an order of their own for every ``seed``, the same in every run.

    Not rotated: the neighbours would stay the same, and whoever runs after its like finds the caches warm.
    """
    return random.Random(seed).sample(items, len(items))
