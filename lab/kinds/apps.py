"""Two Celery apps on one broker: `shop` keeps its records in DynamoDB, `books` in an SQL database.

An app has one store. Which effects can be committed together with its records follows from that.
"""

from __future__ import annotations

from celery import Celery

from lab.demo.settings import Settings

settings = Settings.from_environ()
TABLE_OF_STOCK = "celery-idempotent-example-stock"
SQL_URL = f"sqlite:///{settings.folder.absolute()}/books.sqlite3"


def _app(name: str, store_url: str) -> Celery:
    app = Celery(name, set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.update(idempotency_store=store_url, task_default_queue=name, idempotency_relay=0.2)
    return app


shop = _app("shop", settings.store_url)
books = _app("books", SQL_URL)
