"""The tables as :mod:`celery_idempotent.stores.sql.schema` describes them, and their models."""

from django.db import migrations, models

from celery_idempotent.contrib.django.models import KeyField
from celery_idempotent.contrib.django.operations import CreateTables


class Migration(migrations.Migration):
    """Database and state apart: Django's types are not exactly those of the table."""

    initial = True

    dependencies = ()

    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[CreateTables()],
            state_operations=[
                migrations.CreateModel(
                    name="IdempotencyRecord",
                    fields=[
                        ("key", KeyField(db_column="idempotency_key", primary_key=True, serialize=False)),
                        ("status", models.CharField(max_length=16)),
                        ("revision", models.TextField()),
                        ("owner", models.TextField()),
                        ("fencing_token", models.BigIntegerField()),
                        ("lease_until", models.BigIntegerField()),
                        ("fingerprint", models.TextField(null=True)),
                        ("attempts", models.BigIntegerField()),
                        ("takeovers", models.BigIntegerField()),
                        ("created_at", models.BigIntegerField()),
                        ("updated_at", models.BigIntegerField()),
                        ("task", models.TextField()),
                        ("task_id", models.TextField(verbose_name="task id")),
                        ("worker", models.TextField()),
                        ("app", models.TextField(null=True)),
                        ("process", models.TextField(null=True)),
                        ("label", models.CharField(max_length=255, null=True)),
                        ("trace", models.TextField(null=True)),
                        ("steps", models.TextField()),
                        ("verdict", models.TextField(null=True)),
                        ("result_text", models.TextField(null=True)),
                        ("result_bytes", models.BinaryField(null=True)),
                        ("content_type", models.TextField(null=True)),
                        ("error", models.TextField(null=True)),
                        ("expires_at", models.BigIntegerField(null=True)),
                        ("schema_version", models.SmallIntegerField()),
                    ],
                    options={
                        "db_table": "idempotency_records",
                        "default_permissions": ("view", "change"),
                        "verbose_name": "idempotency record",
                    },
                ),
                migrations.CreateModel(
                    name="IdempotencyOutbox",
                    fields=[
                        ("number", models.BigAutoField(primary_key=True, serialize=False)),
                        ("task_id", models.CharField(max_length=64)),
                        ("data_text", models.TextField(null=True)),
                        ("data_bytes", models.BinaryField(null=True)),
                        ("content_type", models.TextField()),
                        ("created_at", models.BigIntegerField()),
                        ("taken_until", models.BigIntegerField()),
                        ("taken_by", models.CharField(max_length=32, null=True)),
                        ("failures", models.BigIntegerField()),
                        ("reason", models.TextField(null=True)),
                    ],
                    options={
                        "db_table": "idempotency_outbox",
                        "default_permissions": (),
                        "verbose_name": "message of the idempotency outbox",
                    },
                ),
            ],
        ),
    )
