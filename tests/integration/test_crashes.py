"""Workers that die, freeze, hang and stop: the effect still happens once, and recovery is prompt."""

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from celery_idempotent.errors import OutcomeUnknown
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from tests.integration import idempotent_tasks as tasks
from tests.integration.cluster import POOLS, Cluster, Worker, WorkerOptions, on, on_every_broker, record_of
from tests.support.celeries import since_celery
from tests.support.ledger import Ledger, Row
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker(visibility_timeout=3), pytest.mark.usefixtures("celery_setup")]
blind = pytest.param("redis", marks=pytest.mark.worker(settings={"blindness": "only parents"}), id="redis-blind")
"""Only the worker that lost a process knows that it is gone; no delivery finds out."""
two_attentive = pytest.mark.worker(count=2, settings={"broker_heartbeat": 2})
"""Two workers; RabbitMQ closes the connection of a frozen one within seconds instead of minutes."""


def _key(row: Row) -> str:
    return str(row.details["idempotency_key"])


def _successor_of(killed: Row, result: Any, ledger: Ledger) -> Row:
    """The second attempt, which takes over and ends."""
    _, successor = ledger.wait_for("begin", count=2)
    ledger.open("go:2")
    assert result.get(timeout=60) == "o by attempt 2"
    assert (successor.details["takeover"], killed.token < successor.token) == (True, True)
    return successor


@pytest.mark.compat
@on("redis", "sqs", "classic", blind, at_night=("quorum",))
def test_a_killed_attempt_is_taken_over_before_its_lease(cluster: Cluster, ledger: Ledger, store: Store) -> None:
    """SIGKILL in the body, under a lease of 90 seconds: the next attempt neither waits nor meets a conflict, though no
    delivery could see that the process is gone: the worker has ended the lease."""
    result = tasks.charge_with_a_long_lease.delay("o", gate="go")
    (killed,) = ledger.wait_for("begin")
    lease_until = record_of(store, _key(killed)).lease_until
    cluster.kill_child(killed)
    assert _successor_of(killed, result, ledger).token < lease_until
    assert not ledger.rows("conflicted")


@on_every_broker
@pytest.mark.worker(visibility_timeout=6)
def test_a_killed_worker_is_taken_over_by_its_successor(worker: Worker, ledger: Ledger, store: Store) -> None:
    """SIGKILL of a worker with all its processes: its successor on that machine waits for the message, and no lease."""
    result = tasks.charge_with_a_long_lease.delay("o", gate="go")
    (killed,) = ledger.wait_for("begin")
    worker.kill()
    lease_until = record_of(store, _key(killed)).lease_until
    worker.start_again()
    assert _successor_of(killed, result, ledger).token < lease_until
    assert not ledger.rows("conflicted")


@on("redis", at_night=("sqs", "greenlets"))
@pytest.mark.compat
@pytest.mark.worker(settings={"blindness": "elsewhere"})
def test_a_killed_worker_elsewhere_is_taken_over_after_its_lease(worker: Worker, ledger: Ledger, store: Store) -> None:
    """Nothing is known of a process on another machine: the lease counts, and the next attempt comes after it."""
    result = tasks.charge_with_a_lease_of_8_s.delay("o", gate="go")
    (killed,) = ledger.wait_for("begin")
    worker.kill()
    lease_until = record_of(store, _key(killed)).lease_until
    worker.start_again()
    # A claim without a predecessor has the store's time as its token; a takeover comes after the lease.
    assert _successor_of(killed, result, ledger).token > lease_until
    assert ledger.rows("conflicted")
    assert [row.attempt for row in ledger.rows("effect")] == [2]


@on_every_broker
@two_attentive
def test_a_zombie_overwrites_deletes_and_reports_nothing(cluster: Cluster, ledger: Ledger, store: Store) -> None:
    """A worker that was frozen past its lease wakes up: the record and the result stay its successor's."""
    result = tasks.charge.delay("o", gate="go")
    (begun,) = ledger.wait_for("begin")
    zombie = cluster.worker_of(begun)
    zombie.freeze()
    _successor_of(begun, result, ledger)
    successors = record_of(store, _key(begun))
    zombie.thaw()
    ledger.open("go:1")
    (lost,) = ledger.wait_for("lease_lost")
    reported = ledger.wait_for("reported", count=2)
    assert lost.worker == zombie.hostname()
    assert {row.details["result"] for row in reported} == {result.get(timeout=60)} == {"o by attempt 2"}
    assert record_of(store, successors.key) == successors


@on("sqs", at_night=("redis", "classic", "quorum", "greenlets"))
@two_attentive
def test_zombie_settles_what_was_given_up_and_nothing_reruns(cluster: Cluster, ledger: Ledger, store: Store) -> None:
    """A frozen attempt that may not be repeated wakes up: nobody else can have run, so its outcome ends the doubt."""
    tasks.charge_at_most_once.delay("o", gate="go")
    (begun,) = ledger.wait_for("begin")
    zombie = cluster.worker_of(begun)
    zombie.freeze()
    ledger.wait_for("outcome_unknown")
    given_up = record_of(store, _key(begun))
    assert given_up.status is Status.UNKNOWN
    zombie.thaw()
    ledger.open("go:1")
    wait_until(lambda: record_of(store, given_up.key).status is Status.COMPLETED, "the zombie ends its operation")
    assert record_of(store, given_up.key).owner == given_up.owner
    assert tasks.charge_at_most_once.delay("o", gate="go").get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("effect")) == 1


