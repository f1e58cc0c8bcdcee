"""Reading many records for people: one that cannot be read must not hide the others."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Record

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def readable(
    stored: Iterable[_T], read: Callable[[_T], Record | None], key_of: Callable[[_T], object]
) -> Iterator[Record]:
    """What can be read of ``stored``; the rest is named in the log and passed over.

    Args:
        stored: Records as the store keeps them.
        read: Gives the record, None if it has been deleted since, or raises ``StoreMisconfigured``.
        key_of: Gives the key, as far as it can be read.
    """
    for each in stored:
        try:
            record = read(each)
        except StoreMisconfigured as error:
            say(logger.warning, "record_unreadable", key=key_of(each), reason=error)
        else:
            if record is not None:
                yield record
