"""A delivery: every ending of a body becomes the right record, the right answer and the right event."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.errors import (
    InFlight,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    ReplayedFailure,
    ResultLost,
    SafeToRetry,
    StoreUnavailable,
)
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from tests.support.scene import JSON, Again, Elsewhere, Scene


class Declined(Exception):
    pass


@pytest.fixture
def scene() -> Scene:
    return Scene()


def raising(error: BaseException) -> Callable[[Claim | None], Any]:
    def body(attempt: Claim | None) -> Any:
        raise error

    return body


def test_first_delivery_runs_and_records(scene: Scene) -> None:
    """The body runs with its attempt; its result is recorded before it is returned."""
    keys = []

    def body(attempt: Claim | None) -> dict[str, int]:
        keys.append(attempt and attempt.key)
        return {"id": 1}

    outcome = scene.run(body)

    assert outcome == Outcome({"id": 1})
    assert keys == ["k"]
    assert (scene.record.status, scene.record.result) == (Status.COMPLETED, '{"id": 1}')
    assert scene.names == ["claimed", "completed"]
    assert len(scene.store.swaps) == 2


@pytest.mark.parametrize("value", [None, 0, False, "", [], {}, 0.0, (1, 2), {1: "x"}, "text"])
def test_first_caller_and_replays_get_the_same(scene: Scene, value: Any) -> None:
    """Falsy values, tuples and odd keys: what the first caller gets is exactly what every duplicate gets."""
    first = scene.run(lambda attempt: value)
    replay = scene.run(lambda attempt: "never")

    assert repr(first) == repr(replay)
    assert first.value == json.loads(json.dumps(value))
    assert scene.runs == 1
    assert scene.names == ["claimed", "completed", "replayed"]


def test_duplicate_costs_one_swap(scene: Scene) -> None:
    """A completed duplicate is answered from the failed claim."""
    scene.run(lambda attempt: 1)
    scene.store.swaps.clear()

    scene.run(lambda attempt: 2)

    assert len(scene.store.swaps) == 1


def test_running_operation_is_a_conflict(scene: Scene) -> None:
    """A delivery that meets another one running does nothing and learns how long to wait, and for whom."""
    met: list[Any] = []

    def body(attempt: Claim | None) -> str:
        scene.clock.advance(10_000)
        met.append(scene.run(lambda attempt: "never"))
        return "done"

    assert scene.run(body) == Outcome("done")
    assert scene.runs == 1
    assert isinstance(met[0], Conflict)
    assert isinstance(met[0].error, InFlight)
    assert (met[0].error.retry_after, met[0].error.holder, met[0].task_id) == (51_000, "w", "id")
    assert scene.names == ["claimed", "conflicted", "completed"]


def test_other_arguments_are_refused(scene: Scene) -> None:
    """The same key with another fingerprint runs nothing and says whose key it is."""
    scene.run(lambda attempt: 1)

    with pytest.raises(KeyReused) as raised:
        scene.run(lambda attempt: 2, fingerprint="other")

    assert raised.value.task_id == "id"
    assert scene.runs == 1
    assert scene.names[-1] == "key_reused"


def test_a_late_attempt_is_never_told_the_outcome_of_other_arguments(scene: Scene) -> None:
    """It stalls, its duplicate completes, that is forgotten, and the key is used anew: it has lost its claim."""

    def stalling(attempt: Claim | None) -> str:
        scene.steal()
        scene.clock.advance(8 * 86_400_000)
        assert scene.run(lambda attempt: "999 cents", fingerprint="other") == Outcome("999 cents")
        return "100 cents"

    with pytest.raises(LeaseLost):
        scene.run(stalling)

    assert scene.record.result == '"999 cents"'
    assert scene.names[-1] == "lease_lost"


def test_after_a_declined_card_another_card_may_come(scene: Scene) -> None:
    """What was given back without a step has had no effect that is recorded; its outcome then binds its arguments."""
    with pytest.raises(Declined):
        scene.run(raising(Declined("card 1")), fingerprint="card 1")

    assert scene.run(lambda attempt: "paid", fingerprint="card 2") == Outcome("paid")
    assert (scene.record.fingerprint, scene.record.attempts) == ("card 2", 2)
    with pytest.raises(KeyReused):
        scene.run(lambda attempt: "never", fingerprint="card 1")


@pytest.mark.parametrize("step", ["charge", "sms"])
def test_a_step_binds_the_arguments_whether_it_has_finished_or_is_in_doubt(scene: Scene, step: str) -> None:
    """It had its effect, or may have had it, with the card that was declined later."""

    def declined(handle: ProtectedAttempt) -> None:
        handle.step("charge", lambda step: "c-1")
        if step == "sms":
            handle.step("sms", lambda step: raising(TimeoutError())(None))
        raise Declined

    with pytest.raises((Declined, TimeoutError)):
        scene.perform(declined, fingerprint="card 1")

    with pytest.raises(KeyReused):
        scene.run(lambda attempt: "never", fingerprint="card 2")


@pytest.mark.parametrize(
    "error", [ValueError("x"), Again(), Elsewhere(), SafeToRetry(), SystemExit(1), KeyboardInterrupt()]
)
def test_raising_body_releases_under_rerun(scene: Scene, error: BaseException) -> None:
    """By default whatever is raised, process exit included, gives the claim back; the next delivery runs at once."""
    with pytest.raises(type(error)):
        scene.run(raising(error))

    assert scene.record.status is Status.RELEASED
    assert scene.names == ["claimed", "released"]
    assert len(scene.store.swaps) == 2
    assert scene.run(lambda attempt: attempt and attempt.number) == Outcome(2)


@pytest.mark.parametrize("error", [Again(), SafeToRetry()])
def test_only_the_authors_word_releases_under_refuse(scene: Scene, error: Exception) -> None:
    """Under refuse a retry asked for by the body is run; nothing else is."""
    with pytest.raises(type(error)):
        scene.run(raising(error), on_takeover="refuse")

    assert scene.run(lambda attempt: "ran", on_takeover="refuse") == Outcome("ran")


def test_exception_is_an_outcome_under_refuse(scene: Scene) -> None:
    """Under refuse an exception is recorded and replayed, never run again."""
    for _ in range(3):
        with pytest.raises(ValueError, match="no money"):
            scene.run(raising(ValueError("no money")), on_takeover="refuse")

    assert scene.runs == 1
    assert scene.names == ["claimed", "failed", "replayed", "replayed"]


@pytest.mark.parametrize("error", [SystemExit(1), Elsewhere(), KeyboardInterrupt()])
def test_end_without_an_outcome_is_unknown_under_refuse(scene: Scene, error: BaseException) -> None:
    """Under refuse a body that was ended from outside leaves an UNKNOWN outcome for a person."""
    with pytest.raises(type(error)):
        scene.run(raising(error), on_takeover="refuse")
    with pytest.raises(OutcomeUnknown, match=type(error).__name__):
        scene.run(lambda attempt: "never", on_takeover="refuse")

    assert scene.runs == 1
    assert scene.names == ["claimed", "outcome_unknown", "outcome_unknown"]


@pytest.mark.parametrize("error", [StoreUnavailable("s", "swap", "down"), LeaseLost("k", 1)])
def test_our_own_errors_from_a_body_are_no_outcome(error: Exception) -> None:
    """A body that asked its attempt and got no answer is not remembered as failed, whatever the policy remembers."""
    for on_takeover, status in (("rerun", Status.RELEASED), ("refuse", Status.UNKNOWN)):
        fresh = Scene()
        with pytest.raises(type(error)):
            fresh.run(raising(error), on_takeover=on_takeover, remember=(Exception,))
        assert fresh.record.status is status


def test_remembered_failure_is_replayed_as_it_was(scene: Scene) -> None:
    """A declared outcome is raised again with its type and arguments, for as long as it is retained."""
    for _ in range(2):
        with pytest.raises(Declined) as raised:
            scene.run(raising(Declined("no money", 42)), remember=(Declined,))
        assert raised.value.args == ("no money", 42)

    assert scene.runs == 1
    assert scene.record.error == "Declined: ('no money', 42)"


def test_failure_that_cannot_be_rebuilt_is_still_replayed(scene: Scene) -> None:
    """An exception with unencodable arguments, or of a type not loaded here, is replayed by name."""

    class Local(Exception):
        pass

    for error in (Local("x"), Declined(object())):
        fresh = Scene()
        with pytest.raises(type(error)):
            fresh.run(raising(error), remember=(Exception,))
        with pytest.raises(ReplayedFailure) as raised:
            fresh.run(lambda attempt: "never", remember=(Exception,))
        assert type(error).__qualname__ in raised.value.type_name
        assert raised.value.message == str(error)


def test_takeover_is_announced(scene: Scene) -> None:
    """An attempt after a dead one knows it, and so do the receivers."""
    scene.abandon()

    assert scene.run(lambda attempt: attempt and attempt.is_takeover) == Outcome(True)
    assert scene.names == ["claimed", "taken_over", "completed"]


def test_dead_attempt_is_never_repeated_under_refuse(scene: Scene) -> None:
    """Under refuse nobody runs after a dead attempt; everybody is told that nobody knows."""
    scene.abandon()

    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            scene.run(lambda attempt: "never", on_takeover="refuse")

    assert scene.runs == 0


def test_zombie_gets_the_successors_result(scene: Scene) -> None:
    """A body that outlived its lease answers with its successor's result, whatever it returns or raises."""
    for body in (lambda: "mine", lambda: (_ for _ in ()).throw(ValueError("mine"))):
        fresh = Scene()

        def zombie(attempt: Claim | None, body: Any = body, fresh: Scene = fresh) -> Any:
            fresh.steal()
            return body()

        assert fresh.run(zombie) == Outcome("theirs")
        assert fresh.record.result == '"theirs"'
        assert fresh.names == ["claimed", "lease_lost"]


