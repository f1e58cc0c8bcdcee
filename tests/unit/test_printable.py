"""What came from elsewhere is printed on one line, in logs and on the command line; signals get it as it is."""
# mypy: allow-untyped-decorators

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine

from celery_idempotent import IdempotentTask, Policy, Record, StoreUnavailable, outbox, signals
from celery_idempotent.engine.claim import Claim, claim
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app, deliver
from tests.support.scene import an_operation
from tests.support.waiting import wait_until

FORGED = "7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
SHOWN = r"7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
QUOTED = '"' + SHOWN.replace("\\", r"\\") + '"'
"""As a value in a line of the log."""


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (FORGED, SHOWN),
        ("\x00\r\t\x7f\x85\x9b", r"\x00\r\t\x7f\x85\x9b"),
        ("\u200e\u200f\u061c\u2066\u2069\u2029\ud800", r"\u200e\u200f\u061c\u2066\u2069\u2029\ud800"),
        (
            "a\u200bb\u200d\u2060\ufeff\xad\u3164\U000e0041\ufe0f",
            r"a\u200bb\u200d\u2060\ufeff\xad\u3164\U000e0041\ufe0f",
        ),
        ("Überlast 💥 日本 \\n", "Überlast 💥 日本 \\n"),
        (None, "None"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(text: object, printed: str) -> None:
    """Control characters, ends of lines, changes of direction, and what has no width; every script stays readable."""
    assert one_line(text) == printed


def test_log_lines_cannot_be_forged_by_a_task_id(caplog: pytest.LogCaptureFixture) -> None:
    """Every event of a delivery is one line, and the signal gets the id as it was sent."""
    caplog.set_level(logging.DEBUG, "celery_idempotent")
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(on_takeover="refuse"), name=f"task {FORGED}")
    def charge() -> None:
        raise ValueError(FORGED)

    seen: list[Any] = []

    def receive(**event: Any) -> None:
        seen.append(event["task_id"])

    signals.failed.connect(receive)
    for _ in range(2):
        deliver(charge, task_id=FORGED)

    lines = [each.getMessage() for each in caplog.records if each.name.startswith("celery_idempotent.")]
    assert [each.split()[0] for each in lines] == [
        f"event=idempotency.{each}" for each in ("claimed", "failed", "replayed")
    ]
    assert all(each.isprintable() and f"task_id={QUOTED} " in each for each in lines)
    assert seen == [FORGED]


def test_log_line_of_observed_call_without_a_key_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Also where no key could be derived."""
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(key="order_id", mode="observe"))
    def charge(order_id: int | None) -> None: ...

    deliver(charge, None, task_id=FORGED)

    lines = [each.getMessage() for each in caplog.records if each.name.startswith("celery_idempotent.")]
    assert [each.split()[0] for each in lines] == ["event=idempotency.key_missing", "event=idempotency.not_observed"]
    assert all(map(str.isprintable, lines))


def test_rows_of_the_command_line_cannot_be_forged() -> None:
    """A record is one row of a list, and each of its fields one line, whatever was written into it."""
    app = an_app()
    record = replace(a_record(), key=f"k{FORGED}", task=FORGED, task_id=FORGED, worker=FORGED, error=FORGED)
    record = replace(record, steps={FORGED: {"lost": FORGED}})
    app.conf.idempotency_store.swap(record, None)

    for arguments, lines in (
        (("list",), 2),
        (("show", record.key), len(record.to_fields()) + 1),
    ):  # and the effect key of the step
        result = CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))
        shown = result.stdout.removesuffix("\n").split("\n")
        assert len(shown) == lines
        assert all(map(str.isprintable, shown))
        assert SHOWN in result.stdout


def test_log_line_of_a_failed_renewal_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A key that its publisher chose, and a store's excuse, stay within their line."""
    store = FaultyStore(MemoryStore())
    decision = claim(store, an_operation(FORGED, lease=0.5))
    assert isinstance(decision, Run)
    attempt = Claim(store, decision.record, lease=300, retain=1, claimed_at=time.monotonic())
    for error, level in ((StoreUnavailable("s", "swap", FORGED), "WARNING"), (LookupError(), "ERROR")):
        store.before_swap = partial(_fail, error)
        beats = Heartbeat()
        beats.start(attempt)
        wait_until(partial(_has_logged, caplog, level), "the failure was logged")
        beats.stop(attempt)

    assert all(f"key={QUOTED}" in each and each.isprintable() for each in caplog.messages)


def _has_logged(caplog: pytest.LogCaptureFixture, level: str) -> bool:
    return level in [each.levelname for each in caplog.records]


def _fail(error: Exception, record: Record) -> None:
    raise error


def test_log_line_of_a_message_that_cannot_be_published_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task id was chosen by whoever sent it."""
    app = an_app()
    app.conf.idempotency_store = store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    engine = create_engine(store._url)
    with engine.begin() as connection:
        store.enqueue(OutboxMessage(FORGED, "{", "application/json"), connection)
    engine.dispose()

    outbox.relay(app)
    store.close()

    (line,) = caplog.messages
    assert QUOTED in line
    assert line.isprintable()
