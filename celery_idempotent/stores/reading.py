"""Reading many records for people: one that cannot be read must not hide the others."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Record

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


listeners: list[Callable[[str, Exception], None]] = []
"""Each is called with the key of a record that is passed over, as far as it can be read, and what is wrong with it."""


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
            key = str(key_of(each))
            say(logger.warning, "record_unreadable", key=key, reason=error)
            for listener in listeners:
                listener(key, error)
        else:
            if record is not None:
                yield record
