"""docs/how-to/beat.md: what it says to copy gives schedulers that name their ticks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, beat

from celery_idempotent.beat import PersistentScheduler, SchedulerMixin
from celery_idempotent.integration.messages.ticks import OnGrid
from tests.support.deliveries import an_app
from tests.support.documents import DOCS, code, execute_block
from tests.support.packages import needs

PAGE = DOCS / "how-to/beat.md"
(SETTINGS,) = code(PAGE, "python")
DJANGO, REDBEAT = code(PAGE, "py")

pytestmark = pytest.mark.usefixtures("unchanged_celery")


def test_the_settings_make_a_beat_that_names_its_ticks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Celery opens the scheduler by its name, the entry lies on the grid, and nothing keeps it from running once."""
    app = an_app()
    execute_block(PAGE, *SETTINGS, {"app": app, "__name__": "shop"})
    service = beat.Service(app, scheduler_cls=app.conf.beat_scheduler, schedule_filename=str(tmp_path / "schedule"))
    scheduler = service.scheduler

    assert isinstance(scheduler, PersistentScheduler)
    assert isinstance(scheduler.schedule["report"].schedule, OnGrid)
    assert "idempotency.tick" not in caplog.text
    scheduler.close()


@needs("redbeat")
def test_redbeats_scheduler_takes_the_mixin() -> None:
    """And its lock is off."""
    names: dict[str, Any] = {"app": Celery("shop", set_as_current=False), "__name__": "shop.beats"}
    execute_block(PAGE, *REDBEAT, names)

    assert issubclass(names["Scheduler"], SchedulerMixin)
    assert names["app"].conf.redbeat_lock_key is None


@needs("django_celery_beat")
def test_djangos_scheduler_takes_the_mixin() -> None:
    """In a process of its own, whose Django is that of django-celery-beat."""
    before = """
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"])
django.setup()
"""
    after = "assert Scheduler.__mro__[1] is SchedulerMixin"
    subprocess.run([sys.executable, "-c", f"{before}{DJANGO[1]}\n{after}"], check=True)
