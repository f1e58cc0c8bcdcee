"""The command line, as somebody types it, and the records that it is about."""

import json
from types import SimpleNamespace
from typing import Any

from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import Record
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.settings import runtime_of
from tests.support.stores import kept


def run(app: Celery, *arguments: str, answer: str = "") -> Result:
    """What a command of ``app`` prints, and how it ends; a traceback is a failure of the test."""
    result = CliRunner().invoke(idempotency, arguments, input=answer, obj=SimpleNamespace(app=app))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def told(app: Celery, *arguments: str) -> Any:
    """What a command tells programs."""
    return json.loads(run(app, *arguments, "--json").stdout)


def keep(app: Celery, **values: Any) -> Record:
    """A record that somebody has left in the app's store."""
    return kept(runtime_of(app).store, **values)
