"""Whoever can write the store can do less than whoever can change the code; and what is kept of exceptions."""
# mypy: allow-untyped-decorators

import json
import logging
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from cryptography.fernet import Fernet
from kombu.exceptions import ContentDisallowed

from celery_idempotent import (
    IdempotentTask,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    Record,
    ReplayedFailure,
    ResultLost,
    SafeToRetry,
    Status,
    StoreMisconfigured,
    StoreUnavailable,
    current_attempt,
)
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.steps import Finished, to_plain
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.deliveries import an_app, deliver

PICKLE = "application/x-python-serialize"
CARD = "4111 1111 1111 1111"
REFUSE = Policy(on_takeover="refuse", fingerprint=None)
REMEMBER = Policy(remember=(Exception,), fingerprint=None)


def _task(app: Celery, policy: Policy, body: Any = lambda: None) -> Any:
    def charge() -> Any:
        return body()

    return app.task(base=IdempotentTask, shared=False, idempotent=policy, name="charge")(charge)


def _recorded(task: Any, **values: Any) -> Record:
    record = replace(a_completion(a_record()), key=task.idempotency_key_for(), fingerprint=None, **values)
    task.app.conf.idempotency_store.swap(record, None)
    return record


def _failed_with(task: Any, error: type[BaseException], args: list[Any]) -> None:
    described = {"module": error.__module__, "type": error.__qualname__, "message": "m", "args": args}
    _recorded(task, status=Status.FAILED, result=json.dumps(described), error="m")


@pytest.mark.parametrize("policy", [REFUSE, REMEMBER], ids=["refuse", "remember"])
@pytest.mark.parametrize(
    ("error", "args"),
    [
        (SystemExit, [1]),
        (KeyboardInterrupt, []),
        (GeneratorExit, []),
        (WorkerShutdown, [0]),
        (WorkerTerminate, [1]),
        (Reject, ["r", True]),
        (Ignore, []),
        (Retry, ["r"]),
        (LeaseLost, ["k", 1]),
        (StoreUnavailable, ["s", "swap", "r"]),
        (StoreMisconfigured, ["s", "swap", "r"]),
        (SafeToRetry, []),
    ],
)
def test_recorded_failure_cannot_steer_a_worker(policy: Policy, error: type[BaseException], args: list[Any]) -> None:
    """A record that names what ends a worker, moves a message or looks like an outage is a failure like any other."""
    task = _task(an_app(), policy)
    _failed_with(task, error, args)

    ended = deliver(task)

    assert (ended.state, type(ended.value)) == ("FAILURE", ReplayedFailure)
    assert ended.value.type_name == f"{error.__module__}.{error.__qualname__}"


@pytest.mark.parametrize(
    ("policy", "raised"),
    [
        (REFUSE, LookupError),
        (REMEMBER, LookupError),
        (replace(REMEMBER, remember=(LookupError, OSError)), LookupError),
        (replace(REMEMBER, remember=(OSError,)), ReplayedFailure),
        (replace(REMEMBER, remember=()), ReplayedFailure),
    ],
)
def test_recorded_failure_is_raised_again_only_if_the_policy_remembers_it(policy: Policy, raised: type) -> None:
    """Under ``refuse`` every exception is an outcome; else those that ``remember`` names."""
    task = _task(an_app(), policy)
    _failed_with(task, LookupError, ["no such order"])

    assert type(deliver(task).value) is raised


class Executed:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("cipher", [None, Fernet.generate_key()], ids=["clear", "encrypted"])
@pytest.mark.parametrize("policy", [REFUSE, REMEMBER], ids=["refuse", "remember"])
@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_pickled_record_is_not_executed_where_only_messages_may_be_pickled(
    policy: Policy, status: Status, cipher: Any, tmp_path: Path
) -> None:
    """``accept_content`` is about messages; of a store only JSON is decoded, and what ``result_serializer`` writes."""
    task = _task(an_app(accept_content=["json", "pickle"], idempotency_cipher=cipher), policy)
    trace = tmp_path / "executed"
    _recorded(task, status=status, result=pickle.dumps(Executed(trace)), content_type=PICKLE)

    assert type(deliver(task).value) is ResultLost
    assert not trace.exists()


def test_pickled_step_is_not_executed_where_only_messages_may_be_pickled(tmp_path: Path) -> None:
    """A released record can bring one."""
    task = _task(
        an_app(accept_content=["json", "pickle"]), REMEMBER, lambda: current_attempt().step("pay", lambda step: "paid")
    )
    finished = Finished(Encoded(pickle.dumps(Executed(tmp_path / "executed")), PICKLE))
    _recorded(task, status=Status.RELEASED, result=None, content_type=None, steps={"pay": to_plain(finished)})

    assert type(deliver(task).value) is ResultLost
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("settings", "may_be_pickle"),
    [
        ({}, False),
        ({"accept_content": ["json", "pickle"]}, False),
        ({"result_accept_content": ["json", "pickle"]}, False),
        ({"task_serializer": "pickle", "accept_content": ["pickle"]}, False),
        ({"result_serializer": "pickle", "accept_content": ["json", "pickle"]}, True),
    ],
)
def test_only_json_and_the_serializer_of_results_are_decoded(settings: dict[str, Any], may_be_pickle: bool) -> None:
    """Whatever else may come in messages; pickle is a choice that only ``result_serializer`` makes."""
    app = an_app(**settings)  # its runtime does not keep it
    codec = runtime_of(app).codec

    assert codec.decode(replace(codec, serializer="json").encode([1])) == [1]
    pickled = replace(codec, serializer="pickle").encode([1])
    if may_be_pickle:
        assert codec.decode(pickled) == [1]
    else:
        with pytest.raises(ContentDisallowed):
            codec.decode(pickled)


