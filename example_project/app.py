"""The Celery app: `celery -A example_project.app worker`."""

from __future__ import annotations

from celery import Celery

from example_project.settings import Settings

settings = Settings.from_environ()

app = Celery(
    "example_project",
    include=["example_project.tasks", "example_project.plain"],
)
app.conf.update(settings.celery())
