"""The command line answers a mistyped command with a sentence, and a verdict counts as long as its task says."""
# mypy: allow-untyped-decorators

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_idempotent import IdempotentTask, Policy, Record, Status
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.operating.display import iso
from celery_idempotent.protocol.verdicts import counts_until
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app
from tests.support.links import unlinked

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


def _run(app: Celery, *arguments: str, answer: str = "") -> Result:
    return CliRunner().invoke(idempotency, arguments, input=answer, obj=SimpleNamespace(app=app))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("key", "charge", "--args", "[7"), "not JSON"),
        (("key", "charge", "--args", '{"order_id": 7}'), "not a JSON list"),
        (("key", "charge", "--kwargs", "[7]"), "not a JSON dict"),
        (("key", "charge", "--args", "[7, 8]"), "does not take these arguments"),
        (("key", "plain"), "not idempotent"),
        (("resolve", "k", "--completed", "ch_1", "--yes"), "not JSON"),
        (("resolve", "k", "--completed", "NaN", "--yes"), "NaN is not JSON"),
        (("resolve", "k", "--completed", "[" * 100_000, "--yes"), "nested too deep"),
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
    assert (counts_until(resolved) - store.now()) / 1000 == pytest.approx(days * DAY, abs=5)
    assert resolved.result == "null"


@pytest.mark.parametrize("status", ["UNKNOWN", "unknown", "Unknown"])
def test_status_is_taken_in_any_case(app: Celery, status: str) -> None:
    """Nobody has to hold the shift key in the middle of an incident."""
    unknown, completed = (_keep(app, key=each, status=each) for each in (Status.UNKNOWN, Status.COMPLETED))

    listed = _run(app, "list", "--status", status).stdout

    assert unknown.key in listed
    assert completed.key not in listed


NOTHING = "nothing is recorded under it, and it is no record's task id or label"

RESOLVE, RELEASE = ("resolve", "k", "--rerun"), ("release", "k")


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        (RESOLVE, None, NOTHING),
        (RESOLVE, Status.RELEASED, "only an UNKNOWN outcome takes a verdict; it is RELEASED"),
        (RELEASE, None, NOTHING),
        (RELEASE, Status.COMPLETED, "only what is IN_PROGRESS can be released; it is COMPLETED"),
    ],
)
def test_nobody_is_asked_about_what_takes_no_verdict(
    app: Celery, command: tuple[str, ...], status: Status | None, reason: str
) -> None:
    """The record is looked up before the question, which would be about nothing."""
    if status:
        _keep(app, key="k", status=status)

    result = _run(app, *command, answer="y\n")

    assert result.exit_code == 1
    assert unlinked(result.output) == f"Error: key='k': {reason}\n"


@pytest.mark.parametrize(("command", "status"), [(RESOLVE, Status.UNKNOWN), (RELEASE, Status.IN_PROGRESS)])
def test_record_is_shown_before_a_verdict_is_asked_for(app: Celery, command: tuple[str, ...], status: Status) -> None:
    """Which task, which message, which worker, and since when; and after a no it is as it was."""
    record = _keep(app, key="k", status=status, lease_until=1, updated_at=1_800_000_000_000, error="it stalled")

    result = _run(app, *command, answer="n\n")

    shown, question = result.output.split("Did you check", 1)
    assert shown.splitlines() == [
        f"        status  {status}",
        "           key  k",
        f"         label  {record.label}",
        f"          task  {record.task}",
        f"       task_id  {record.task_id}",
        f"        worker  {record.worker}",
        f"      attempts  {record.attempts}",
        f"    created_at  {iso(record.created_at)}",
        "    updated_at  2027-01-15T08:00:00.000Z",
        "         error  it stalled",
    ]
    assert question.endswith("Aborted!\n")
    assert app.conf.idempotency_store.get("k") == record


@pytest.mark.parametrize(("command", "status"), [(RESOLVE, Status.UNKNOWN), (RELEASE, Status.IN_PROGRESS)])
def test_verdict_counts_for_the_record_that_was_shown(
    app: Celery, command: tuple[str, ...], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delivery did while the person thought is not overruled."""
    record = _keep(app, key="k", status=status, lease_until=1)
    newer = replace(record, revision="newer")

    def think(*_: object, **__: object) -> None:
        app.conf.idempotency_store.swap(newer, record.revision)

    monkeypatch.setattr("click.confirm", think)
    result = _run(app, *command)

    assert "somebody else changed the record meanwhile" in result.output
    assert app.conf.idempotency_store.get("k") == newer


def test_list_of_commands_fits_into_a_terminal(app: Celery) -> None:
    """Of 80 columns, each command with a whole sentence: click ends those with dots that are too long."""
    shown = CliRunner().invoke(idempotency, ["--help"], terminal_width=80, obj=SimpleNamespace(app=app)).stdout

    lines = shown.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == idempotency.list_commands(click.Context(idempotency))
    assert [line for line in lines if len(line) > 80 or line.endswith("...")] == []


def _keep(app: Celery, **values: Any) -> Record:
    record: Record = replace(a_record(), **values)
    app.conf.idempotency_store.swap(record, None)
    return record
