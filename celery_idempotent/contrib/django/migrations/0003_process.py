"""A claim names the process that runs its body, so that others can tell when that is gone."""

from django.db import migrations, models

from celery_idempotent.contrib.django.operations import CompleteTables


class Migration(migrations.Migration):
    """Database and state apart, as before. Workers that do not know the column can go on until they are replaced."""

    dependencies = (("celery_idempotent", "0002_complete_tables"),)

    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[CompleteTables()],
            state_operations=[migrations.AddField("idempotencyrecord", "process", models.TextField(null=True))],
        ),
    )
