"""Sent to every worker: look often for messages that nobody acknowledged.

kombu before 5.7 looks for messages in Redis every hundred seconds; since then, options of the transport say how often.
"""

from typing import Any

from kombu.transport import redis

if not hasattr(redis.Channel, "unacked_restore_interval"):
    _register: Any = redis.Transport.register_with_event_loop

    def _register_and_look_often(transport: Any, connection: Any, loop: Any) -> None:
        _register(transport, connection, loop)
        loop.call_repeatedly(0.5, transport.cycle.maybe_restore_messages)

    redis.Transport.register_with_event_loop = _register_and_look_often  # type: ignore[method-assign]
    redis.QoS.restore_visible.__defaults__ = (0, 10, 1)
