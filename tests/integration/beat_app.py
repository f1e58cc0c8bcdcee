"""An app with a schedule and beats of one kind: `BEATS` says which; `BEATS_FOLDER` and `BEATS_REDIS`, where they are.

`python -m tests.integration.beat_app` makes the tables that Django's need.
"""
# mypy: allow-untyped-decorators

import os
from typing import Any

from celery import Celery, current_task

from celery_idempotent import IdempotentTask, Policy, signals
from celery_idempotent.beat import PersistentScheduler, SchedulerMixin
from celery_idempotent.integration.headers import TICK_HEADER
from tests.support.ledger import record

KIND, FOLDER, REDIS = (os.environ[each] for each in ("BEATS", "BEATS_FOLDER", "BEATS_REDIS"))

app = Celery("beats", broker=f"{REDIS}/4", backend=f"{REDIS}/4", set_as_current=True)
app.conf.update(
    beat_schedule={"report": {"task": "report", "schedule": 1.0}},
    broker_connection_retry_on_startup=True,
    idempotency_store=f"{REDIS}/6",
    redbeat_lock_key=None,
    redbeat_redis_url=f"{REDIS}/5",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
Scheduler: Any
match KIND:
    case "celery":
        Scheduler = PersistentScheduler
    case "redbeat":
        from redbeat.schedulers import RedBeatScheduler

        Scheduler = type("Scheduler", (SchedulerMixin, RedBeatScheduler), {})

    case "django":
        import django
        from django.conf import settings

        place = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{FOLDER}/beats.sqlite3"}
        database = {**place, "OPTIONS": {"timeout": 30}}
        apps = ["django.contrib.contenttypes", "django_celery_beat"]
        settings.configure(DATABASES={"default": database}, INSTALLED_APPS=apps, USE_TZ=True)
        django.setup()
        from django_celery_beat.schedulers import DatabaseScheduler

        Scheduler = type("Scheduler", (SchedulerMixin, DatabaseScheduler), {})


def _note(kind: str) -> None:
    headers = current_task.request.headers or {}
    record(kind, headers.get(TICK_HEADER, "").partition("@")[2], beat=current_task.request.origin)


@app.task(base=IdempotentTask, name="report", idempotent=Policy(lease=5, backoff=0.1))
def report() -> None:
    """Write down which tick it is, and who sent it."""
    _note("effect")


@signals.replayed.connect(weak=False)
def replayed(**kwargs: Any) -> None:
    """Write down which message was none of it."""
    _note("replayed")


if __name__ == "__main__":
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
