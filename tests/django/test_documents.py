"""The pages on Django: what they say beside the steps of the how-to, which ``live/test_page.py`` follows."""
# mypy: allow-untyped-decorators

from dataclasses import replace
from typing import Any

from celery import Celery
from django.db import transaction
from django.test import TransactionTestCase

from celery_idempotent import open_store, outbox
from celery_idempotent.contrib.django.models import IdempotencyOutbox
from celery_idempotent.protocol.record import Status
from celery_idempotent.testing.contract import a_record
from tests.django.project.shop.tasks import receipt
from tests.support.documents import DOCS, code

PAGE = DOCS / "how-to/django.md"
TEXT = (DOCS / "how-to/django.md").read_text()


class TestView(TransactionTestCase):
    """What the page says that a view can do."""

    def test_view_sends_by_the_outbox(self) -> None:
        """If and only if its block commits."""
        assert "`celery_idempotent.outbox.send(None, receipt, order_id)`" in PAGE.read_text()
        with transaction.atomic():
            outbox.send(None, receipt, "o-1")
            transaction.set_rollback(True)
        assert IdempotencyOutbox.objects.count() == 0
        with transaction.atomic():
            outbox.send(None, receipt, "o-1")
        assert IdempotencyOutbox.objects.count() == 1

    def test_purge_of_the_sql_page_works_with_this_store(self) -> None:
        """It deletes an outcome past its time."""
        (block,) = (text for _, text in code(DOCS / "how-to/sql.md", "python") if "purge_idempotency_records" in text)
        app = Celery("reader", set_as_current=False)
        app.conf.idempotency_store = "django://default"
        names: dict[str, Any] = {"app": app, "__name__": "reader.tasks"}
        exec(block, names)
        done = replace(a_record(), status=Status.COMPLETED, expires_at=1)
        store = open_store("django://default")
        store.swap(done, None)
        names["purge_idempotency_records"].run()
        assert store.get(done.key) is None