def test_zombie_fails_with_the_successors_result_remembered(scene: Scene) -> None:
    """A declared failure of a zombie does not replace its successor's result either."""

    def zombie(attempt: Claim | None) -> Any:
        scene.steal()
        raise Declined

    assert scene.run(zombie, remember=(Declined,)) == Outcome("theirs")


@pytest.mark.parametrize("end", [lambda: "mine", lambda: (_ for _ in ()).throw(ValueError("mine"))])
def test_zombie_of_a_running_successor_reports_nothing(scene: Scene, end: Callable[[], Any]) -> None:
    """While the successor still runs, a zombie's delivery has no outcome at all."""

    def successor(attempt: Claim | None) -> Any:
        raise AssertionError("stays in progress")

    def zombie(attempt: Claim | None) -> Any:
        scene.clock.advance(61_000)
        record = scene.record
        from dataclasses import replace

        scene.store.store.swap(replace(record, owner="other", revision="theirs", fencing_token=2**60), record.revision)
        return end()

    with pytest.raises(LeaseLost):
        scene.run(zombie)
    assert scene.record.owner == "other"
    assert scene.names == ["claimed", "lease_lost"]


@pytest.mark.parametrize("error", [Again(), Elsewhere(), SystemExit()])
def test_zombies_control_flow_goes_on(scene: Scene, error: BaseException) -> None:
    """A retry that the body already published, or an exit, is not turned into something else."""

    def zombie(attempt: Claim | None) -> Any:
        scene.steal()
        raise error

    with pytest.raises(type(error)):
        scene.run(zombie)


