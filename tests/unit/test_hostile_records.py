"""Whoever can write the store can do less than whoever can change the code; and what is kept of exceptions."""
# mypy: allow-untyped-decorators

import json
import logging
import pickle
import re
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent import (
    IdempotentTask,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    Record,
    ReplayedFailure,
    ResultLost,
    SafeToRetry,
    Status,
    StoreMisconfigured,
    StoreUnavailable,
    current_attempt,
)
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import RecordUnreadable
from celery_idempotent.protocol.steps import Finished, to_plain
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.deliveries import an_app, deliver, signalled
from tests.support.scene import Scene, raising

PICKLE = "application/x-python-serialize"
CARD = "4111 1111 1111 1111"
REFUSE = Policy(on_takeover="refuse", fingerprint=None)
REMEMBER = Policy(remember=(Exception,), fingerprint=None)


def _task(app: Celery, policy: Policy, body: Any = lambda: None) -> Any:
    @app.task(base=IdempotentTask, shared=False, idempotent=policy, name="charge")
    def charge() -> Any:
        return body()

    return charge


def _recorded(task: Any, **values: Any) -> None:
    record = replace(a_completion(a_record()), key=task.idempotency_key_for(), fingerprint=None, **values)
    task.app.conf.idempotency_store.swap(record, None)


WRITTEN = replace(a_completion(a_record()), key="k", fingerprint=None)
DAMAGE = st.one_of(st.none(), st.booleans(), st.integers(max_value=-1), st.integers(2**63), st.floats(), st.just([1]))


@given(st.sampled_from([each.name for each in fields(Record)]), DAMAGE)
def test_damaged_record_runs_no_body_and_is_named(field: str, value: object) -> None:
    """Whatever stands in a field that cannot be what was written: it may be an outcome, and somebody must look."""
    scene = Scene()
    damaged = {**WRITTEN.to_fields(), field: value}
    scene.plan("claim", lambda swap: Record.from_fields(damaged, store="s"))
    if value is None and field in {"fingerprint", "result", "content_type", "error", "expires_at"}:
        scene.answer(lambda: scene.run(lambda claim: "never", on_outage="run"))
    else:
        with pytest.raises(RecordUnreadable, match=re.escape(repr(value)) if field == "key" else "'k'") as raised:
            scene.run(lambda claim: "never", on_outage="run")
        assert "schema" in str(raised.value) or field in str(raised.value)
        assert scene.told == "record_unreadable"
    assert scene.runs == 0


STEERS = [
    *((SystemExit, [1]), (KeyboardInterrupt, []), (GeneratorExit, []), (WorkerShutdown, [0]), (WorkerTerminate, [1])),
    *((Reject, ["r", True]), (Ignore, []), (Retry, ["r"]), (SafeToRetry, []), (LeaseLost, ["k", 1])),
    *((StoreUnavailable, ["s", "swap", "r"]), (StoreMisconfigured, ["s", "swap", "r"])),
]


@pytest.mark.parametrize(
    ("policy", "error", "args", "is_raised"),
    [
        *((policy, *each, False) for policy in (REFUSE, REMEMBER) for each in STEERS),
        *((policy, LookupError, ["no such order"], True) for policy in (REFUSE, REMEMBER)),
        (replace(REMEMBER, remember=(OSError,)), LookupError, [], False),
    ],
)
def test_recorded_failure_is_raised_only_if_it_is_remembered_and_steers_nobody(
    policy: Policy, error: type[BaseException], args: list[Any], is_raised: bool
) -> None:
    """A record that names what ends a worker, moves a message or looks like an outage is a failure like any other."""
    task = _task(an_app(), policy)
    described = {"module": error.__module__, "type": error.__qualname__, "message": "m", "args": args}
    _recorded(task, status=Status.FAILED, result=json.dumps(described), error="m")
    ended = deliver(task)
    assert (ended.state, type(ended.value)) == ("FAILURE", error if is_raised else ReplayedFailure)
    assert is_raised or ended.value.type_name == f"{error.__module__}.{error.__qualname__}"


