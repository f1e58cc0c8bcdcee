"""Records in a table of an SQL database."""

from celery_idempotent.stores.sql.schema import metadata, outbox_table, records_table
from celery_idempotent.stores.sql.store import SQLStore

__all__ = ["SQLStore", "metadata", "outbox_table", "records_table"]
