"""What a record is, and what whoever can write the store can do: less than whoever can change the code."""
# mypy: allow-untyped-decorators

import json
import logging
import pickle
import re
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from cryptography.fernet import Fernet
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent import IdempotentTask, LeaseLost, OutcomeUnknown, Policy, Record, Status, current_attempt
from celery_idempotent.errors import ReplayedFailure, ResultLost, SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import BLANK, RecordUnreadable, bounded, keepable, marked, message_of, trace_of
from celery_idempotent.protocol.steps import Finished, to_plain
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.deliveries import an_app, deliver, signalled
from tests.support.scene import Scene, raising

BARE = BLANK.but(key="k", revision="r")
NEEDED = {each.name for each in fields(Record) if each.default is MISSING and each.default_factory is MISSING}


@pytest.mark.parametrize("record", [BARE, replace(a_record(), steps={"a": {"at": 1}}, result=b"\xff", takeovers=2)])
def test_record_is_read_as_it_was_written(record: Record) -> None:
    """A record is paid for by its size: fields that say nothing are not written, and mean the same when absent."""
    assert Record.from_fields(record.to_fields(), store="here") == record
    assert BARE.to_fields().keys() == NEEDED - {"fingerprint"} | {"schema"}


@pytest.mark.parametrize("field", sorted(NEEDED - {"fingerprint"}))
def test_field_that_is_missing_is_named(field: str) -> None:
    """What follows from a record counts on it; somebody has taken it away."""
    written = a_record().to_fields()
    del written[field]
    with pytest.raises(StoreMisconfigured, match=f"KeyError: '{field}'"):
        Record.from_fields(written, store="here")


@pytest.mark.parametrize("field", ["fencing_token", "lease_until", "attempts", "takeovers", "updated_at"])
def test_number_that_no_store_could_hold_with_one_more_is_refused(field: str) -> None:
    """The next claim adds one, and every store has 64 bits."""
    most = 2**63 - 2
    assert getattr(Record.from_fields({**a_record().to_fields(), field: most}, store="here"), field) == most
    for number in (-1, most + 1):
        with pytest.raises(StoreMisconfigured, match=f"{field} is {number}"):
            Record.from_fields({**a_record().to_fields(), field: number}, store="here")


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"key": ""}, "empty"), ({"revision": ""}, "empty"), ({"expires_at": 5}, "expires"), ({"schema": 2}, "schema 2")],
)
def test_what_cannot_have_been_written_is_refused(changes: dict[str, Any], named: str) -> None:
    """Only outcomes expire; what has no schema is no record, and a newer version knows more."""
    written = a_record().to_fields()
    with pytest.raises(StoreMisconfigured, match=named):
        Record.from_fields({**written, **changes}, store="here")
    with pytest.raises(StoreMisconfigured, match="its schema cannot be read"):
        Record.from_fields({each: written[each] for each in written if each != "schema"}, store="here")


def test_change_is_that_of_a_dataclass() -> None:
    """``but`` is a faster ``replace``, and no way to give a record what it has no place for."""
    record = a_record()
    assert record.but(owner="me", attempts=7) == replace(record, owner="me", attempts=7)
    with pytest.raises(TypeError, match="no field 'onwer'"):
        record.but(onwer="me")


@given(st.text(st.characters(), max_size=300))
@example("x" * 255)
@example("x" * 256)
@example("\ud800" * 255)
@example(f"{'x' * 238}…short")
def test_name_is_kept_as_every_store_can_hold_it(name: str) -> None:
    """Unchanged where that is possible; else it stays different from others, and is taken for no message's id."""
    kept = bounded(name)
    is_whole = kept == name
    assert is_whole == (len(name) <= 255 and keepable(name) == name)
    assert kept.encode().decode() == kept == bounded(kept)
    assert "\0" not in kept
    assert len(kept) <= 255
    assert message_of(BARE.but(task_id=kept)) == (name if is_whole else "")
    assert keepable(name) == name or kept != bounded(keepable(name))


def test_a_trace_is_that_of_the_owner_or_none() -> None:
    """A worker that does not know the field claims without it, and in an SQL row an earlier owner's stays."""
    told = replace(a_record(), owner="1" * 32, trace=marked("00-1-2-01", "1" * 32))
    assert [trace_of(each) for each in (told, replace(told, owner="2" * 32), replace(told, trace=""))] == [
        *("00-1-2-01", "", "")
    ]


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


def test_a_status_of_a_newer_version_is_no_status() -> None:
    """Whoever does not know it cannot know whether the body may run."""
    with pytest.raises(RecordUnreadable, match="'DONE' is not a valid Status"):
        Record.from_fields({**a_record().to_fields(), "status": "DONE"}, store="s")
