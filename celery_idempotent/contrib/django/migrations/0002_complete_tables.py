"""Attempts in a row that never ended are counted, a record names its app, and a message says why it still waits."""

from django.db import migrations, models

from celery_idempotent.contrib.django.operations import CompleteTables


class Migration(migrations.Migration):
    """Database and state apart, as before. Workers of the previous version can go on until they are replaced."""

    dependencies = (("celery_idempotent", "0001_initial"),)

    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[CompleteTables()],
            state_operations=[
                migrations.RemoveField("idempotencyrecord", "takeover"),
                migrations.AddField("idempotencyrecord", "takeovers", models.BigIntegerField(db_default=0)),
                migrations.AddField("idempotencyrecord", "app", models.TextField(null=True)),
                migrations.AddField("idempotencyoutbox", "failures", models.BigIntegerField(db_default=0)),
                migrations.AddField("idempotencyoutbox", "reason", models.TextField(null=True)),
            ],
        ),
    )
