"""``idempotency coming-from``: an app with tasks of celery-once and celery-singleton, and what it is told to write."""
# mypy: allow-untyped-decorators, allow-subclassing-any, allow-any-unimported

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.predecessors import settings_of, translations
from tests.support.commands import run
from tests.support.deliveries import an_app

KEPT = 'publish="once", retain=61'
TOLD_OF_ERRORS = "is raised no more: a duplicate's caller gets the first call's AsyncResult, so take the except out"
TOLD_OF_TICKS = (
    "beat sends it: with all arguments as the key each tick would be an operation of its own, so a key is named"
)
TOLD_OF_TIMES = (
    "leave it out, as a lease is renewed while the body runs; where messages wait in the queue for longer than 60 s, "
    "set lease and retain to more than that"
)


def body() -> None:
    """Of tasks that are only bound."""


class OwnBase(QueueOnce):
    """A base class, as many apps have one."""

    abstract = True


class ByClass(Singleton):
    """A task that is a class."""

    name = "by_class"
    unique_on = "order_id"

    def run(self, order_id: str) -> None: ...


def _app() -> Celery:
    app = an_app()
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": "redis://:secret@host/0"}}
    app.conf.singleton_backend_url = "redis://:secret@host/1"

    def add(body: Any, base: type, **options: Any) -> None:
        app.task(base=base, name=body.__name__, shared=False, **options)(body)

    def rebuild(index: str, why: str = "") -> None: ...
    def pairs(tenant: str, order_id: str) -> None: ...
    def nightly() -> None: ...
    def hourly(shop: str) -> None: ...
    def early(index: str) -> None: ...
    def mail(self: Any, user_id: str | None = None, text: str = "") -> None: ...
    def listed(user_id: str) -> None: ...
    def everything(index: str) -> None: ...
    def one_at_all(index: str) -> None: ...

    add(rebuild, QueueOnce, once={"keys": ["index"], "graceful": True, "timeout": 7200})
    add(pairs, QueueOnce, once={"keys": ["tenant", "order_id"], "graceful": True})
    add(nightly, QueueOnce)
    add(hourly, Singleton)
    add(early, QueueOnce, once={"graceful": True, "unlock_before_run": True})
    add(mail, Singleton, bind=True, unique_on="user_id", raise_on_duplicate=True, lock_expiry=5)
    add(listed, Singleton, unique_on=["user_id"])
    add(everything, OwnBase, once={"graceful": True})
    add(one_at_all, QueueOnce, once={"keys": [], "graceful": True})
    app.register_task(ByClass())
    app.conf.beat_schedule = {name: {"task": name, "schedule": 60} for name in ("nightly", "hourly")}
    return app


EXPECTED: dict[str, tuple[str, str | None, list[str]]] = {
    "by_class": (
        "base=ByClass, unique_on='order_id'",
        f'base=ByClass, idempotent=Policy(key="order_id", {KEPT})',
        ["ByClass is a class of yours: keep it, with IdempotentTask in the place of Singleton among its bases"],
    ),
    "early": (
        "base=QueueOnce, once={'graceful': True, 'unlock_before_run': True}",
        None,
        [
            "unlock_before_run=True: nothing like it; a call that comes while the body runs is to run after it, so it "
            "is another operation: give each call its own key, by an argument or idempotency_key="
        ],
    ),
    "everything": (
        "base=OwnBase, once={'graceful': True}",
        f"base=OwnBase, idempotent=Policy({KEPT})",
        ["OwnBase is a class of yours: keep it, with IdempotentTask in the place of QueueOnce among its bases"],
    ),
    "hourly": (
        "base=Singleton",
        f'base=IdempotentTask, idempotent=Policy(key="shop", {KEPT})',
        [TOLD_OF_TICKS],
    ),
    "listed": (
        "base=Singleton, unique_on=['user_id']",
        f'base=IdempotentTask, idempotent=Policy(key="user_id", {KEPT})',
        [],
    ),
    "mail": (
        "base=Singleton, unique_on='user_id', lock_expiry=5, raise_on_duplicate=True",
        f'base=IdempotentTask, idempotent=Policy(key="user_id", fingerprint=None, {KEPT})',
        [
            f"DuplicateTaskError {TOLD_OF_ERRORS}",
            f"lock_expiry=5: {TOLD_OF_TIMES}",
            "user_id may be None, which is KeyMissing here: write not_null(user_id, '') in its place",
        ],
    ),
    "nightly": (
        "base=QueueOnce",
        f'base=IdempotentTask, idempotent=Policy(key=lambda: "one", {KEPT})',
        [
            f"AlreadyQueued {TOLD_OF_ERRORS}",
            TOLD_OF_TICKS,
        ],
    ),
    "one_at_all": (
        "base=QueueOnce, once={'keys': [], 'graceful': True}",
        f'base=IdempotentTask, idempotent=Policy(key=lambda *_, **__: "one", fingerprint=None, {KEPT})',
        [],
    ),
    "pairs": (
        "base=QueueOnce, once={'keys': ['tenant', 'order_id'], 'graceful': True}",
        f'base=IdempotentTask, idempotent=Policy(key=("tenant", "order_id"), {KEPT})',
        [],
    ),
    "rebuild": (
        "base=QueueOnce, once={'keys': ['index'], 'graceful': True, 'timeout': 7200}",
        f'base=IdempotentTask, idempotent=Policy(key="index", fingerprint=None, {KEPT})',
        [f"timeout=7200: {TOLD_OF_TIMES}"],
    ),
}


