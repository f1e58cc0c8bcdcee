"""What the migration does to a database: the table as the SQL store makes it, for whichever database it is."""

from collections.abc import Sequence

from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from sqlalchemy import Table
from sqlalchemy.schema import CreateIndex, DDLElement, DropTable

from celery_idempotent.contrib.django.store import dialect_of
from celery_idempotent.stores.sql.schema import creation, indexes_of, outbox, records, text_of

_TABLES = (records, outbox)


class CreateTables(Operation):
    """Creates the tables of records and of the outbox. A table that the SQL store has made already is kept."""

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Nothing: models and fields stand beside this operation in the migration."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Create what is missing."""
        if _is_wanted(app_label, schema_editor):
            for table in _TABLES:
                # Printed, it is for whichever database.
                lacking = creation(table) if schema_editor.collect_sql else _lacking(schema_editor, table)
                _execute(schema_editor, *lacking)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Drop the tables, and forget what is recorded."""
        if _is_wanted(app_label, schema_editor):
            _execute(schema_editor, *map(DropTable, _TABLES))


def _is_wanted(app_label: str, schema_editor: BaseDatabaseSchemaEditor) -> bool:
    return router.allow_migrate(schema_editor.connection.alias, app_label, model_name="idempotencyrecord")


def _lacking(schema_editor: BaseDatabaseSchemaEditor, table: Table) -> Sequence[DDLElement]:
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        if table.name not in connection.introspection.table_names(cursor):
            return creation(table)
        indexes = connection.introspection.get_constraints(cursor, table.name)
    return [CreateIndex(each) for each in indexes_of(table) if each.name not in indexes]


def _execute(schema_editor: BaseDatabaseSchemaEditor, *elements: DDLElement) -> None:
    for each in elements:
        schema_editor.execute(text_of(each, dialect_of(schema_editor.connection)), params=None)