@on(at_night=("greenlets",))
@pytest.mark.worker(count=2, concurrency=1, visibility_timeout=120)
@pytest.mark.parametrize(("guard", "effects"), [("asks", [2]), ("in a step", [2]), ("unguarded", [1, 2])])
def test_a_greenlet_that_computes_past_its_lease_learns_that_it_has_lost_it(
    worker: Worker, ledger: Ledger, store: Store, guard: str, effects: list[int]
) -> None:
    """Nothing renews it meanwhile. It owns nothing afterwards, by its own eyes: it begins no guarded effect, and leaves
    the record and the result to its successor, which still runs."""
    results = [tasks.charge_after_computing.delay("o", "go", guard)]
    (stalled,) = ledger.wait_for("begin")
    results.append(tasks.charge_after_computing.delay("o", "go", guard))
    _, successor = ledger.wait_for("begin", count=2)
    assert (successor.worker != stalled.worker, successor.details["takeover"]) == (True, True)
    worker.run_beside(f"open({tasks.COMPUTED!r}, 'x').close()")
    (lost,) = ledger.wait_for("lease_lost")
    assert lost.worker == stalled.worker
    assert record_of(store, _key(stalled)).fencing_token == successor.token
    ledger.open("go:2")
    assert [result.get(timeout=60) for result in results] == ["o by attempt 2"] * 2
    assert [row.attempt for row in ledger.rows("effect")] == effects
    assert {row.details["result"] for row in ledger.rows("reported")} == {"o by attempt 2"}


@on("sqs", at_night=("redis",))
@pytest.mark.worker(settings={"idempotency_hold_messages": False})
def test_a_task_longer_than_lease_and_visibility_timeout_runs_once(ledger: Ledger, store: Store) -> None:
    """The heartbeat keeps the claim while a broker that nobody tells delivers the message again and again."""
    result = tasks.charge.delay("o", gate="go")
    (begun,) = ledger.wait_for("begin")
    first_lease = record_of(store, _key(begun)).lease_until
    ledger.wait_for("conflicted", count=2)
    wait_until(lambda: record_of(store, _key(begun)).lease_until > first_lease + 2000, "the lease is renewed")
    ledger.open("go:1")
    assert result.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1


@on_every_broker
@pytest.mark.compat
def test_a_cold_shutdown_gives_the_claim_back(worker: Worker, ledger: Ledger, store: Store) -> None:
    """SIGQUIT in the body: the redelivery runs at once, although the lease would last much longer."""
    result = tasks.charge_with_a_long_lease.delay("o", gate="go")
    (stopped,) = ledger.wait_for("begin")
    worker.shut_down(cold=True)
    assert record_of(store, _key(stopped)).status is Status.RELEASED
    worker.start_again()
    _, successor = ledger.wait_for("begin", count=2)
    ledger.open("go:2")
    assert (result.get(timeout=60), successor.details["takeover"]) == ("o by attempt 2", False)


@on(at_night=("threads", "solo"))
def test_cold_shutdown_waits_for_a_body_that_its_pool_cannot_stop(worker: Worker, ledger: Ledger, store: Store) -> None:
    """SIGQUIT in a body that may happen at most once: it is not told of an error of Celery's, and has its outcome."""
    tasks.charge_at_most_once.delay("o", gate="go")
    (stopped,) = ledger.wait_for("begin")
    worker.kill(signal="SIGQUIT", reload_container=False)
    wait_until(lambda: "terminate all running tasks" in worker.logs(), "the worker has the signal")
    ledger.open("go:1")
    wait_until(worker.has_exited, "the worker ends")
    assert record_of(store, _key(stopped)).status is Status.COMPLETED


