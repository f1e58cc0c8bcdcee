"""A record says what people call its operation, which trace it belongs to, and who has judged it."""

from django.db import migrations, models

from celery_idempotent.contrib.django.operations import CompleteTables


class Migration(migrations.Migration):
    """Database and state apart, as before. Workers that do not know the columns can go on until they are replaced."""

    dependencies = (("celery_idempotent", "0004_ends_in_place"),)

    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[CompleteTables()],
            state_operations=[
                migrations.AddField("idempotencyrecord", "label", models.CharField(max_length=255, null=True)),
                migrations.AddField("idempotencyrecord", "trace", models.TextField(null=True)),
                migrations.AddField("idempotencyrecord", "verdict", models.TextField(null=True)),
            ],
        ),
    )
