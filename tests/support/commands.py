"""The command line, as somebody types it."""

from __future__ import annotations

from types import SimpleNamespace

from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent.integration.cli import idempotency


def run(app: Celery, *arguments: str, answer: str = "") -> Result:
    """What a command of ``app`` prints, and how it ends; a traceback is a failure of the test."""
    result = CliRunner().invoke(idempotency, arguments, input=answer, obj=SimpleNamespace(app=app))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
