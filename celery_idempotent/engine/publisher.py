"""A publisher's side of the store: the operation is recorded before its message is sent, and confirmed after."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

from celery_idempotent.engine.claim import MAX_RACES, new_nonce
from celery_idempotent.engine.processes import is_gone
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.publishing import Announce, Outgoing, Publication, Underway, confirmed, publication
from celery_idempotent.protocol.record import Record, process_of
from celery_idempotent.protocol.store import RecordTooLarge, Store


def announce(store: Store, outgoing: Outgoing) -> Publication:
    """Record what is to be published, or say why there is nothing to publish; an ``Announce`` is stored.

    A write is sent once: what a lost reply leaves open, the message answers. After an error send it.
    """
    seen: Record | None = None
    for _ in range(MAX_RACES):
        asked = partial(publication, seen, outgoing, store.now(), new_nonce())
        decision = asked()
        if isinstance(decision, Underway) and is_gone(process_of(decision.record)):
            decision = asked(is_gone=True)
        if not isinstance(decision, Announce):
            return decision
        try:
            seen = store.swap(decision.record, decision.seen.revision if decision.seen else None)
        except (StoreUnavailable, RecordTooLarge):
            raise
        except BaseException:  # of somebody else's, such as a soft time limit: nothing will be sent
            with suppress(Exception):
                withdraw(store, decision)
            raise
        if seen is not None and seen.revision == decision.record.revision:
            return decision
    raise StoreUnavailable(type(store).__name__, "announce", f"{MAX_RACES} races lost in a row")


def confirm(store: Store, announced: Announce, outgoing: Outgoing) -> None:
    """Record that the message was sent, unless somebody has written the record since, as who executes it does.

    After an error the message may count for a lease only.
    """
    store.swap(confirmed(announced.record, outgoing, store.now(), new_nonce()), announced.record.revision)


def withdraw(store: Store, announced: Announce) -> None:
    """Leave the record as it was before, unless somebody has written it since: the message could not be sent.

    After an error the record is in doubt once its time is over.
    """
    if announced.seen is None:
        store.delete(announced.record.key, announced.record.revision)
    else:
        store.swap(replace(announced.seen, revision=new_nonce()), announced.record.revision)