def test_store_down_at_claim_runs_nothing(scene: Scene) -> None:
    """Without a certain claim the body does not run."""
    scene.store.faults.extend(["request lost"] * 2)

    with pytest.raises(StoreUnavailable):
        scene.run(lambda attempt: "never")

    assert scene.runs == 0
    assert scene.names == ["store_unavailable"]


def test_store_down_at_claim_may_run_unprotected_if_asked_to(scene: Scene) -> None:
    """Only a policy that says so runs without protection, and loudly."""
    scene.store.faults.extend(["request lost"] * 2)

    assert scene.run(lambda attempt: attempt, on_outage="run") == Outcome(None)
    assert scene.names == ["store_unavailable"]


@pytest.mark.parametrize("on_outage", ["retry", "run"])
def test_store_down_at_completion_is_not_success(scene: Scene, on_outage: str) -> None:
    """A result that could not be recorded is not reported, and the body is not run again here."""

    def body(attempt: Claim | None) -> str:
        scene.store.faults.extend(["request lost"] * 10_000)
        return "done"

    with pytest.raises(StoreUnavailable):
        scene.run(body, on_outage=on_outage)

    assert scene.runs == 1
    assert scene.record.status is Status.IN_PROGRESS
    assert scene.names == ["claimed", "store_unavailable", "store_unavailable"]  # it waits, and then no longer


def test_store_down_at_release_leaves_it_to_the_lease(scene: Scene) -> None:
    """The body's own exception stays primary when the claim cannot be given back."""

    def body(attempt: Claim | None) -> Any:
        scene.store.faults.extend(["request lost"] * 2)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        scene.run(body)

    assert scene.record.status is Status.IN_PROGRESS
    assert scene.names == ["claimed", "store_unavailable"]


@pytest.mark.parametrize("value", [object(), {1, 2}, float, lambda: None])
def test_unencodable_result_is_completed_without_it(scene: Scene, value: Any) -> None:
    """The effect happened: the first caller gets the value, replays are told that it was not kept."""
    assert scene.run(lambda attempt: value).value is value
    assert scene.record.status is Status.COMPLETED
    assert scene.record.result is None

    with pytest.raises(ResultLost, match="not encodable"):
        scene.run(lambda attempt: "never")
    assert scene.runs == 1


def test_recursive_result_is_completed_without_it(scene: Scene) -> None:
    """Whatever the encoder raises, the operation stays completed."""
    value: list[Any] = []
    value.append(value)

    assert scene.run(lambda attempt: value).value is value
    with pytest.raises(ResultLost):
        scene.run(lambda attempt: "never")


