"""The command line answers a mistyped command with a sentence, and a verdict counts as long as its task says."""
# mypy: allow-untyped-decorators

from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import IdempotentTask, Policy, Status
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app

DAY = 86_400


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(key="order_id", retain=30 * DAY))
    def charge(order_id: int) -> None: ...

    @app.task(shared=False, name="plain")
    def plain() -> None: ...

    app.finalize()
    return app


def _run(app: Celery, *arguments: str) -> Result:
    return CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("key", "charge", "--args", "[7"), "not JSON"),
        (("key", "charge", "--args", '{"order_id": 7}'), "not a JSON list"),
        (("key", "charge", "--kwargs", "[7]"), "not a JSON dict"),
        (("key", "charge", "--args", "[7, 8]"), "does not take these arguments"),
        (("key", "plain"), "not idempotent"),
        (("resolve", "k", "--completed", "ch_1", "--yes"), "not JSON"),
    ],
)
def test_mistake_is_answered_by_a_sentence(app: Celery, arguments: tuple[str, ...], sentence: str) -> None:
    """Broken JSON, unfit arguments and plain tasks end with what is wrong, not with a traceback."""
    result = _run(app, *arguments)

    assert result.exit_code == 2
    assert sentence in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(("task", "days"), [("charge", 30), ("removed", 7)])
def test_verdict_is_retained_as_long_as_the_task_says(app: Celery, task: str, days: int) -> None:
    """A completed verdict is replayed for the task's own ``retain``, or the app's where the task is gone."""
    store = app.conf.idempotency_store
    record = replace(a_record(), status=Status.UNKNOWN, task=task)
    store.swap(record, None)

    assert _run(app, "resolve", record.key, "--completed", "null", "--yes").exit_code == 0

    resolved = store.get(record.key)
    assert resolved.expires_at - store.now() / 1000 == pytest.approx(days * DAY, abs=5)
    assert resolved.result == "null"
