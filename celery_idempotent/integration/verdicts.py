"""An operator's verdicts, for Python, commands and pages alike: each is recorded with a name and a reason, and told."""

import getpass
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from celery import Celery, current_app

from celery_idempotent.engine import verdicts
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.reports import report_verdict
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.protocol.cipher import legible
from celery_idempotent.protocol.record import Record

_NOT_GIVEN = object()


def resolve(
    key: str,
    *,
    completed: Any = _NOT_GIVEN,
    rerun: bool = False,
    by: str = "",
    reason: str = "",
    app: Celery | None = None,
    seen_revision: str | None = None,
) -> Record:
    """Give the verdict on an operation whose outcome is UNKNOWN; the only way out of that state.

    First find out from the receiver whether the effect happened.

    Args:
        key: The idempotency key, as ``OutcomeUnknown.key``, the signal and ``idempotency list`` tell it.
        completed: It happened; every later delivery is answered with this, kept as the task's policy says.
        rerun: It did not happen; the next delivery runs the body, except for its finished steps.
        by: Who says so; default: the user of this process. It is kept in the record, as the reason is, for
            ``idempotency_keep_verdicts``.
        reason: Why, such as what the receiver told, or the number of a ticket.
        app: The Celery app; default: the current one.
        seen_revision: The revision of the record that the person looked at; default: judge what is recorded now.

    Returns:
        The record as it is now; its ``verdict`` tells what was judged.

    Raises:
        PolicyError: Not exactly one verdict is given, the outcome is not UNKNOWN, or somebody else changed the
            record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    if (completed is _NOT_GIVEN) is not rerun:
        raise PolicyError(
            "resolve",
            repr(key),
            "give either completed=<its result> or rerun=True",
            see="operators#the-verdict-is-not-clear",
        )
    app, runtime = _of(app)
    store = runtime.store
    told: Any = {
        "keep": runtime.keep_verdicts,
        "by": by or this_user(),
        "reason": reason,
        "seen_revision": seen_revision,
    }
    if rerun:
        return _told(app, verdicts.rerun(store, key, **told))
    retain = runtime.policy_of(store.get(key)).retain_ms
    return _told(app, verdicts.completed(store, runtime.codec, key, completed, retain=retain, **told))


def release(
    key: str, *, by: str = "", reason: str = "", app: Celery | None = None, seen_revision: str | None = None
) -> Record:
    """Give back the claim of an attempt that never ended; the next delivery runs the body.

    Under ``on_takeover="refuse"`` you state by it that the effect did not happen.

    Args:
        key: The idempotency key.
        by: As of :func:`resolve`, like the rest.
        reason: Why.
        app: The Celery app; default: the current one.
        seen_revision: The revision that the person looked at; default: whatever is recorded now.

    Raises:
        PolicyError: Its body may be alive, as the lease and its grace are not over; it is not in progress; or
            somebody else changed the record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    app, runtime = _of(app)
    grace = runtime.policy_of(runtime.store.get(key)).grace_ms
    judged = verdicts.release(
        runtime.store,
        key,
        grace=grace,
        keep=runtime.keep_verdicts,
        by=by or this_user(),
        reason=reason,
        seen_revision=seen_revision,
    )
    return _told(app, judged)


def forget(
    key: str, *, by: str = "", reason: str = "", app: Celery | None = None, seen_revision: str | None = None
) -> Record:
    """Forget an outcome, or a released record, on purpose; the next delivery is a new operation and **runs again**.

    Nothing of the call stays: no result, error, label, task id, fingerprint or step. Who has forgotten it and why stays
    until the store deletes the record, and so does the fencing token, so that the next one is larger. Results that are
    objects, by ``idempotency_large_results``, are deleted there.

    Args:
        key: The idempotency key.
        by: As of :func:`resolve`, like the rest.
        reason: Why.
        app: The Celery app; default: the current one.
        seen_revision: The revision that the person looked at; default: whatever is recorded now.

    Raises:
        PolicyError: It is UNKNOWN, which is to be resolved first; an attempt owns it; or somebody else changed the
            record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    app, runtime = _of(app)
    judged = verdicts.forget(
        runtime.store,
        key,
        by=by or this_user(),
        reason=reason,
        seen_revision=seen_revision,
        large=runtime.large_results,
    )
    return _told(app, judged)


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one of many verdicts: the record as it is now, or as it was and why the verdict was refused."""

    record: Record
    refusal: str = ""


def judge_each(records: Iterable[Record], give: Callable[[Record], Record]) -> Iterator[Judged]:
    """Give a verdict on each of many records, one after the other.

    What is refused, or has changed since it was looked at, is passed over and told.

    Args:
        records: As the person saw them.
        give: Gives the verdict on one: ``lambda seen: forget(seen.key, by="ann", seen_revision=seen.revision)``.

    Raises:
        StoreUnavailable: No certain answer about one of them; those before it are judged, those after it are not.
    """
    for seen in records:
        try:
            yield Judged(give(seen))
        except PolicyError as error:
            yield Judged(seen, str(error))


def json_of(text: str) -> Any:
    """What a person states as JSON; ``ValueError`` for all else, such as NaN, and for what is nested too deep."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def this_user() -> str:
    """Who gives a verdict where nobody else is named: the user of this process, and the machine."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return socket.gethostname()


def _of(app: Celery | None) -> tuple[Celery, Runtime]:
    app = app or current_app
    return app, runtime_of(app)


def _told(app: Celery, judged: Record) -> Record:
    judged = legible(runtime_of(app).cipher, judged)
    report_verdict(app, judged)
    return judged
