"""An operator's verdicts, for Python, commands and pages alike: each is recorded with a name and a reason, and told."""

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from celery import Celery, current_app

from celery_idempotent.engine import verdicts
from celery_idempotent.errors import PolicyError, StoreMisconfigured
from celery_idempotent.integration.events import report_verdict
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.troubleshooting import with_link

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
        raise PolicyError("resolve", repr(key), "give either completed=<its result> or rerun=True")
    action, result = (Action.RERUN, None) if rerun else (Action.COMPLETED, completed)
    return judge(action, key, result=result, by=by, reason=reason, app=app, seen_revision=seen_revision)


def release(
    key: str, *, by: str = "", reason: str = "", app: Celery | None = None, seen_revision: str | None = None
) -> Record:
    """Give back the claim of an attempt that never ended; the next delivery runs the body.

    Under ``on_takeover="refuse"`` you state by it that the effect did not happen. Arguments are as of :func:`resolve`.

    Raises:
        PolicyError: Its body may be alive, as the lease and its grace are not over; it is not in progress; or
            somebody else changed the record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    return judge(Action.RELEASE, key, by=by, reason=reason, app=app, seen_revision=seen_revision)


def forget(
    key: str, *, by: str = "", reason: str = "", app: Celery | None = None, seen_revision: str | None = None
) -> Record:
    """Forget an outcome, or a released record, on purpose; the next delivery is a new operation and **runs again**.

    Nothing of the call stays: no result, error, label, task id, fingerprint or step. Who has forgotten it and why stays
    until the store deletes the record, and so does the fencing token, so that the next one is larger. Results that are
    objects, by ``idempotency_large_results``, are deleted there. Arguments are as of :func:`resolve`.

    Raises:
        PolicyError: It is UNKNOWN, which is to be resolved first; an attempt owns it; or somebody else changed the
            record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    return judge(Action.FORGET, key, by=by, reason=reason, app=app, seen_revision=seen_revision)


def judge(
    action: Action,
    key: str,
    *,
    result: Any = None,
    by: str = "",
    reason: str = "",
    app: Celery | None = None,
    store: Store | None = None,
    seen_revision: str | None = None,
) -> Record:
    """Give the verdict ``action`` on ``key``, log it and send its signal.

    Arguments and errors are those of :func:`resolve`, and ``RecordTooLarge`` if the store has no room for ``result``;
    ``store`` is where the record is, if not where ``app`` writes.
    """
    app = app or current_app
    runtime = runtime_of(app)
    store = store or runtime.store
    encoded = runtime.codec.encode(result) if action is Action.COMPLETED else None
    seen = verdicts.recorded(store, key, seen_revision)
    policy = runtime.policy_of(seen)
    judged = verdicts.judge(
        store,
        seen,
        action,
        grace=runtime.grace,
        retain=policy.retain_ms,
        keep=runtime.keep_verdicts,
        by=by or this_user(),
        reason=reason,
        result=encoded,
    )
    report_verdict(app, judged)
    return judged


CHOICES: Mapping[Action, tuple[str, str]] = {
    Action.COMPLETED: ("It happened", "Every later delivery is answered with the result that you state."),
    Action.RERUN: ("It did not happen", "The next delivery runs the task. There must be one: publish it again."),
    Action.RELEASE: (
        "Give the claim back",
        "The attempt is gone and had no effect, or may have it again. The next delivery runs the task.",
    ),
    Action.FORGET: (
        "Forget the outcome",
        "The next delivery is a new operation, and runs the task again. Nothing of this one stays.",
    ),
}
"""By verdict, what a person states on a page, and what follows from it."""

REFUSED = (PolicyError, StoreMisconfigured, RecordTooLarge)
"""What says that a verdict was not given, and certainly not."""


def refusal(error: Exception) -> str:
    """Why a verdict was refused, by one of :data:`REFUSED`, without the key, so that many can have one reason."""
    match error:
        case PolicyError(remedy=why, see=see) | StoreMisconfigured(reason=why, see=see):  # such as of a damaged step
            return with_link(why, see)
        case _:
            return with_link(f"the store has no room for so large a record: {error}", "options#resolve")


class Judged(NamedTuple):
    """What became of one of many verdicts: the record as it is now, or as it was and why the verdict was refused."""

    record: Record
    refusal: str = ""


def judge_each(action: Action, records: Iterable[Record], **proof: Any) -> Iterator[Judged]:
    """Judge each of many records as the person saw them; ``proof`` is what :func:`judge` takes, too.

    After ``StoreUnavailable`` nothing is certain about one of them; those before it are judged, those after it are not.
    """
    for seen in records:
        try:
            yield Judged(judge(action, seen.key, seen_revision=seen.revision, **proof))
        except REFUSED as error:
            yield Judged(seen, refusal(error))


def json_of(text: str) -> Any:
    """What a person states as JSON; ``ValueError`` for all else, such as NaN, and for what is nested too deep."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def this_user() -> str:
    """Who gives a verdict where nobody else is named: the user of this process, and the machine."""
    import getpass  # brings the terminal, which only a person has

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return socket.gethostname()
