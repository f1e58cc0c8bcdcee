"""A user's writes for DynamoDB's TransactWriteItems: checked, and with plain Python values allowed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from boto3.dynamodb.types import TypeSerializer

from celery_idempotent.protocol.store import WriteFailed

MOST_WRITES = 99
"""TransactWriteItems takes 100 (DynamoDB Developer Guide, "Quotas"); one is the record."""

_ACTIONS = ("Put", "Update", "Delete", "ConditionCheck")
_VALUES = ("Item", "Key", "ExpressionAttributeValues")
_KINDS = frozenset({"S", "N", "B", "SS", "NS", "BS", "M", "L", "NULL", "BOOL"})
_serialize = TypeSerializer().serialize


def typed(writes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``writes`` with every value in DynamoDB's own form.

    A value that is a dictionary with one of DynamoDB's type names as its only key, such as ``{"S": "text"}``, is
    taken to be in that form already; anything else is a Python value as boto3's resources take it.
    """
    if len(writes) > MOST_WRITES:
        raise WriteFailed(None, f"{len(writes)} writes; DynamoDB commits {MOST_WRITES} beside the record")
    return [_typed(position, write) for position, write in enumerate(writes)]


def _typed(position: int, write: Mapping[str, Any]) -> dict[str, Any]:
    match write:
        case {**actions} if len(actions) == 1 and isinstance(body := next(iter(actions.values())), Mapping):
            (action,) = actions
        case _:
            raise WriteFailed(position, f"must map one of {', '.join(_ACTIONS)} to its parameters")
    if action not in _ACTIONS:
        raise WriteFailed(position, f"{action!r} is not one of {', '.join(_ACTIONS)}")
    try:
        # DynamoDB refuses half of a surrogate pair as it refuses what is no request, and that would pass for an outage.
        json.dumps(body, ensure_ascii=False, default=str, skipkeys=True).encode()
        return {action: {name: _values(value) if name in _VALUES else value for name, value in body.items()}}
    except (TypeError, AttributeError, ValueError) as error:
        raise WriteFailed(position, f"a value has no form in DynamoDB: {error}") from error


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if _is_typed(value) else _serialize(value) for name, value in values.items()}


def _is_typed(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _KINDS
