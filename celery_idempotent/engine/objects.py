"""Results that are objects: read again, checked, and deleted with what is forgotten."""

from collections.abc import Iterator

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.objects import CONTENT_TYPE, LargeResults, ObjectMissing, Pointer, pointer_in
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Finished, from_plain

_CHECK = b"Written by celery-idempotent when a worker starts, to see whether it may."


class ObjectLost(Exception):
    """The object of a result is gone, or not what was written; the text says which."""


def fetched(large: LargeResults | None, encoded: Encoded, key: str) -> Encoded:
    """The encoded result of the operation ``key``: what was recorded, or what its object has.

    Raises:
        ObjectLost: It is gone, or not what was written.
        StoreMisconfigured: It cannot be read until somebody changes something.
        StoreUnavailable: No answer.
    """
    try:
        pointer = pointer_in(encoded)
        if pointer is None:
            return encoded
        if not pointer.is_of(key):
            raise ValueError("it is not one of this operation's")
        if large is None:
            raise StoreMisconfigured(
                "idempotency_large_results",
                "get",
                f"the result is an object, {pointer.name!r}, and the setting is not there; set it as where it was "
                "written",
            )
        return pointer.result_in(large.objects.get(pointer.name))
    except ObjectMissing as error:
        raise ObjectLost(f"its object is gone: {error}") from error
    except ValueError as error:
        raise ObjectLost(f"its object cannot be used: {error}") from error


def with_result(large: LargeResults | None, record: Record) -> Record:
    """The record with its result in the place of a pointer; or without one, and why. Raises as :func:`fetched` does."""
    if record.result is None or record.content_type != CONTENT_TYPE:
        return record
    try:
        encoded = fetched(large, Encoded(record.result, CONTENT_TYPE), record.key)
    except ObjectLost as error:
        return record.but(result=None, content_type=None, error=str(error))
    return record.but(result=encoded.data, content_type=encoded.content_type)


def verify(large: LargeResults) -> None:
    """Check that objects can be written and read, and that a lost one can be told from one that may not be read.

    One small object stays, always the same.

    Raises:
        StoreMisconfigured: They cannot; the message names the remedy.
        StoreUnavailable: No answer.
    """
    name = f"{large.prefix}celery-idempotent-check"
    large.objects.put(name, _CHECK)
    try:
        found = large.objects.get(name)
        if found != _CHECK:
            raise StoreMisconfigured(repr(large.objects), "get", f"{name!r} is not what was written just before")
    except ObjectMissing as error:
        raise StoreMisconfigured(repr(large.objects), "get", f"{name!r} is not there after it was written") from error
    try:
        large.objects.get(f"{large.prefix}celery-idempotent-missing")
    except ObjectMissing:
        return
    raise StoreMisconfigured(repr(large.objects), "get", "it has an object that nobody has written")


def pointers_of(record: Record) -> Iterator[Pointer]:
    """The objects that the record's result and its steps are kept in.

    What cannot be read points to none, and what names another operation's counts as none.
    """
    results = [Encoded(record.result, record.content_type)] if record.result and record.content_type else []
    for plain in record.steps.values():
        try:
            state = from_plain(plain)
        except ValueError:
            continue
        if isinstance(state, Finished) and state.result:
            results.append(state.result)
    for each in results:
        try:
            pointer = pointer_in(each)
        except ValueError:
            continue
        if pointer and pointer.is_of(record.key):
            yield pointer