@pytest.mark.parametrize("cipher", [None, Fernet.generate_key()], ids=["clear", "encrypted"])
@pytest.mark.parametrize(
    ("policy", "status"), [(REFUSE, Status.COMPLETED), (REMEMBER, Status.FAILED), (REMEMBER, Status.RELEASED)]
)
def test_pickled_record_is_not_executed_where_only_messages_may_be_pickled(
    policy: Policy, status: Status, cipher: Any, tmp_path: Path
) -> None:
    """Only ``result_serializer`` chooses pickle for results; nor is a step executed, which a released record brings."""
    both = ["json", "pickle"]
    app = an_app(task_serializer="pickle", accept_content=both, result_accept_content=both, idempotency_cipher=cipher)
    task = _task(app, policy, lambda: current_attempt().step("pay", lambda step: "paid"))
    touching = type("Touching", (), {"__reduce__": lambda self: (Path.touch, (tmp_path / "executed",))})
    pickled = Encoded(pickle.dumps(touching()), PICKLE)
    if status is Status.RELEASED:
        steps = {"pay": to_plain(Finished(pickled))}
        _recorded(task, status=status, result=None, content_type=None, expires_at=None, steps=steps)
    else:
        _recorded(task, status=status, result=pickled.data, content_type=PICKLE)
    assert type(deliver(task).value) is ResultLost
    assert not (tmp_path / "executed").exists()


Unencodable = type("Unencodable", (), {"__reduce__": raising(ValueError(CARD))})


def _steps_unencodable() -> None:
    current_attempt().step("charge", lambda step: Unencodable())
    raise ValueError(CARD)


FAILS, EXITS, FORGETFUL = raising(ValueError(CARD)), raising(SystemExit(CARD)), replace(REMEMBER, remember=())


@pytest.mark.parametrize(
    ("body", "policy", "status", "error"),
    [
        (FAILS, REMEMBER, Status.FAILED, "ValueError"),
        (FAILS, FORGETFUL, Status.RELEASED, None),
        (_steps_unencodable, REMEMBER, Status.FAILED, "ValueError"),
        (_steps_unencodable, FORGETFUL, Status.RELEASED, None),
        (lambda: raising(OutcomeUnknown(current_attempt().key, CARD))(), REMEMBER, Status.UNKNOWN, "OutcomeUnknown"),
        (EXITS, REFUSE, Status.UNKNOWN, "SystemExit"),
        (Unencodable, REFUSE, Status.COMPLETED, None),
    ],
)
def test_redacted_exception_reaches_neither_store_nor_log_nor_signal(
    body: Any, policy: Policy, status: Status, error: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """However a body ends: of its exception the type is kept and told, and nothing else; also by every replay."""
    caplog.set_level(logging.DEBUG, "celery_idempotent")
    app = an_app(result_serializer="pickle", accept_content=["json", "pickle"])
    task = _task(app, replace(policy, private=True), body)
    with signalled() as told:
        for _ in range(2):
            with suppress(SystemExit):
                deliver(task)
    (record,) = app.conf.idempotency_store.scan()
    ended = f"{error} ended attempt 1" if status is Status.UNKNOWN else error
    assert (record.status, record.error) == (status, ended)
    ours = [each.getMessage() for each in caplog.records if each.name.startswith("celery_idempotent")]
    assert len(ours) == len(told) >= 3
    assert CARD not in f"{record} {ours} {told}"


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (ValueError("timed out"), "timed out"),
        (504, "504"),
        ("\ud800\0", r"\ud800\x00"),
        ("x" * 3_000_000, "x" * 2_000),
        (type("Unprintable", (), {"__str__": raising(ValueError())})(), "(no message)"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_reason_of_an_unknown_outcome_is_kept_as_text(reason: Any, kept: str) -> None:
    """Whatever a body gives for one, such as the exception it caught: no store refuses it, and no replay fails."""
    scene = Scene()
    assert scene.answer(lambda: scene.run(raising(OutcomeUnknown("k", reason)))) is OutcomeUnknown
    with pytest.raises(OutcomeUnknown) as replayed:
        scene.run(lambda claim: "never")
    assert (scene.status, scene.record.error, replayed.value.reason) == (Status.UNKNOWN, kept, kept)
