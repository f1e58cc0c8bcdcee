"""What the migration does to a database: the table as the SQL store makes it, for whichever database it is."""

from collections.abc import Sequence

from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from sqlalchemy import Table
from sqlalchemy.schema import CreateIndex, DDLElement, DropTable

from celery_idempotent.contrib.django.store import dialect_of
from celery_idempotent.stores.sql_schema import creation, outbox, records

__all__ = ["CreateTables"]


_TABLES = (records, outbox)


class CreateTables(Operation):
    """Creates the tables of records and of the outbox. A table that the SQL store has made already is kept."""

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Nothing: the model stands beside this operation in the migration."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Create what is missing."""
        if _is_wanted(app_label, schema_editor):
            for each in [each for table in _TABLES for each in _missing(schema_editor, table)]:
                _execute(schema_editor, each)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Drop the tables, and forget what is recorded."""
        if _is_wanted(app_label, schema_editor):
            for table in _TABLES:
                _execute(schema_editor, DropTable(table))


def _is_wanted(app_label: str, schema_editor: BaseDatabaseSchemaEditor) -> bool:
    return router.allow_migrate(schema_editor.connection.alias, app_label, model_name="idempotencyrecord")


def _missing(schema_editor: BaseDatabaseSchemaEditor, table: Table) -> Sequence[DDLElement]:
    if schema_editor.collect_sql:  # it is printed, for whichever database
        return creation(table)
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        if table.name not in connection.introspection.table_names(cursor):
            return creation(table)
        found = connection.introspection.get_constraints(cursor, table.name)
    return [CreateIndex(each) for each in table.indexes if each.name not in found]


def _execute(schema_editor: BaseDatabaseSchemaEditor, element: DDLElement) -> None:
    text = str(element.compile(dialect=dialect_of(schema_editor.connection))).strip()
    schema_editor.execute(text.replace("\t", "    ").replace(" \n", "\n"), params=None)
