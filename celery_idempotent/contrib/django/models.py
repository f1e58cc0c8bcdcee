"""The records as a model, for reading. Whatever changes a record goes through the store's compare-and-swap."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.sql.schema import KEY, OUTBOX, TABLE
from celery_idempotent.stores.sql.statements import record_of
from celery_idempotent.troubleshooting import with_link

_REFUSAL = with_link(
    "idempotency records are changed by compare-and-swap only; give a verdict with celery_idempotent.resolve(), "
    "on the admin page, or by: celery -A <your app> idempotency resolve",
    "errors#read-only",
)


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


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(_REFUSAL)


class _ReadOnlyQuerySet(models.QuerySet["IdempotencyRecord"]):
    update = delete = bulk_create = _refuse


class IdempotencyRecord(models.Model):
    """One idempotency key and all that is known about it; see :class:`celery_idempotent.protocol.record.Record`."""

    key = KeyField(primary_key=True, db_column=KEY)
    status = models.CharField(max_length=16)
    revision = models.TextField()
    owner = models.TextField()
    fencing_token = models.BigIntegerField()
    lease_until = models.BigIntegerField()
    fingerprint = models.TextField(null=True)
    attempts = models.BigIntegerField()
    takeovers = models.BigIntegerField()
    created_at = models.BigIntegerField()
    updated_at = models.BigIntegerField()
    task = models.TextField()
    task_id = models.TextField("task id")
    worker = models.TextField()
    app = models.TextField(null=True)
    process = models.TextField(null=True)
    label = models.CharField(max_length=255, null=True)
    trace = models.TextField(null=True)
    steps = models.TextField()
    verdict = models.TextField(null=True)
    result_text = models.TextField(null=True)
    result_bytes = models.BinaryField(null=True)
    content_type = models.TextField(null=True)
    error = models.TextField(null=True)
    expires_at = models.BigIntegerField(null=True)
    schema_version = models.SmallIntegerField()

    objects = _ReadOnlyQuerySet.as_manager()

    @property
    def record(self) -> Record:
        """The same as the library has it; the columns are as databases can hold them.

        Raises:
            StoreMisconfigured: A newer version of the library wrote it.
        """
        return self._record_without({})

    @cached_property
    def fetched(self) -> Record:
        """As :attr:`record`, of what was fetched; the rest is empty, and not asked for."""
        return self._record_without({each: "{}" if each == "steps" else None for each in self.get_deferred_fields()})

    def _record_without(self, missing: Mapping[str, str | None]) -> Record:
        asked = [each for each in self._meta.concrete_fields if each.attname not in missing]
        row = {str(each.column): getattr(self, each.attname) for each in asked}
        return record_of({**row, **missing}, store=f"django://{self._state.db}")

    @cached_property
    def unreadable(self) -> str:
        """Why this record cannot be read; empty if it can. What was not fetched is not checked."""
        try:
            _ = self.fetched
        except StoreMisconfigured as error:
            return one_line(error.reason)
        return ""

    class Meta:
        """Reading and giving verdicts are all that can be permitted."""

        db_table = TABLE
        default_permissions = ("view", "change")
        verbose_name = "idempotency record"

    def __str__(self) -> str:
        return one_line(self.key)

    save = delete = _refuse


class IdempotencyOutbox(models.Model):
    """A message that waits to be published; known to Django so that tests flush it, and used by nobody."""

    number = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=64)
    data_text = models.TextField(null=True)
    data_bytes = models.BinaryField(null=True)
    content_type = models.TextField()
    created_at = models.BigIntegerField()
    taken_until = models.BigIntegerField()
    taken_by = models.CharField(max_length=32, null=True)
    failures = models.BigIntegerField()
    reason = models.TextField(null=True)

    class Meta:
        """Nothing is permitted."""

        db_table = OUTBOX
        default_permissions = ()
        verbose_name = "message of the idempotency outbox"

    def __str__(self) -> str:
        return self.task_id
