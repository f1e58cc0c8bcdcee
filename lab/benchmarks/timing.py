"""How the benchmarks time: rounds in which everybody takes part in random order, and pairs of one round."""

import gc
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TypeVar

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)

COLLECT_EVERY = 20  # rounds after which garbage is collected; never within one


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles. No mean: one preempted call would decide it."""

    median: float
    p25: float
    p75: float

    @property
    def shown(self) -> str:
        return f"{self.median:.3f} [{self.p25:.3f}-{self.p75:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return Spread(middle, lower, upper)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios of pairs. What slows the machine down slows both halves of a pair, so it cancels out."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def added(values: Sequence[float], bases: Sequence[float]) -> Spread:
    """The spread of what each value has over its base, in that base: 3 to 1 has added 2."""
    return spread([(above - below) / below for above, below in zip(values, bases, strict=True)])


def sample(takes: Mapping[_K, Callable[[int], _T]], rounds: int, *, warm_up: int) -> dict[_K, list[_T]]:
    """What each gives in each of ``rounds`` rounds after those to warm up; a round is told its number.

    In each they come in another order, the same in every run. Not rotated: the neighbours would stay the same, and
    whoever runs after its like finds the caches warm.
    """
    found: dict[_K, list[_T]] = {key: [] for key in takes}
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            if number % COLLECT_EVERY == 0:
                gc.collect()
            for key in random.Random(number).sample(list(takes), len(takes)):
                value = takes[key](number)
                if number >= warm_up:
                    found[key].append(value)
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def cpu_us(deliver: Callable[[], object]) -> float:
    """CPU time of this thread, in microseconds."""
    begin = time.thread_time_ns()
    deliver()
    return (time.thread_time_ns() - begin) / 1000
