"""Sent to every worker: look for dead pool children often.

Celery learns of a killed child at once or, if it looked a moment too early, from a timer every five seconds.
"""

from celery.concurrency.asynpool import AsynPool

AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})
