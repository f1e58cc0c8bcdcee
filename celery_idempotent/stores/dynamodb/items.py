"""A record as an item of DynamoDB, and back; a user's writes beside it, checked; and what DynamoDB's errors mean."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from botocore.parsers import ResponseParserError

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge, WriteFailed
from celery_idempotent.stores.failures import Meaning, Rule, failure, rule_of

DRIVER_ERRORS = (ClientError, BotoCoreError, ResponseParserError)

LOST = "ConditionalCheckFailedException"
"""The error code of a write whose condition did not hold."""

OTHER_KEY = "the table's key is not {key}; name its attributes by key_attr and sort_key_attr, or use another table"

_RULES = (
    Rule(meaning=Meaning.TOO_LARGE, text="(?is)^ValidationException: .*size"),
    Rule(text="(?is)^ValidationException: .*key", remedy=OTHER_KEY),
    Rule(
        codes=frozenset({"ResourceNotFoundException"}),
        remedy="the table does not exist; create it with: celery -A <your app> idempotency provision, "
        "or without an app: open_store(URL).provision()",
    ),
    Rule(
        codes=frozenset({"AccessDeniedException", "AccessDenied"}),
        remedy="{action} is not granted on the table; add it to the role",
    ),
    Rule(
        codes=frozenset({"UnrecognizedClientException", "InvalidSignatureException"}),
        remedy="AWS does not accept the credentials",
    ),
    Rule(errors=(NoCredentialsError, NoRegionError)),
)


def named(keys: Mapping[str, str]) -> str:
    """For people: the attributes of a table's key, ``HASH`` or ``RANGE`` by name."""
    kinds = {"HASH": "partition key", "RANGE": "sort key"}
    return " and ".join(f"{kinds[kind]} {name!r} (S)" for name, kind in keys.items())


def refusal_of(reply: Mapping[str, Any]) -> str:
    """The error code of a reply; empty if it is not an error."""
    return str(reply.get("Error", {}).get("Code", ""))


def text_of(reply: Mapping[str, Any]) -> str:
    """What such a reply says."""
    return f"{refusal_of(reply)}: {reply.get('Error', {}).get('Message', '')}"


def explained(error: Exception, store: str, operation: str, *, key: str) -> StoreUnavailable | RecordTooLarge:
    """What a store raises for one of :data:`DRIVER_ERRORS`; ``operation`` is an IAM action, ``key`` the key to have."""
    code, text = "", str(error)
    if isinstance(error, ClientError):
        code, text = refusal_of(error.response), text_of(error.response)
    # A transaction has no action of its own.
    is_transaction = operation == "TransactWriteItems"
    action = "an IAM action that a write needs" if is_transaction else f"the IAM action dynamodb:{operation}"
    return failure(rule_of(_RULES, error, code, text), store, operation, text, key=key, action=action)


_OTHER_NAMES = {"lease_until": "lockExpiry", "result": "resultData", "schema": "v"}

ATTRIBUTES: Mapping[str, str] = {
    name: _OTHER_NAMES.get(name) or re.sub("_(.)", lambda found: found[1].upper(), name)
    for name in (each.name for each in fields(Record))
    if name not in {"key", "expires_at"}
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
    if kind not in {"S", "N", "B", "BOOL"}:
        raise TypeError(f"{field} is of type {kind}")
    return int(value) if kind == "N" else value


MOST_WRITES = 99
"""TransactWriteItems takes 100 (DynamoDB Developer Guide, "Quotas"); one is the record."""

_ACTIONS = ("Put", "Update", "Delete", "ConditionCheck")
_VALUES = ("Item", "Key", "ExpressionAttributeValues")
_KINDS = frozenset({"S", "N", "B", "SS", "NS", "BS", "M", "L", "NULL", "BOOL"})


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
    from boto3.dynamodb.types import TypeSerializer  # brings all of boto3, and few bodies commit writes

    serialize = TypeSerializer().serialize
    return {name: value if _is_typed(value) else serialize(value) for name, value in values.items()}


def _is_typed(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _KINDS
