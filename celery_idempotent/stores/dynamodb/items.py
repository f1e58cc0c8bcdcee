"""A record as an item of DynamoDB, and back."""

import json
from collections.abc import Mapping
from typing import Any

ATTRIBUTES: Mapping[str, str] = {
    "status": "status",
    "revision": "revision",
    "owner": "owner",
    "fencing_token": "fencingToken",
    "lease_until": "lockExpiry",
    "fingerprint": "fingerprint",
    "attempts": "attempts",
    "takeovers": "takeovers",
    "created_at": "createdAt",
    "updated_at": "updatedAt",
    "task": "task",
    "task_id": "taskId",
    "worker": "worker",
    "app": "app",
    "process": "process",
    "label": "label",
    "trace": "trace",
    "steps": "steps",
    "verdict": "verdict",
    "result": "resultData",
    "content_type": "contentType",
    "error": "error",
    "schema": "v",
}
"""By field of the record, the attribute that holds it; key and expiry attributes are the store's options."""


def attribute_of(value: Any) -> dict[str, Any]:
    """A field's value in DynamoDB's own form."""
    match value:
        case str():
            return {"S": value}
        case int():
            return {"N": str(value)}
        case bytes():
            return {"B": value}
        case _:
            return {"S": json.dumps(dict(value))}


def value_of(field: str, attribute: Any) -> Any:
    """The value again, of whichever field but the key, which stands there as it is."""
    if field == "key":
        return attribute
    ((kind, value),) = attribute.items()
    if kind not in _KINDS:
        raise TypeError(f"{field} is of type {kind}")
    return int(value) if kind == "N" else value


_KINDS = frozenset({"S", "N", "B", "BOOL"})
"""What :func:`attribute_of` gives."""
