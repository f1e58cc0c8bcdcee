"""The type of an idempotency key in Django's terms."""

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

_KEY_TYPES = {"postgresql": 'text COLLATE "C"', "mysql": "varbinary(2048)", "sqlite": "text COLLATE BINARY"}
"""By Django's vendor, the type under which keys are compared byte by byte; as the table has it."""


if TYPE_CHECKING:
    _TextField = models.TextField[str, str]
else:
    _TextField = models.TextField


class KeyField(_TextField):
    """An idempotency key: text to us, and on MySQL bytes to the database."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        """The type in a table that Django creates itself, as for tests without migrations."""
        return _KEY_TYPES[connection.vendor]

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        """The key as the database compares it."""
        return value.encode() if connection.vendor == "mysql" and isinstance(value, str) else value

    def from_db_value(self, value: str | bytes, expression: Any, connection: BaseDatabaseWrapper) -> str:
        """The key as text; bytes that are not text are made legible, and no lookup finds them."""
        return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