def test_setting_that_forbids_the_results_is_named() -> None:
    """The one that is in force."""
    app = an_app(result_serializer="pickle", accept_content=["pickle", "json"], result_accept_content=["json"])

    with pytest.raises(PolicyError, match="as result_accept_content does not list it"):
        _ = runtime_of(app).codec


def _fails() -> None:
    raise ValueError(CARD)


def _steps_unencodable() -> None:
    current_attempt().step("charge", lambda step: Unencodable())
    raise ValueError(CARD)


def _is_in_doubt() -> None:
    raise OutcomeUnknown(current_attempt().key, CARD)


def _exits() -> None:
    raise SystemExit(CARD)


class Unencodable:
    def __reduce__(self) -> Any:
        raise ValueError(CARD)


@pytest.mark.parametrize(
    ("body", "policy", "status", "error"),
    [
        (_fails, REMEMBER, Status.FAILED, "ValueError"),
        (_fails, REFUSE, Status.FAILED, "ValueError"),
        (_fails, replace(REMEMBER, remember=()), Status.RELEASED, None),
        (_steps_unencodable, REMEMBER, Status.FAILED, "ValueError"),
        (_steps_unencodable, replace(REMEMBER, remember=()), Status.RELEASED, None),
        (_is_in_doubt, REMEMBER, Status.UNKNOWN, "OutcomeUnknown ended attempt 1"),
        (_exits, REFUSE, Status.UNKNOWN, "SystemExit ended attempt 1"),
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
    told: list[Any] = []

    def receive(**event: Any) -> None:
        told.append(event["reason"])

    for each in SIGNALS.values():
        each.connect(receive)
    try:
        for _ in range(2):
            with suppress(SystemExit):
                deliver(task)
    finally:
        for each in SIGNALS.values():
            each.disconnect(receive)

    (record,) = app.conf.idempotency_store.scan()
    assert (record.status, record.error) == (status, error)
    ours = [each.getMessage() for each in caplog.records if each.name.startswith("celery_idempotent")]
    assert len(ours) == len(told) >= 3
    assert CARD not in f"{record} {ours} {told}"


def test_redacted_failure_is_replayed_by_its_type() -> None:
    """A duplicate learns what kind of failure it was."""
    task = _task(an_app(), replace(REFUSE, private=True), _fails)

    assert deliver(task).value.args == (CARD,)
    assert deliver(task).value.args == (task.idempotency_key_for(), "builtins.ValueError", "")


def test_redacting_is_said_by_a_truth_value() -> None:
    """A mistyped policy is refused where it is written."""
    with pytest.raises(PolicyError, match="private='yes': must be True or False"):
        Policy(private="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "state", "runs"), [("enforce", "RETRY", 0), ("observe", "SUCCESS", 1)])
def test_missing_permission_is_no_outage(mode: Any, state: str, runs: int) -> None:
    """Under ``on_outage="run"`` nothing runs over an answer that cannot be read; who observes changes nothing."""
    calls: list[int] = []
    app = an_app()
    app.conf.idempotency_store = store = FaultyStore(MemoryStore())
    task = _task(app, Policy(on_outage="run", mode=mode), lambda: calls.append(1))

    def refuse(record: Record) -> None:
        raise StoreMisconfigured("s", "PutItem", "not granted")

    store.before_swap = refuse

    assert deliver(task).state == state
    assert len(calls) == runs


class _Unprintable:
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        (ValueError("timed out"), "timed out"),
        (b"timed out", "b'timed out'"),
        (504, "504"),
        ("\ud800\0", r"\ud800\x00"),
        ("x" * 3_000_000, "x" * 2_000),
        (_Unprintable(), "(no message)"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_reason_of_an_unknown_outcome_is_kept_as_text(reason: Any, kept: str) -> None:
    """Whatever a body gives for one, such as the exception it caught: no store refuses it, and no replay fails."""
    app = an_app()

    def body() -> None:
        raise OutcomeUnknown(current_attempt().key, reason)

    task = _task(app, REFUSE, body)
    deliver(task)

    record = app.conf.idempotency_store.get(task.idempotency_key_for())
    assert (record.status, record.error) == (Status.UNKNOWN, kept)
    replayed = deliver(task).value
    assert isinstance(replayed, OutcomeUnknown)
    assert replayed.reason == kept
