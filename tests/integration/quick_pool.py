"""Sent to every worker: look for dead pool children, and for messages that nobody acknowledged, often.

Celery learns of a killed child at once or, if it looked a moment too early, from a timer every five seconds. kombu
before 5.7 looks for messages in Redis every hundred seconds; since then, options of the transport say how often.
"""

from typing import Any

from celery.concurrency.asynpool import AsynPool
from kombu.transport import redis

AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.2})

if not hasattr(redis.Channel, "unacked_restore_interval"):
    _register: Any = redis.Transport.register_with_event_loop

    def _register_and_look_often(transport: Any, connection: Any, loop: Any) -> None:
        _register(transport, connection, loop)
        loop.call_repeatedly(0.5, transport.cycle.maybe_restore_messages)

    redis.Transport.register_with_event_loop = _register_and_look_often  # type: ignore[method-assign]
    redis.QoS.restore_visible.__defaults__ = (0, 10, 1)
