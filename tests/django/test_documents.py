"""docs/django.md says what is so: its code runs in a project, and what it names is there."""
# mypy: allow-untyped-decorators

import re
from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from django.core.checks import run_checks
from django.test import TestCase

from celery_idempotent.contrib.django import admin
from celery_idempotent.contrib.django.apps import IdempotencyConfig
from celery_idempotent.contrib.django.models import IdempotencyOutbox, IdempotencyRecord
from celery_idempotent.contrib.django.store import APP
from tests.django.project import app as shop
from tests.django.project.shop.models import Charge
from tests.django.project.shop.tasks import receipt
from tests.support.documents import DOCS, code

PAGE = DOCS / "django.md"
TEXT = PAGE.read_text()


@pytest.mark.usefixtures("unchanged_celery")
class TestBlocks(TestCase):
    """A reader can paste them, in their order."""

    def test_python_blocks_run(self) -> None:
        """Settings, task classes, a transaction, and a purge."""
        blocks = code(PAGE, "py")
        settings_block, *others = [text for _, text in blocks]
        names: dict[str, Any] = {"INSTALLED_APPS": []}
        exec(settings_block, names)
        assert names["INSTALLED_APPS"] == [APP]
        assert names["CELERY_IDEMPOTENCY_STORE"] == settings.CELERY_IDEMPOTENCY_STORE

        app = Celery("reader", set_as_current=False, broker="memory://", backend="cache+memory://")
        app.config_from_object(names, namespace="CELERY")
        names = {"app": app, "Charge": Charge, "receipt": receipt, "__name__": "reader.tasks"}
        for text in others:
            exec(text, names)

        assert len(others) == 3
        assert hasattr(names["charge"], "delay_on_commit")
        for _ in range(2):
            assert names["book"].apply(("o-1",)).get() == "booked o-1"
        assert Charge.objects.filter(order_id="o-1").count() == 1
        assert IdempotencyOutbox.objects.count() == 1
        IdempotencyRecord.objects.get(status="COMPLETED")
        names["purge_idempotency_records"].run()


def test_what_is_named_is_there() -> None:
    """Tables, the label of the migration, the check, and the length of a list."""
    assert f"`{IdempotencyRecord._meta.db_table}`" in TEXT
    assert f"`{IdempotencyOutbox._meta.db_table}`" in TEXT
    assert f"sqlmigrate {IdempotencyConfig.label} 0001" in TEXT
    assert f"A list ends at {admin._MOST_LISTED:,} records" in TEXT
    shop.conf.idempotency_store, before = "memory://", shop.conf.idempotency_store
    try:
        (warning,) = [each for each in run_checks() if "idempotency records" in each.msg]
    finally:
        shop.conf.idempotency_store = before
    assert f"check {warning.id}." in TEXT
    assert set(re.findall(r"\*\*(Re\w+)\*\* \|", TEXT)) == {"Resolve", "Release"}
