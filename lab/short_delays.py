"""Policies for what is no experiment about waiting, and for those that compare with delays that do not grow."""

from typing import ClassVar

from celery_idempotent import Policy

__all__ = ["ShortDelays"]


class ShortDelays(Policy):
    """A policy whose delays grow to ``longest`` milliseconds at most, or ``backoff`` where that is longer."""

    longest: ClassVar[int] = 500

    def conflict_delay_ms(
        self, postponed: int, running_for: int, retry_after: int, *, bounds: tuple[int, ...], draw: float
    ) -> int:
        """See :meth:`Policy.conflict_delay_ms`."""
        return super().conflict_delay_ms(postponed, running_for, retry_after, bounds=self._within(bounds), draw=draw)

    def outage_delay_ms(self, postponed: int, *, bounds: tuple[int, ...], draw: float) -> int:
        """See :meth:`Policy.outage_delay_ms`."""
        return super().outage_delay_ms(postponed, bounds=self._within(bounds), draw=draw)

    def _within(self, bounds: tuple[int, ...]) -> tuple[int, ...]:
        return (*bounds, max(self.longest, self.backoff_ms))
