"""Verdicts of people who look at records: how a form says them, and what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration import verdicts as operator
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.protocol.verdicts import Action

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
"""By verdict, what a person is asked, and what follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a person has filled in; ``errors`` by field, where that cannot be a verdict."""

    action: Action | None = None
    by: str = ""
    reason: str = ""
    text: str = ""
    result: Any = None
    checked: bool = False
    errors: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, sent: Mapping[str, Sequence[str]]) -> "Form":
        """As it was sent."""

        def value(name: str) -> str:
            return sent.get(name, [""])[-1].strip()

        errors = {}
        action = next((each for each in Action if each == value("action")), None)
        if action is None:
            errors["action"] = "Choose a verdict."
        by, reason = (one_line(" ".join(value(name).split())) for name in ("by", "reason"))
        if not by:
            errors["by"] = "Say who you are."
        if not reason:
            errors["reason"] = "Say why, such as what the receiver told you, or the number of a ticket."
        result = None
        if action is Action.COMPLETED:
            try:
                result = operator.json_of(value("result"))
            except ValueError:
                errors["result"] = 'Write JSON: "ch_1" with its quotes, 7, {"id": 7} or null.'
        checked = value("checked") == "yes"
        if not checked:
            errors["checked"] = "Check the receiver first; then say so."
        return cls(
            action=action,
            by=by,
            reason=reason,
            text=value("result"),
            result=result,
            checked=checked,
            errors=errors,
        )

    def judge(self, app: Celery, seen: Record) -> Record:
        """Give this verdict on what the person saw. Raises as :mod:`celery_idempotent.integration.verdicts` does."""
        key = seen.key
        told: Any = {"by": self.by, "reason": self.reason, "app": app, "seen_revision": seen.revision}
        try:
            match self.action:
                case Action.COMPLETED:
                    return operator.resolve(key, completed=self.result, **told)
                case Action.RERUN:
                    return operator.resolve(key, rerun=True, **told)
                case Action.RELEASE:
                    return operator.release(key, **told)
                case _:
                    return operator.forget(key, **told)
        except RecordTooLarge as error:
            raise PolicyError(
                "result", "JSON", "the store has no room for so large a record", see="operators#the-result-does-not-fit"
            ) from error
        except StoreMisconfigured as error:
            raise PolicyError("key", repr(key), error.reason, see=error.see) from error


def judged_each(app: Celery, form: Form, records: Sequence[Record]) -> tuple[list[operator.Judged], str]:
    """Give the verdict of ``form`` on each of ``records``, as a person saw them, until the store does not answer.

    Returns:
        What became of those that were judged or refused, and what the store said of the next one; else empty.
    """
    judged: list[operator.Judged] = []
    try:
        judged.extend(operator.judge_each(records, lambda seen: form.judge(app, seen)))
    except StoreUnavailable as error:
        return judged, str(error)
    return judged, ""