@since_celery("5.5", "soft shutdown")
@pytest.mark.worker(settings={"worker_soft_shutdown_timeout": 1})
def test_a_soft_shutdown_ends_the_wait_for_a_store_that_is_away(
    worker: Worker, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """An outcome that cannot be recorded keeps no worker for longer than that; its message goes back, as if the process
    had been killed."""
    tasks.charge_at_most_once.delay("o", gate="go")
    (begun,) = ledger.wait_for("begin")
    with faults.losing():
        ledger.open("go:1")
        wait_until(lambda: "idempotency.result_waits" in worker.logs(), "the outcome waits")
        worker.shut_down(cold=True)
    worker.start_again()
    ledger.wait_for("outcome_unknown")
    assert record_of(store, _key(begun)).status is Status.UNKNOWN


@on("redis", at_night=POOLS)
@pytest.mark.worker(visibility_timeout=120)
def test_a_body_that_exits_runs_again_and_ends_unknown_if_it_does_no_else(
    ledger: Ledger, worker_options: WorkerOptions
) -> None:
    """In every pool: its claim and its message are given back, and its worker goes on. An exit of its own, and one by a
    signal that its worker did not send, count as the death of its process, so `max_takeovers` ends it as a SIGKILL."""
    assert tasks.charge_or_die.delay("o", "once").get(timeout=60) == "o by attempt 2"
    assert [row.attempt for row in ledger.rows("effect", "o")] == [2]
    # Since billiard 4.3 prefork takes `CancelledError` for a failure of the task, and does not deliver it again.
    for death in ("SystemExit", "GreenletExit", "SIGTERM" if worker_options.pool == "prefork" else "CancelledError"):
        with pytest.raises(OutcomeUnknown):
            tasks.charge_or_die.delay(death, death).get(timeout=60)
        begun = [(row.attempt, row.details["takeover"]) for row in ledger.rows("begin", death)]
        assert begun == [(1, False), (2, True)]
    assert tasks.charge.delay("another").get(timeout=60) == "another by attempt 1"


@since_celery("5.7", "messages that are given back after a hard time limit")
@pytest.mark.worker(visibility_timeout=120, settings={"task_acks_on_failure_or_timeout": False})
def test_a_body_that_is_too_long_again_and_again_ends_unknown(ledger: Ledger, store: Store) -> None:
    """A hard time limit that gives the message back counts as the death of its process."""
    tasks.charge_with_one_takeover.apply_async(("o", "go"), time_limit=2)
    ledger.wait_for("outcome_unknown")
    begun = ledger.rows("begin")
    assert [(row.attempt, row.details["takeover"]) for row in begun] == [(1, False), (2, True)]
    assert record_of(store, _key(begun[0])).status is Status.UNKNOWN


def test_a_body_that_is_stopped_gives_the_claim_back(ledger: Ledger) -> None:
    """For its length, or by revoke(terminate=True): the next delivery of the key runs at once."""
    limited = tasks.charge_with_a_long_lease.apply_async(("o", "go"), time_limit=3)
    revoked = tasks.charge_with_a_long_lease.delay("p", "go")
    ledger.wait_for("begin", key="p")
    revoked.revoke(terminate=True)
    for result, error in ((limited, TimeLimitExceeded), (revoked, TaskRevokedError)):
        with pytest.raises(error):
            result.get(timeout=60)
    ledger.open("go:2")
    for order in "op":
        assert tasks.charge_with_a_long_lease.delay(order, "go").get(timeout=60) == f"{order} by attempt 2"


@on("redis", at_night=("sqs", "greenlets"))
@pytest.mark.worker(count=2, concurrency=1, visibility_timeout=4)
def test_another_worker_takes_over_from_a_body_that_hangs(cluster: Cluster, ledger: Ledger, store: Store) -> None:
    """Renewals end, and the message is let go: it comes again, and is run again. The late body reports that outcome."""
    result = tasks.charge_within_3_s.delay("o", gate="go")
    (hanging,) = ledger.wait_for("begin")
    worker = cluster.worker_of(hanging)
    _, successor = ledger.wait_for("begin", count=2)
    assert successor.details["takeover"]
    assert successor.at - hanging.at > 3
    ledger.open("go:2")
    assert result.get(timeout=60) == "o by attempt 2"
    told = f"witnessed deadline_exceeded of {result.id} by {tasks.charge_within_3_s.name}"
    wait_until(lambda: told in worker.logs(), "the signal was sent")
    assert worker.logs().count("idempotency.deadline_exceeded") == 1
    assert worker.logs().count("idempotency.hold_ended") == 1
    ledger.open("go:1")
    (lost,) = ledger.wait_for("lease_lost")
    assert lost.worker == hanging.worker
    reported = ledger.wait_for("reported", count=2)
    assert {row.details["result"] for row in reported} == {"o by attempt 2"}
    assert record_of(store, _key(hanging)).attempts == 2


@pytest.mark.worker(concurrency=1)
def test_a_soft_time_limit_during_the_completion_waits_for_it(
    worker: Worker, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """The body has returned: Celery reports the limit, and the same call sent again is answered and has no effect."""
    ledger.open("go:1")
    with faults.losing(b"PutItem", b"COMPLETED") as cut:
        limited = tasks.charge.apply_async(("o", "go"), soft_time_limit=2)
        wait_until(lambda: cut.struck, "the completion is under way")
        wait_until(lambda: "Soft time limit" in worker.logs(), "the worker announces the limit")
        tries = cut.struck
        wait_until(lambda: cut.struck > tries + 1, "the limit has struck, before the second try from now on")
    with pytest.raises(SoftTimeLimitExceeded):
        limited.get(timeout=60)
    assert record_of(store, tasks.charge.idempotency_key_for("o", "go")).status is Status.COMPLETED
    assert tasks.charge.delay("o", "go").get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("effect")) == 1
