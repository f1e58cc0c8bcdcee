"""What a version leaves behind for others to read: fields, attributes, columns, statuses and headers.

`python -m tests.support.wire_names` writes it as JSON, of the version that it finds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from sqlalchemy.dialects import postgresql

from celery_idempotent import Record, Status
from celery_idempotent.integration import messages
from celery_idempotent.protocol.record import SCHEMA
from celery_idempotent.stores.dynamodb.items import ATTRIBUTES
from celery_idempotent.stores.sql.schema import records

NEEDED = "needed"
"""Instead of a default, where there is none."""


def described() -> dict[str, Any]:
    """Everything, as plain values."""
    hints = get_type_hints(Record)
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    return {
        "schema": SCHEMA,
        "fields": {each.name: [str(hints[each.name]), _default(each)] for each in fields(Record)},
        "statuses": sorted(str(each) for each in Status),
        "attributes": dict(ATTRIBUTES),
        "columns": {
            each.name: [each.type.compile(dialect), bool(each.nullable), each.server_default is not None]
            for each in records.columns
        },
        "headers": {name: text for name, text in vars(messages).items() if name.endswith("_HEADER")},
    }


def _default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return NEEDED if each.default is MISSING else each.default


if __name__ == "__main__":
    sys.stdout.write(json.dumps(described(), indent=1, sort_keys=True) + "\n")
