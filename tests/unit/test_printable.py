"""What came from elsewhere is printed on one line, in logs and on the command line; signals get it as it is."""
# mypy: allow-untyped-decorators

import logging
import time
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from celery_idempotent import IdempotentTask, Policy, StoreUnavailable, outbox, signals
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
from tests.support.scene import an_operation, raising
from tests.support.waiting import wait_until

FORGED = "7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
SHOWN = r"7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
QUOTED = '"' + SHOWN.replace("\\", r"\\") + '"'
"""As a value in a line of the log."""

UNSEEN = "\u200e\u200f\u061c\u2066\u2069\u2029\u200b\u200d\u2060\ufeff\xad\u3164\U000e0041\ufe0f"
"""What changes direction, or has no width."""


@given(st.text(st.characters()))
@example(FORGED)
@example(UNSEEN)
@example("Überlast 💥 日本 \\n")
def test_what_a_terminal_obeys_is_escaped(text: str) -> None:
    """Control characters, ends of lines, changes of direction, and what has no width; every script stays readable."""
    printed = one_line(text)
    assert not {unicodedata.category(each) for each in printed} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(printed) & set(UNSEEN)
    escaped = {each for each in text if one_line(each) != each}
    assert printed == "".join(
        each.encode("unicode_escape", "surrogatepass").decode() if each in escaped else each for each in text
    )
    assert not [each for each in escaped if each.isalnum() and "FILLER" not in unicodedata.name(each)]
    assert (one_line(FORGED), one_line(None)) == (SHOWN, "None")


def _ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("celery_idempotent.")]


def test_log_lines_cannot_be_forged_by_a_task_id(caplog: pytest.LogCaptureFixture) -> None:
    """Every event of a delivery is one line, also without a key; and the signal gets the id as it was sent."""
    caplog.set_level(logging.DEBUG, "celery_idempotent")
    app, seen = an_app(), list[Any]()

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(on_takeover="refuse"), name=f"task {FORGED}")
    def charge() -> None:
        raise ValueError(FORGED)

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(key="order_id", mode="observe"))
    def observed(order_id: int | None) -> None: ...

    def receive(**event: Any) -> None:
        seen.append(event["task_id"])

    signals.failed.connect(receive)
    for _ in range(2):
        deliver(charge, task_id=FORGED)
    deliver(observed, None, task_id=FORGED)

    lines, events = _ours(caplog), ["claimed", "failed", "replayed", "key_missing", "not_observed"]
    assert [each.split()[0] for each in lines] == [f"event=idempotency.{each}" for each in events]
    assert all(map(str.isprintable, lines))
    assert all(f"task_id={QUOTED} " in each for each in lines[:3])
    assert seen == [FORGED]


def test_rows_of_the_command_line_cannot_be_forged() -> None:
    """A record is one row of a list, and each of its fields one line, whatever was written into it."""
    app = an_app()
    names: dict[str, Any] = dict.fromkeys(("task", "task_id", "worker", "error"), FORGED)
    record = replace(a_record(), key=f"k{FORGED}", steps={FORGED: {"lost": FORGED}}, **names)
    app.conf.idempotency_store.swap(record, None)

    rows = len(record.to_fields()) + 1  # and the effect key of the step
    for arguments, lines in ((("list",), 2), (("show", record.key), rows)):
        result = CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))
        shown = result.stdout.removesuffix("\n").split("\n")
        assert (len(shown), all(map(str.isprintable, shown)), SHOWN in result.stdout) == (lines, True, True)


@pytest.mark.parametrize(
    ("error", "level"), [(StoreUnavailable("s", "swap", FORGED), "WARNING"), (KeyError(), "ERROR")]
)
def test_log_line_of_a_failed_renewal_is_one_line(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that its publisher chose, and a store's excuse, stay within their line."""
    store, beats = FaultyStore(MemoryStore()), Heartbeat()
    decision = claim(store, an_operation(FORGED, lease=0.5))
    assert isinstance(decision, Run)
    store.before_swap = raising(error)
    attempt = Claim(store, decision.record, lease=300, retain=1, claimed_at=time.monotonic())
    beats.start(attempt)
    wait_until(lambda: level in [each.levelname for each in caplog.records], "the failure was logged")
    beats.stop(attempt)
    assert all(f"key={QUOTED}" in each and each.isprintable() for each in caplog.messages)


def test_log_line_of_a_message_that_cannot_be_published_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task id was chosen by whoever sent it."""
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    engine = create_engine(store._url)
    with engine.begin() as connection:
        store.enqueue(OutboxMessage(FORGED, "{", "application/json"), connection)
    engine.dispose()
    outbox.relay(an_app(idempotency_store=store))
    store.close()

    (line,) = caplog.messages
    assert (QUOTED in line, line.isprintable()) == (True, True)
