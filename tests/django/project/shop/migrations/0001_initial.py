"""The shop's table."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Creates it."""

    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Charge",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("order_id", models.CharField(max_length=40)),
                ("process", models.IntegerField()),
            ],
        ),
    )
