"""Any number of beats for one schedule, without a leader: each tick runs once, whichever of them sent it.

::

    celery -A shop beat -S celery_idempotent.beat:PersistentScheduler

Or with a scheduler of another package::

    from celery_idempotent.beat import SchedulerMixin
    from django_celery_beat.schedulers import DatabaseScheduler

    class Scheduler(SchedulerMixin, DatabaseScheduler): ...

Every beat sends every tick, with its name: the entry's name and the due time. The guard derives the operation's
identity from it, so the first message runs and the others get its result.
"""

from celery_idempotent.integration.messages.ticks import PersistentScheduler, SchedulerMixin

__all__ = ["PersistentScheduler", "SchedulerMixin"]
