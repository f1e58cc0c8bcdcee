"""``check`` as the gate of a deploy: everything that a worker needs, what each task promises, and when it fails."""
# mypy: allow-untyped-decorators

import json
import threading
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest
from celery import Celery
from click.testing import Result
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotencyWarning, IdempotentTask, Keyed, Policy, PolicyError, StoreUnavailable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from tests.support import commands
from tests.support.deliveries import an_app
from tests.support.links import unlinked
from tests.support.objects import REFUSED, large_results

pytestmark = pytest.mark.filterwarnings("default")


class Unanswering(StoreWrapper):
    """Cannot be reached."""

    def verify(self) -> None:
        raise StoreUnavailable("s", "PutItem", "timed out")


@pytest.fixture
def app() -> Celery:
    app = an_app(worker_pool="solo")

    @app.task(
        base=IdempotentTask,
        shared=False,
        name="shop.charge",
        idempotent=Policy(
            key=("order", "cents"),
            fingerprint=lambda order, cents: order,
            remember=(KeyError,),
            retain=timedelta(days=2),
            effects=MappingProxyType({"charge": Keyed()}),
        ),
    )
    def charge(order: str, cents: int) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="shop.mail", idempotent=Policy(mode="off"))
    def mail() -> None: ...

    @app.task(shared=False, name="shop.report")
    def report() -> None: ...

    return app


def run(app: Celery, *arguments: str) -> Result:
    return commands.run(app, "check", *arguments)


