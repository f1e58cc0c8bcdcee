"""What errors of DynamoDB, and of botocore on the way there, mean."""

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
from botocore.parsers import ResponseParserError

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.failures import Meaning, Rule, failure, rule_of

DRIVER_ERRORS = (ClientError, BotoCoreError, ResponseParserError)

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
