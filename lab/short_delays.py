"""Policies for what is no experiment about waiting, and for those that compare with delays that do not grow."""

from collections.abc import Sequence
from typing import ClassVar

from celery_idempotent import Policy


class ShortDelays(Policy):
    """A policy whose delays grow to ``longest`` milliseconds at most, or ``backoff`` where that is longer."""

    longest: ClassVar[int] = 500

    def conflict_delay_ms(self, *args: int, bounds: Sequence[int], draw: float, grace: int) -> int:
        return super().conflict_delay_ms(*args, bounds=self._within(bounds), draw=draw, grace=grace)

    def outage_delay_ms(self, postponed: int, *, bounds: Sequence[int], draw: float) -> int:
        return super().outage_delay_ms(postponed, bounds=self._within(bounds), draw=draw)

    def _within(self, bounds: Sequence[int]) -> tuple[int, ...]:
        return (*bounds, max(self.longest, self.backoff_ms))