def test_oversized_result_is_completed_without_it(scene: Scene) -> None:
    """What the store cannot hold is dropped, and replays say so."""

    def limit(record: Record) -> None:
        if record.result is not None:
            raise RecordTooLarge("over 400 KB")

    scene.store.before_swap = limit

    assert scene.run(lambda attempt: "big") == Outcome("big")
    with pytest.raises(ResultLost, match="over 400 KB"):
        scene.run(lambda attempt: "never")
    assert scene.runs == 1


def test_pickle_from_the_store_is_refused_unless_accepted() -> None:
    """A result written with pickle is not unpickled by an app that accepts only JSON."""
    writer = Scene(Codec("pickle", frozenset({"application/x-python-serialize"})))
    assert writer.run(lambda attempt: {1, 2}) == Outcome({1, 2})
    assert writer.run(lambda attempt: "never") == Outcome({1, 2})

    writer.codec = JSON
    with pytest.raises(ResultLost, match="cannot be decoded here"):
        writer.run(lambda attempt: "never")


def test_pickled_failure_is_refused_unless_accepted() -> None:
    """So is a failure."""
    writer = Scene(Codec("pickle", frozenset({"application/x-python-serialize"})))
    with pytest.raises(Declined):
        writer.run(raising(Declined()), remember=(Declined,))

    writer.codec = JSON
    with pytest.raises(ResultLost, match="failure cannot be decoded here"):
        writer.run(lambda attempt: "never", remember=(Declined,))


def test_events_carry_key_and_token_and_no_values(scene: Scene) -> None:
    """What is observed names the operation, never its arguments or results."""
    scene.run(lambda attempt: "secret result")
    scene.run(lambda attempt: "never")

    assert {event.key for event in scene.events} == {"k"}
    assert {event.fencing_token for event in scene.events} == {scene.record.fencing_token}
    assert "secret" not in repr(scene.events)


def test_observing_runs_everything_and_reports_what_it_would_suppress(scene: Scene) -> None:
    """In observe mode duplicates, conflicts and reused keys run, and are counted."""
    met = []

    def outer(attempt: Claim | None) -> str:
        met.append(scene.observe(lambda attempt: "inner"))
        return "outer"

    assert scene.observe(outer) == "outer"
    assert met == ["inner"]
    assert scene.observe(lambda attempt: "again") == "again"
    assert scene.runs == 3
    assert scene.names == ["claimed", "conflicted", "completed", "replayed"]


def test_observing_lets_exceptions_through(scene: Scene) -> None:
    """A failing body fails as it would alone; the claim is given back."""
    with pytest.raises(ValueError, match="mine"):
        scene.observe(raising(ValueError("mine")))

    assert scene.record.status is Status.RELEASED


def test_observing_survives_every_outage(scene: Scene) -> None:
    """With the store down at claim or completion the body still runs once and its value is returned."""
    scene.store.faults.extend(["request lost"] * 2)
    assert scene.observe(lambda attempt: attempt) is None

    def body(attempt: Claim | None) -> str:
        scene.store.faults.extend(["request lost"] * 10_000)
        return "done"

    assert scene.observe(body) == "done"
    assert scene.runs == 2


def test_observing_tells_of_a_claim_that_was_lost_and_of_no_outage(scene: Scene) -> None:
    """The body's value is its caller's all the same."""

    def stalling(attempt: Claim | None) -> str:
        scene.clock.advance(61_000)
        scene.abandon()
        return "100 cents"

    assert scene.observe(stalling) == "100 cents"
    assert scene.names == ["lease_lost"]


def test_observing_reports_every_verdict(scene: Scene) -> None:
    """Reused keys, remembered failures and unknown outcomes are reported and run all the same."""
    with pytest.raises(Declined):
        scene.run(raising(Declined()), remember=(Declined,))
    assert scene.observe(lambda attempt: 1) == 1
    assert scene.names[-1] == "replayed"

    assert scene.delivery("other").observe(lambda claim: 2) == 2
    assert scene.names[-1] == "key_reused"

    unknown = Scene()
    unknown.abandon()
    with pytest.raises(OutcomeUnknown):
        unknown.run(lambda attempt: "never", on_takeover="refuse")
    assert unknown.observe(lambda attempt: 3) == 3
    assert unknown.names[-1] == "outcome_unknown"


def test_observing_leaves_nothing_unknown(scene: Scene) -> None:
    """It would stop the operation once the policy is enforced: not under refuse, nor after many takeovers."""
    scene.abandon()
    assert scene.observe(lambda claim: 1, on_takeover="refuse") == 1
    assert scene.record.status is Status.COMPLETED

    poisoned = Scene()
    for _ in range(2):
        poisoned.abandon()
    assert poisoned.observe(lambda claim: 1, max_takeovers=1) == 1
    assert poisoned.record.status is Status.COMPLETED
