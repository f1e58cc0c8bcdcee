"""Verdicts of people who look at records: how a form says them, and what became of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration import verdicts
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record
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
                result = verdicts.json_of(value("result"))
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


def judged_each(app: Celery, form: Form, records: Sequence[Record]) -> tuple[list[verdicts.Judged], str]:
    """Give the verdict of ``form`` on each of ``records``, as a person saw them, until the store does not answer.

    Returns:
        What became of those that were judged or refused, and what the store said of the next one; else empty.
    """
    assert form.action is not None
    proof = {"result": form.result, "by": form.by, "reason": form.reason, "app": app}
    judged: list[verdicts.Judged] = []
    try:
        judged.extend(verdicts.judge_each(form.action, records, **proof))
    except StoreUnavailable as error:
        return judged, str(error)
    return judged, ""
