"""On PostgreSQL, an index that lets the end of an operation be written beside its claim, and room for it."""

from django.db import migrations

from celery_idempotent.contrib.django.operations import CompleteTables


class Migration(migrations.Migration):
    """The database alone; elsewhere nothing changes. Workers of the previous version can go on."""

    dependencies = (("celery_idempotent", "0003_process"),)

    operations = (CompleteTables(),)
