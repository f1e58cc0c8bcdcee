"""Bodies that no claim protects: their effects happen, under the keys of a delivery, and nothing is recorded."""

from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task

from celery_idempotent import AtMostOnce, IdempotentTask, Policy, PolicyError, StoreUnavailable, current_attempt
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Step
from celery_idempotent.testing import FakeStore
from tests.support.deliveries import an_app, deliver, published


@pytest.fixture
def app() -> Celery:
    app = an_app()
    app.conf.idempotency_store = FakeStore()
    return app


def _task(app: Celery, body: Any, **policy: Any) -> Task:
    """A task that does ``body(attempt)``."""

    @app.task(bind=True, base=IdempotentTask, shared=False, name=f"task-{uuid4()}", idempotent=Policy(**policy))
    def task(self: Any, order_id: str) -> Any:
        return body(current_attempt())

    return task


def test_step_is_made_with_the_key_of_a_delivery(app: Celery) -> None:
    """So a receiver that honours keys recognises it; every call makes it again, as a function does."""
    seen: list[Step] = []

    def charge(step: Step) -> int:
        seen.append(step)
        return len(seen)

    task = _task(app, lambda attempt: attempt.step("charge", charge))

    assert (task("o-1"), task("o-1")) == (1, 2)
    deliver(task, "o-1")

    assert len({each.key for each in seen}) == 1
    assert [each.fencing_token > 0 for each in seen] == [False, False, True]


def test_block_before_effects_is_a_block(app: Celery) -> None:
    """There is no claim to release; what is raised in it passes through."""

    def body(attempt: Any) -> str:
        with attempt.before_effects():
            return "checked"

    assert _task(app, body)("o-1") == "checked"


def test_step_at_most_once_is_made_all_the_same(app: Celery) -> None:
    """Nothing is recorded, so nothing is in doubt; a mistaken name is told as in a delivery."""
    once = {"text": AtMostOnce()}
    task = _task(app, lambda attempt: attempt.step("text", lambda step: "sent"), mode="off", effects=once)
    mistaken = _task(app, lambda attempt: attempt.step("", lambda step: "sent"))

    assert deliver(task, "o-1").value == "sent"
    assert app.conf.idempotency_store.records == []
    with pytest.raises(PolicyError, match="a step's name"):
        mistaken("o-1")


def test_fenced_step_fences_probes_and_acts(app: Celery) -> None:
    """In that order, with the smallest token of all."""
    calls: list[Any] = []

    def body(attempt: Any) -> Any:
        return attempt.fenced_step(
            "index",
            fence=lambda step: calls.append(step.fencing_token),
            probe=lambda step: calls.append("probe"),
            act=lambda step: "entry",
        )

    assert _task(app, body)("o-1") == "entry"
    assert calls == [0, "probe"]


def test_follow_up_is_published_under_the_id_of_a_delivery(app: Celery) -> None:
    """A duplicate of it is recognised, whoever published it."""

    @app.task(base=IdempotentTask, shared=False, name="receipt")
    def receipt(order_id: str) -> None: ...

    task = _task(app, lambda attempt: attempt.send("receipt", receipt, "o-1"))
    ids = [task("o-1"), deliver(task, "o-1").value]
    signed = _task(app, lambda attempt: attempt.send("receipt", receipt.s("o-2")))("o-1")

    messages = published(app)
    assert [message.headers["id"] for message in messages] == [*ids, signed]
    assert ids[0] == ids[1]
    assert [message.payload[0] for message in messages] == [["o-1"], ["o-1"], ["o-2"]]


@pytest.mark.parametrize("tool", ["commit", "transaction"])
def test_what_needs_a_record_is_refused(app: Celery, tool: str) -> None:
    """Effects without a record would not be exactly once; the message says how to tell where one is."""

    def body(attempt: Any) -> Any:
        return attempt.commit(1, []) if tool == "commit" else attempt.transaction()

    with pytest.raises(PolicyError, match=rf"{tool}=without a claim: .*attempt\.number is 0"):
        _task(app, body)("o-1")


def test_outage_that_is_run_through_is_unprotected_too(app: Celery) -> None:
    """Under on_outage='run' the step has its effect, and a commit is refused rather than made without a record."""
    task = _task(app, lambda attempt: attempt.step("charge", lambda step: "ch_1"), on_outage="run")
    committing = _task(app, lambda attempt: attempt.commit(1, []), on_outage="run")

    def down(record: Record) -> None:
        raise StoreUnavailable("store", "swap", "down")

    app.conf.idempotency_store.before_swap = down

    assert deliver(task, "o-1").value == "ch_1"
    assert isinstance(deliver(committing, "o-1").value, PolicyError)


def test_duplicate_that_is_observed_is_unprotected_too(app: Celery) -> None:
    """Under mode='observe' it runs, without a claim of its own; the first delivery has one, and commits."""
    task = _task(app, lambda attempt: attempt.commit(attempt.number, [{"Put": {}}]), mode="observe")

    assert deliver(task, "o-1").value == 1
    assert isinstance(deliver(task, "o-1").value, PolicyError)
    assert app.conf.idempotency_store.committed == [{"Put": {}}]
