"""A person's verdict in Python, on a task whose step is in doubt."""

from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import (
    AtMostOnce,
    IdempotentTask,
    Keyed,
    OutcomeUnknown,
    Policy,
    PolicyError,
    Status,
    current_attempt,
    resolve,
)
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.verdicts import Action
from tests.support.deliveries import an_app
from tests.support.judging import judge


class _Phone:
    """Sends texts, and does not always say so."""

    def __init__(self) -> None:
        self.texts = 0
        self.answers = False

    def send(self, step: Step) -> str:
        self.texts += 1
        if not self.answers:
            raise TimeoutError
        return f"text {self.texts}"


IN_DOUBT = Policy(effects={"charge": Keyed(), "sms": AtMostOnce()})


@pytest.fixture
def app() -> Celery:
    return an_app()


@pytest.fixture
def phone() -> _Phone:
    return _Phone()


@pytest.fixture
def in_doubt(app: Celery, phone: _Phone) -> Any:
    """A task with a finished step, and one that began and did not end."""

    @app.task(bind=True, base=IdempotentTask, name="notify", shared=False, idempotent=IN_DOUBT)
    def notify(self: Any, order: str) -> list[str]:
        paid = current_attempt().step("charge", lambda step: "paid")
        return [paid, current_attempt().step("sms", phone.send)]

    with pytest.raises(TimeoutError):
        notify.apply(("o-1",), throw=True)
    with pytest.raises(OutcomeUnknown):
        notify.apply(("o-1",), throw=True)
    phone.answers = True
    return notify


def test_verdict_that_it_did_not_happen_runs_what_is_left(app: Celery, phone: _Phone, in_doubt: Any) -> None:
    """Finished steps stay finished, the one in doubt is called."""
    record = resolve(in_doubt.idempotency_key_for("o-1"), rerun=True, app=app)

    assert record.status is Status.RELEASED
    assert set(record.steps) == {"charge"}
    assert in_doubt.apply(("o-1",)).get() == ["paid", "text 2"]


def test_verdict_that_it_happened_is_the_outcome(app: Celery, phone: _Phone, in_doubt: Any) -> None:
    """Every later delivery is answered with it, and nothing is called."""
    assert resolve(in_doubt.idempotency_key_for("o-1"), completed=None, app=app).status is Status.COMPLETED

    assert in_doubt.apply(("o-1",)).get() is None
    assert phone.texts == 1


def test_release_leaves_a_begun_step_in_doubt(app: Celery, phone: _Phone, in_doubt: Any) -> None:
    """To give a claim back says nothing about a step: the next delivery asks for a verdict."""
    store, key = runtime_of(app).store, in_doubt.idempotency_key_for("o-1")
    unknown = store.get(key)
    assert unknown is not None
    left_behind = replace(unknown, status=Status.IN_PROGRESS, revision="left behind", lease_until=0)
    store.swap(left_behind, unknown.revision)

    released = judge(store, key, Action.RELEASE, grace=0)

    assert "sms" in released.steps
    with pytest.raises(OutcomeUnknown):
        in_doubt.apply(("o-1",), throw=True)
    assert phone.texts == 1


@pytest.mark.parametrize("verdict", [{}, {"completed": 1, "rerun": True}])
def test_verdict_must_be_one(app: Celery, in_doubt: Any, verdict: dict[str, Any]) -> None:
    """Neither none nor two."""
    with pytest.raises(PolicyError, match="either completed=<its result> or rerun=True"):
        resolve(in_doubt.idempotency_key_for("o-1"), app=app, **verdict)


def test_verdict_uses_the_current_app(app: Celery, in_doubt: Any) -> None:
    """In a shell of the project there is one."""
    app.set_current()

    assert resolve(in_doubt.idempotency_key_for("o-1"), rerun=True).status is Status.RELEASED


def test_guarantee_of_a_task_tells_its_name(in_doubt: Any) -> None:
    """What task.guarantee() says is the policy's, for this task."""
    assert in_doubt.guarantee() == IN_DOUBT.guarantee("notify")
    assert in_doubt.guarantee().startswith("notify: ")
