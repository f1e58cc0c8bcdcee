"""What the migration does to a database: the table as the SQL store makes it, for whichever database it is."""

from collections.abc import Sequence

from django.db import router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from sqlalchemy.schema import CreateIndex, DDLElement, DropTable

from celery_idempotent.contrib.django.store import dialect_of
from celery_idempotent.stores.sql_schema import TABLE, creation, records

__all__ = ["CreateRecords"]


class CreateRecords(Operation):
    """Creates the table of records and its index. A table that the SQL store has made already is kept."""

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Nothing: the model stands beside this operation in the migration."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Create what is missing."""
        if _is_wanted(app_label, schema_editor):
            for each in _missing(schema_editor):
                _execute(schema_editor, each)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        """Drop the table, and forget what is recorded."""
        if _is_wanted(app_label, schema_editor):
            _execute(schema_editor, DropTable(records))


def _is_wanted(app_label: str, schema_editor: BaseDatabaseSchemaEditor) -> bool:
    return router.allow_migrate(schema_editor.connection.alias, app_label, model_name="idempotencyrecord")


def _missing(schema_editor: BaseDatabaseSchemaEditor) -> Sequence[DDLElement]:
    if schema_editor.collect_sql:  # it is printed, for whichever database
        return creation(records)
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        if TABLE not in connection.introspection.table_names(cursor):
            return creation(records)
        found = connection.introspection.get_constraints(cursor, TABLE)
    return [CreateIndex(each) for each in records.indexes if each.name not in found]


def _execute(schema_editor: BaseDatabaseSchemaEditor, element: DDLElement) -> None:
    text = str(element.compile(dialect=dialect_of(schema_editor.connection))).strip()
    schema_editor.execute(text.replace("\t", "    ").replace(" \n", "\n"), params=None)
