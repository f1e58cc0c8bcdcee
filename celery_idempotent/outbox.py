"""The outbox: messages that are published if and only if a transaction of an SQL database commits.

In a task, ``tx.send()`` within ``attempt.transaction()`` writes them. Elsewhere, such as in a web request, it is::

    from celery_idempotent import outbox

    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, ship, order.id)

A relay then publishes each at least once and always with the same task id. Every worker of an app whose store has
an outbox relays, in a thread; ``celery -A your_app idempotency relay`` does so on its own. The message is on disk from
the commit to the moment the broker has taken it, also while the broker is away.
"""

from celery_idempotent.integration.messages.outbox import relay, send

__all__ = ["relay", "send"]
