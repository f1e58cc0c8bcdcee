"""``check`` as the gate of a deploy: everything that a worker needs, what each task promises, and when it fails."""
# mypy: allow-untyped-decorators

import threading
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotencyWarning, IdempotentTask, Keyed, Policy, PolicyError, StoreUnavailable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from tests.support.commands import run, told
from tests.support.deliveries import an_app
from tests.support.objects import REFUSED, large_results

pytestmark = pytest.mark.filterwarnings("default")


class Unanswering(StoreWrapper):
    def verify(self) -> None:
        raise StoreUnavailable("s", "PutItem", "timed out")


POLICY = Policy(
    key=("order", "cents"),
    fingerprint=lambda order, cents: order,
    remember=(KeyError,),
    retain=timedelta(days=2),
    effects=MappingProxyType({"charge": Keyed()}),
)


@pytest.fixture
def app() -> Celery:
    app = an_app(worker_pool="solo")

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=POLICY)
    def charge(order: str, cents: int) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="shop.mail", idempotent=Policy(mode="off"))
    def mail() -> None: ...

    @app.task(shared=False, name="shop.report")
    def report() -> None: ...

    return app


def _problems(app: Celery, level: str) -> list[str]:
    """What a strict check finds, all of this level; it fails where there is anything."""
    problems = told(app, "check", "--strict")["problems"]
    assert run(app, "check", "--strict").exit_code == bool(problems)
    return [str(each["text"]) for each in problems if each["level"] == level]


def test_every_task_is_told_with_what_it_promises(app: Celery) -> None:
    """For people and for programs, without Celery's own; what is not protected says so."""
    lines = run(app, "check").stdout.splitlines()
    found = told(app, "check", "--strict")

    assert lines[:2] == ["memory:// answers and can be used", "memory://localhost// answers"]
    tasks = {each["name"]: each for each in found["tasks"]}
    assert [name for name in tasks if name.startswith("celery.")] == []
    for name, start in (("charge", "protected"), ("mail", "NOT protected"), ("report", "NOT protected")):
        assert [each for each in lines if each.startswith(f"{start}: shop.{name}: ")] != []
        assert tasks[f"shop.{name}"]["protected"] is (name == "charge")
    assert "  charge: exactly once, as long as the receiver honours the step's key" in lines
    assert (found["store"], found["problems"], tasks["shop.report"]["policy"]) == ("memory://", [], None)
    assert tasks["shop.charge"]["guarantee"] == app.tasks["shop.charge"].guarantee()
    policy = tasks["shop.charge"]["policy"]
    assert policy.pop("fingerprint").endswith("<lambda>")
    known = {"key": ["order", "cents"], "remember": ["KeyError"], "retain": 172_800}
    assert policy == {**policy, **known, "effects": {"charge": "Keyed(window=None, on_takeover='rerun')"}}


def test_warning_fails_a_strict_check_alone(app: Celery) -> None:
    """Of a task, with its name, or of a setting; once each, also what Python has shown before this command began."""

    @app.task(base=IdempotentTask, shared=False, name="shop.late", acks_late=False)
    def late() -> None: ...

    with pytest.warns(IdempotencyWarning, match="acks_late is off"):
        app.finalize()
    app.conf.worker_pool = "prefork"  # processes, each with a memory of its own
    assert run(app, "check").exit_code == 0

    for _ in range(2):
        of_task, of_store = sorted(_problems(app, "warning"), reverse=True)
    (warned,) = [each["warnings"] for each in told(app, "check")["tasks"] if each["name"] == "shop.late"]
    assert [of_task] == [f"shop.late: {each}" for each in warned]
    assert of_store.startswith("idempotency_store=memory://: every process")


def test_broker_is_shown_without_its_password(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it cannot be reached, in the transport's words."""
    app.conf.broker_url, shown = "redis://:s3cr3t@redis/0", "redis://:**@redis:6379/0"
    monkeypatch.setattr("kombu.Connection.connect", lambda self: None)
    assert told(app, "check")["broker"] == shown
    monkeypatch.setattr("kombu.Connection.connect", Mock(side_effect=OperationalError("refused\n\x1b[31m")))
    reason = f"the broker {shown} cannot be used: OperationalError: refused\\n\\x1b[31m"
    assert _problems(app, "error") == [reason]
    assert run(app, "check").stderr.endswith(f"Error: {reason}\n")


def test_silent_broker_is_waited_for_no_longer_than_told(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the transport's own patience is."""
    hangs = threading.Event()
    monkeypatch.setattr("kombu.Connection.connect", lambda self: hangs.wait())
    failed = run(app, "check", "--timeout", "0.01")
    hangs.set()
    assert (failed.exit_code, "no answer within 0.01 s" in failed.stderr) == (1, True)


REFUSED_TASK = Mock(side_effect=PolicyError("idempotent", "7", "must be a Policy"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda app: app.conf.update(idempotency_store=Unanswering(MemoryStore())), "timed out"),
        (lambda app: app.conf.update(idempotency_store=None), "set it to a store or its URL"),
        (lambda app: app.conf.update(idempotency_policy="refuse"), "must be a Policy"),
        (lambda app: app.conf.update(idempotency_policy=Policy(key="no_such")), "no_such"),
        (lambda app: app.conf.update(idempotency_large_results=large_results(*[REFUSED] * 9)), "AccessDenied"),
        (lambda app: setattr(app.loader, "import_default_modules", REFUSED_TASK), "idempotent=7: must be a Policy"),
    ],
    ids=["store", "no store", "policy", "key", "place for results", "import"],
)
def test_error_is_a_problem_for_programs(app: Celery, spoil: Callable[[Celery], Any], reason: str) -> None:
    """Whatever it is, there is JSON, and each is told once."""

    @app.task(base=IdempotentTask, shared=False, name="shop.default")
    def default(order: str) -> None: ...

    spoil(app)

    (problem,) = _problems(app, "error")
    assert reason in problem
