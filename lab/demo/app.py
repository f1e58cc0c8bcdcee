"""The Celery app: `celery -A lab.demo.app worker`."""

from __future__ import annotations

from celery import Celery

from lab.demo.settings import Settings

settings = Settings.from_environ()

app = Celery("demo", include=["lab.demo.tasks", "lab.demo.plain"])
app.conf.update(settings.celery())