@pytest.fixture(scope="module")
def app() -> Celery:
    """An app with every option of theirs."""
    return _app()


def test_every_task_of_theirs_has_its_line(app: Celery) -> None:
    """Its options as ours, and what has no counterpart by name; no task of Celery's own."""
    told = json.loads(run(app, "coming-from", "--json").output)["tasks"]

    assert {each["task"]: (each["before"], each["after"], each["notes"]) for each in told} == EXPECTED
    assert {each["library"] for each in told} == {"celery-once", "celery-singleton"}
    assert {each["place"].rpartition(":")[0] for each in told} == {str(Path(__file__))}


@pytest.mark.parametrize("task", [name for name, (_, after, _) in EXPECTED.items() if after])
def test_line_can_be_written_as_it_stands(app: Celery, task: str) -> None:
    """A task with the same body and this line is bound, and a call of it has a key; bases of the author's as told."""
    bases = {name: type(name, (IdempotentTask,), {"abstract": True}) for name in ("OwnBase", "ByClass")}
    names = {"IdempotentTask": IdempotentTask, "Policy": Policy, **bases}
    options = eval(f"dict({EXPECTED[task][1]})", names)

    moved = an_app().task(name=task, shared=False, bind=task == "mail", **options)(_body(app, task))

    arguments = ("a", "b") if task == "pairs" else () if task == "nightly" else ("a",)
    assert moved.idempotency_key_for(*arguments).startswith(f"{task}:1:")


def _body(app: Celery, task: str) -> Any:
    run = app.tasks[task].run
    return getattr(run, "__func__", run) if task == "mail" else run


def test_settings_are_told_by_name_alone(app: Celery) -> None:
    """Their URLs can hold a password."""
    bare = an_app(idempotency_store=None, task_acks_late=False)
    bare.conf.ONCE = app.conf.ONCE
    bare.task(base=QueueOnce, name="t", shared=False)(body)

    told = run(bare, "coming-from").output
    both = json.loads(run(app, "coming-from", "--json").output)["settings"]

    assert told.endswith('settings\n-  ONCE\n+  idempotency_store = "redis://..."\n+  task_acks_late = True\n')
    assert both == {"before": ["ONCE", "singleton_backend_url"], "after": []}
    assert "secret" not in told + json.dumps(both) + run(app, "coming-from").output


def test_people_read_a_diff(app: Celery) -> None:
    """Each task with what goes, what comes, and below it what to know; where only a person can tell, nothing comes."""
    told = run(app, "coming-from").output

    before, after, (note, *_) = EXPECTED["rebuild"]
    assert f"-  {before}\n+  {after}\n   ! {note}\n" in told
    assert f"-  {EXPECTED['early'][0]}\n   ! unlock_before_run=True" in told
    assert f"rebuild  ({__file__}:" in told


def test_app_without_such_tasks_is_told_so() -> None:
    """No empty answer, which could mean anything."""
    app = an_app()
    app.task(base=IdempotentTask, name="t", shared=False, idempotent=Policy())(body)

    assert run(app, "coming-from").output == "No task has a base of celery-once or celery-singleton.\n"
    assert json.loads(run(app, "coming-from", "--json").output)["tasks"] == []


def test_settings_of_the_app_count_where_a_task_says_nothing() -> None:
    """celery-singleton has them for all tasks, in small letters or large."""
    app = an_app(singleton_raise_on_duplicate=True, singleton_lock_expiry=5, SINGLETON_KEY_PREFIX="shop")
    app.task(base=Singleton, name="plain", shared=False)(body)

    (plain,) = translations(app)

    assert plain.notes == (f"DuplicateTaskError {TOLD_OF_ERRORS}", f"lock_expiry=5: {TOLD_OF_TIMES}")
    gone, _ = settings_of(app, ["celery-singleton"])
    assert gone == ["SINGLETON_KEY_PREFIX", "singleton_lock_expiry", "singleton_raise_on_duplicate"]


def test_task_that_beat_sends_keeps_the_key_that_it_has() -> None:
    """Only where none is named would each tick be an operation of its own."""
    app = an_app(beat_schedule={"nightly": {"task": "report", "schedule": 60}})

    @app.task(base=QueueOnce, name="report", shared=False, once={"keys": ["shop"], "graceful": True})
    def report(shop: str, day: str = "") -> None: ...

    (told,) = translations(app)

    assert told.after == f'base=IdempotentTask, idempotent=Policy(key="shop", fingerprint=None, {KEPT})'
    assert told.notes == ()