def checked(app: Celery, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = run(app, "--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


def _late(app: Celery) -> None:
    @app.task(base=IdempotentTask, shared=False, name="shop.late", acks_late=False)
    def late() -> None: ...


def test_every_task_is_told_with_what_it_promises(app: Celery) -> None:
    """For people and for programs, without Celery's own; what is not protected says so."""
    lines = run(app).stdout.splitlines()
    assert lines[:2] == ["memory:// answers and can be used", "memory://localhost// answers"]
    assert (
        "protected: shop.charge: calls with the same idempotency key are one operation; an outcome counts for 2 days"
        in lines
    )
    assert any(line.startswith("  key: ") for line in lines)
    assert "  charge: exactly once, as long as the receiver honours the step's key" in lines
    assert "NOT protected: shop.mail: nothing is promised; every delivery runs" in lines
    assert "NOT protected: shop.report: nothing is promised: it is not an IdempotentTask" in lines
    assert not [line for line in lines if "celery." in line and "pytest" not in line]

    code, found = checked(app, "--strict")
    tasks = {each["name"]: each for each in found["tasks"]}
    assert (code, found["store"], found["problems"]) == (0, "memory://", [])
    assert {name: each["protected"] for name, each in tasks.items() if name.startswith("shop.")} == {
        "shop.charge": True,
        "shop.mail": False,
        "shop.report": False,
    }
    policy = tasks["shop.charge"]["policy"]
    assert policy["key"] == ["order", "cents"]
    assert policy["fingerprint"].endswith("<lambda>")
    assert policy["remember"] == ["KeyError"]
    assert policy["retain"] == 172_800
    assert policy["effects"] == {"charge": "Keyed(window=None, on_takeover='rerun')"}
    assert tasks["shop.charge"]["guarantee"] == app.tasks["shop.charge"].guarantee()
    assert (tasks["shop.report"]["policy"], tasks["shop.report"]["warnings"]) == (None, [])


def test_warning_fails_a_strict_check_alone(app: Celery) -> None:
    """Of a task, with its name, or of a setting; each is told once."""
    _late(app)
    app.conf.worker_pool = "prefork"  # processes, each with a memory of its own

    assert run(app).exit_code == 0
    assert run(app, "--strict").exit_code == 1
    code, found = checked(app, "--strict")

    assert code == 1
    assert [each["level"] for each in found["problems"]] == ["warning", "warning"]
    of_task, of_store = sorted((each["text"] for each in found["problems"]), reverse=True)
    (late,) = [each for each in found["tasks"] if each["name"] == "shop.late"]
    assert [f"shop.late: {each}" for each in late["warnings"]] == [of_task]
    assert of_store.startswith("idempotency_store=memory://: every process")


def test_what_python_has_shown_before_is_told_again(app: Celery) -> None:
    """Tasks may be bound, and warn, before this command begins."""
    _late(app)
    with pytest.warns(IdempotencyWarning, match="acks_late is off"):
        app.finalize()
    assert checked(app, "--strict")[0] == 1
    assert checked(app, "--strict")[0] == 1


def test_broker_that_cannot_be_reached_is_an_error(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the transport's words, without its password."""
    app.conf.broker_url = "redis://:s3cr3t@127.0.0.1:1/0"

    def fail(connection: Any) -> None:
        raise OperationalError("Connection refused\n\x1b[31m")

    monkeypatch.setattr("kombu.Connection.connect", fail)
    failed = run(app)

    assert failed.exit_code == 1
    assert failed.stderr == (
        "Error: the broker redis://:**@127.0.0.1:1/0 cannot be used: OperationalError: Connection refused\\n\\x1b[31m\n"
    )
    assert "s3cr3t" not in failed.output
    code, found = checked(app)
    assert (code, [each["level"] for each in found["problems"]]) == (1, ["error"])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://rabbit//", "amqp://guest@rabbit:5672//"),
        ("amqp://shop@rabbit//", "amqp://shop@rabbit:5672//"),
        ("redis://redis/0", "redis://redis:6379/0"),
    ],
)
def test_broker_without_a_password_is_shown_without_one(
    app: Celery, monkeypatch: pytest.MonkeyPatch, url: str, shown: str
) -> None:
    """The user and the host stay apart."""
    app.conf.broker_url = url
    monkeypatch.setattr("kombu.Connection.connect", lambda self: None)
    assert checked(app)[1]["broker"] == shown


def test_broker_that_does_not_answer_is_waited_for_no_longer_than_told(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the transport's own patience is."""
    hangs = threading.Event()
    monkeypatch.setattr("kombu.Connection.connect", lambda self: hangs.wait())
    try:
        failed = run(app, "--timeout", "0.01")
    finally:
        hangs.set()

    assert failed.exit_code == 1
    assert failed.stderr == "Error: the broker memory://localhost// cannot be used: no answer within 0.01 s\n"


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("idempotency_store", Unanswering(MemoryStore()), "timed out"),
        ("idempotency_store", None, "set it to a store or its URL"),
        ("idempotency_policy", "refuse", "must be a Policy"),
        ("idempotency_policy", Policy(key="no_such"), "no_such"),
    ],
)
def test_error_is_a_problem_for_programs(app: Celery, setting: str, value: Any, told: str) -> None:
    """Whatever it is, there is JSON, and each is told once."""

    @app.task(base=IdempotentTask, shared=False, name="shop.default")
    def default(order: str) -> None: ...

    app.conf[setting] = value

    code, found = checked(app)

    assert code == 1
    (problem,) = found["problems"]
    assert problem["level"] == "error"
    assert told in problem["text"]


def test_app_that_cannot_be_imported_is_a_problem(app: Celery) -> None:
    """Its own modules declare tasks, and one that is refused ends the import."""

    def fail() -> None:
        raise PolicyError("idempotent", "7", "must be a Policy")

    app.loader.import_default_modules = fail
    code, found = checked(app)
    assert code == 1
    assert unlinked(str(found["problems"])) == "[{'level': 'error', 'text': 'idempotent=7: must be a Policy'}]"


def test_place_for_large_results_is_checked_and_named(app: Celery) -> None:
    """As the store is; without its login."""
    app.conf.idempotency_large_results = large_results(over=500)
    assert "takes results of more than 500 bytes" in run(app).stdout


def test_place_for_large_results_that_cannot_be_used_is_an_error(app: Celery) -> None:
    """As at the start of a worker."""
    app.conf.idempotency_large_results = large_results(REFUSED)
    ended = run(app)
    assert ended.exit_code == 1
    assert "AccessDenied" in ended.stderr
