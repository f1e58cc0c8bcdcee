"""Settings, stores by URL, the check at worker start, and the command line."""

import gc
import json
import logging
import re
import threading
import time
import warnings
import weakref
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner, Result

from celery_idempotent import (
    IdempotencyWarning,
    IdempotentTask,
    Policy,
    PolicyError,
    Status,
    StoreMisconfigured,
    StoreUnavailable,
    idempotent,
    open_store,
)
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.operating.worker import StoreCheck
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app, deliver
from tests.support.judging import judge


class _Checked(FaultyStore):
    """A store in memory that other processes could see, and that says what is wrong with it."""

    def __init__(self, error: StoreUnavailable | None = None) -> None:
        super().__init__(MemoryStore())
        self.error = error

    def verify(self) -> None:
        if self.error:
            raise self.error


def test_store_is_opened_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stores in memory neither would know what the other has run."""
    app, opened = _with("memory://"), []
    arrived = threading.Barrier(4)

    class Crowded:
        """A lock that nobody gets before everybody wants it."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            arrived.wait(10)
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    runtime = runtime_of(app)
    monkeypatch.setattr(runtime, "_opening", Crowded())
    threads = [threading.Thread(target=lambda: opened.append(runtime.store)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(opened) == 4
    assert len({id(each) for each in opened}) == 1


def test_store_setting_is_a_url_or_a_store() -> None:
    """Both are taken, a URL is opened once, and a changed setting is seen."""
    store = MemoryStore()
    assert runtime_of(_with(store)).store is store

    app = _with("memory://")
    opened = runtime_of(app).store
    assert isinstance(opened, MemoryStore)
    assert runtime_of(app).store is opened
    app.conf.idempotency_store = store
    assert runtime_of(app).store is store


class Computed:
    """Settings whose values are made at each access, as by properties or pydantic-settings."""

    broker_url = "memory://"
    task_acks_late = task_reject_on_worker_lost = True
    made = staticmethod(lambda: "".join(("mem", "ory://")))

    @property
    def idempotency_store(self) -> Any:
        return self.made()

    @property
    def idempotency_policy(self) -> Policy:
        return Policy("order")


class Equal(MemoryStore):
    """A store that is its table."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("made", [Computed.made, Equal])
def test_store_that_a_computed_setting_names_again_is_the_same(made: Any) -> None:
    """Each delivery would open one of its own; in memory, each duplicate would run."""
    app, settings, runs = Celery("computed", set_as_current=False), Computed(), []
    settings.made = made
    app.config_from_object(settings)

    @app.task(base=IdempotentTask, shared=False)
    def charge(order: str) -> int:
        runs.append(order)
        return len(runs)

    assert settings.idempotency_store is not settings.idempotency_store
    assert [deliver(charge, "o-1").value for _ in range(3)] == [1, 1, 1]
    assert runtime_of(app).store is runtime_of(app).store


def test_outcomes_from_before_another_serializer_are_read() -> None:
    """JSON is safe to decode, and nothing else that a message may be."""
    app = an_app(result_serializer="yaml", accept_content=["json", "yaml", "pickle"])

    assert runtime_of(app).codec.accept == {"application/json", "application/x-yaml"}


@pytest.mark.parametrize("made", [MemoryStore, lambda: f"memory://s3cr3t{time.monotonic_ns()}"])
def test_store_that_is_another_at_each_access_is_refused(made: Any) -> None:
    """Nothing would be found that another delivery has recorded."""
    app, settings = Celery("computed", set_as_current=False), Computed()
    settings.made = made
    app.config_from_object(settings)

    with pytest.raises(PolicyError, match="idempotency_store=.*: it is another at each access") as refused:
        _ = runtime_of(app).store
    assert "s3cr3t" not in str(refused.value)


def test_store_that_is_replaced_is_closed_by_whoever_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to it would stay open; yours is yours."""
    closed: list[MemoryStore] = []
    monkeypatch.setattr(MemoryStore, "close", lambda self: closed.append(self))
    app = _with("memory://")
    opened, given = runtime_of(app).store, MemoryStore()

    app.conf.idempotency_store = given
    assert runtime_of(app).store is given
    assert closed == [opened]
    app.conf.idempotency_store = "memory://other"
    assert runtime_of(app).store is not given
    assert closed == [opened]


def _with(store: Any) -> Celery:
    app = an_app()
    app.conf.idempotency_store = store
    return app


def test_store_setting_works_under_a_namespace() -> None:
    """Django projects keep their settings under CELERY_."""
    app = Celery("named", set_as_current=False)
    app.config_from_object({"CELERY_IDEMPOTENCY_STORE": "memory://"}, namespace="CELERY")

    assert isinstance(runtime_of(app).store, MemoryStore)


def test_missing_store_names_the_setting() -> None:
    """Without a store the error says which setting to set, and to what."""
    app = _with(None)

    with pytest.raises(PolicyError, match=r"idempotency_store.*dynamodb://@eu-west-1"):
        _ = runtime_of(app).store


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("nosuch://x", "dynamodb, .*memory, .*redis"),
        ("table", "no store has this scheme"),
        ("postgres://h/d", "the scheme is called postgresql: write postgresql://"),
        ("postgres+psycopg://h/d", "the scheme is called postgresql: write postgresql://"),
        ("rediss:/localhost", "behind the scheme a URL has ://, so write rediss://..."),
    ],
)
def test_unknown_scheme_lists_the_known_ones(url: str, remedy: str) -> None:
    """A typo in the scheme is answered with what there is."""
    with pytest.raises(PolicyError, match=remedy):
        open_store(url)


@pytest.mark.parametrize("given", [3, {"URL": "memory://"}, b"memory://", Path("keys.sqlite"), MemoryStore], ids=repr)
def test_what_is_no_store_is_refused_before_a_task_runs(given: Any) -> None:
    """A driver's client, a path or a class: a worker would start with it, and every task fail."""
    app = Celery(set_as_current=False)
    app.conf.idempotency_store = given

    for opened in (
        lambda: runtime_of(app).store,
        lambda: idempotent(Policy("n"), store=given, name="n")(lambda n: n)(1),
    ):
        with pytest.raises(PolicyError, match=f"{type(given).__name__}: is not a store; write a URL"):
            opened()


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3 the error is the command that installs it."""
    import sys

    monkeypatch.setitem(sys.modules, "boto3", None)
    for module in ("celery_idempotent.stores.dynamodb", "celery_idempotent.stores.dynamodb.store"):
        monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(PolicyError, match=r'pip install "celery-idempotent\[dynamodb\]"'):
        open_store("dynamodb://@eu-west-1/t")


def test_third_party_registers_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point makes a store of somebody else's known by its scheme."""
    monkeypatch.setattr(
        "celery_idempotent.stores.entry_points",
        lambda group: [EntryPoint("mine", "celery_idempotent.stores.memory:MemoryStore.from_url", group)],
    )

    assert isinstance(open_store("mine://anything"), MemoryStore)


def test_serializer_that_could_not_be_read_back_is_refused() -> None:
    """Results in a format the app does not accept could never be replayed."""
    app = an_app(result_serializer="pickle")

    with pytest.raises(PolicyError, match="accept_content"):
        _ = runtime_of(app).codec
    app = an_app(result_serializer="pickle", accept_content=["json", "pickle"])
    assert runtime_of(app).codec.serializer == "pickle"


def test_runtime_does_not_keep_its_app_alive() -> None:
    """Apps of tests and scripts are collected with their runtime."""
    app = Celery("short-lived", set_as_current=False)
    runtime_of(app)
    gone = weakref.ref(app)
    app.close()
    from celery import _state

    _state._apps.discard(app)
    del app
    gc.collect()

    assert gone() is None or gone() not in gc.get_referrers(gone())


class _Worker:
    def __init__(self, app: Celery, pool: str = "celery.concurrency.prefork") -> None:
        self.app = app
        self.pool_cls = type("TaskPool", (), {"__module__": pool})


def _start(store: Any, pool: str = "celery.concurrency.prefork") -> None:
    StoreCheck(None).create(_Worker(_with(store), pool))


def test_worker_with_a_working_store_starts() -> None:
    """The check passes in silence."""
    _start(_Checked())


@pytest.mark.parametrize("store", [_Checked(StoreMisconfigured("s", "PutItem", "run: provision")), None, "nosuch://x"])
def test_worker_with_a_store_that_cannot_work_does_not_start(store: Any) -> None:
    """A missing table, permission or setting stops the worker with a readable message."""
    with pytest.raises(click.ClickException, match="celery-idempotent: "):
        _start(store)


@pytest.mark.parametrize("store", [_Checked(), _Checked(StoreUnavailable("s", "PutItem", "timed out"))])
def test_worker_says_what_it_protects(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One line: its store, its tasks that are protected, and those that are not; without Celery's own."""
    app = _with(store)

    def body() -> None: ...

    for name, options in (
        ("orders.charge", {"base": IdempotentTask}),
        ("orders.watch", {"base": IdempotentTask, "idempotent": Policy(mode="observe")}),
        ("orders.report", {}),
    ):
        app.task(name=name, shared=False, **options)(body)
    caplog.set_level(logging.INFO, "celery_idempotent")

    StoreCheck(None).create(_Worker(app))

    (line,) = [each for each in caplog.records if each.getMessage().startswith("event=idempotency.started ")]
    assert line.levelno == logging.INFO
    told, unprotected = line.getMessage().split(" unprotected=")
    assert told == f'event=idempotency.started store="{one_line(store)}" protected=orders.charge'
    # Plugins of pytest have shared tasks, which every app gets.
    assert {"orders.report", "orders.watch"} == {each for each in unprotected.split(",") if "pytest" not in each}


def test_worker_starts_during_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """A store that may be back in a minute does not keep the worker from starting; its tasks are postponed."""
    _start(_Checked(StoreUnavailable("s", "PutItem", "timed out")))

    assert "idempotency.store_unavailable" in caplog.text


def test_memory_store_under_several_processes_is_warned_about() -> None:
    """Pool processes do not share memory; threads and solo do."""
    with pytest.warns(IdempotencyWarning, match="memory of its own"):
        _start("memory://")
    _start("memory://", "celery.concurrency.thread")
    _start("memory://", "celery.concurrency.solo")


def test_binding_a_task_puts_the_check_into_the_worker() -> None:
    """An app with an idempotent task checks its store; one without does not."""
    app = an_app()
    assert StoreCheck not in app.steps["worker"]

    @app.task(base=IdempotentTask, shared=False, lazy=False)
    def charge() -> None: ...

    assert StoreCheck in app.steps["worker"]


# The command line: the real `celery` command in this process, on an app with a store in memory.


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="orders.charge", idempotent=Policy(key="order_id"))
    def charge(order_id: int) -> str:
        return f"charged {order_id}"

    app.finalize()
    return app


@pytest.fixture
def command(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("celery.bin.celery.find_app", lambda *args, **kwargs: app)

    def run(*arguments: str, answer: str = "") -> Result:
        return CliRunner().invoke(celery_command, ["-A", "x", "idempotency", *arguments], input=answer)

    return run


def _unknown(app: Celery) -> str:
    from dataclasses import replace

    record = replace(a_record(), status=Status.UNKNOWN, error="killed")
    app.conf.idempotency_store.swap(record, None)
    return record.key


def test_commands_have_help(command: Any) -> None:
    """Every command says what it does."""
    overview = command("--help").output
    for name in ("provision", "check", "key", "show", "list", "resolve"):
        assert name in overview
        assert command(name, "--help").exit_code == 0


def test_provision_and_check(command: Any, app: Celery) -> None:
    """Both name the store, and a store that cannot work is a readable error."""
    assert "memory:// is ready" in command("provision").output
    app.conf.worker_pool = "solo"
    assert "can be used" in command("check").output

    app.conf.idempotency_store = _Checked()
    assert command("check").exit_code == 0
    app.conf.idempotency_store = _Checked(StoreMisconfigured("s", "PutItem", "no table"))
    failed = command("check")
    assert (failed.exit_code, "no table" in failed.output, "Traceback" in failed.output) == (1, True, False)


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("idempotency_store", None, "idempotency_store=None: set it to a store or its URL"),
        ("idempotency_policy", "refuse", "idempotency_policy='refuse': must be a Policy"),
        ("idempotency_namespace", "a:b", "idempotency_namespace='a:b': must be 1 to 64 letters"),
        ("idempotency_grace", -0.1, "idempotency_grace=-0.1: must be seconds that a takeover waits after a lease"),
        ("idempotency_relay", "often", "idempotency_relay='often': must be seconds between two looks"),
        ("idempotency_purge", "often", "idempotency_purge='often': must be seconds between two purges"),
        ("idempotency_purge_released", -1, "idempotency_purge_released=-1: must be seconds for which they stay"),
        (
            "idempotency_keep_verdicts",
            "a year",
            "idempotency_keep_verdicts='a year': must be seconds for which",
        ),
        ("idempotency_hold_messages", "some", "idempotency_hold_messages='some': must be True, False"),
        ("result_serializer", "pickle", "outcomes in it could never be replayed"),
        ("idempotency_store", _Checked(StoreMisconfigured("s", "PutItem", "no table")), "no table"),
        ("idempotency_store", _Checked(StoreUnavailable("s", "PutItem", "timed out")), "timed out"),
    ],
)
def test_check_fails_where_a_worker_could_not_work(
    command: Any, app: Celery, setting: str, value: Any, told: str
) -> None:
    """It checks what a worker checks when it starts, and says it in one line; an outage is an error, too."""
    app.conf.idempotency_store = _Checked()
    app.conf[setting] = value

    failed = command("check")

    assert failed.exit_code == 1
    assert re.fullmatch(f"Error: .*{re.escape(told)}.*\n", failed.output)


def test_check_fails_where_a_task_cannot_be_bound(command: Any, app: Celery) -> None:
    """A worker binds its tasks when it starts, and does not start where it cannot."""
    other = an_app()
    other.conf.idempotency_store = _Checked()

    @other.task(base=IdempotentTask, shared=False, idempotent=Policy(key="oder_id"))
    def charge(order_id: int) -> None: ...

    def late(*modules: Any) -> None:
        raise PolicyError("idempotent", "7", "must be a Policy")

    for broken in (other, app):
        result = CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=broken))
        assert (result.exit_code, "Traceback" in result.output) == (1, False)
        app.loader.import_default_modules = late
    assert "must be a Policy" in result.output


@pytest.mark.filterwarnings("default")
def test_check_warns_as_a_worker_does(command: Any, app: Celery) -> None:
    """Of a memory that the processes of the pool do not share: by a sentence, not by a line of this library's code."""
    told = command("check")
    assert told.exit_code == 0
    assert re.search("^Warning: idempotency_store=memory://: every process .* memory of its own", told.stderr, re.M)
    assert ".py" not in told.stderr
    for pool in ("solo", "threads"):
        app.conf.worker_pool = pool
        assert command("check").exit_code == 0


@pytest.mark.filterwarnings("default")
def test_check_gives_each_warning_once_and_leaves_those_of_others() -> None:
    """Celery binds a task twice; what other packages warn of is shown as Python shows it."""
    app = an_app(worker_pool="solo")

    @app.task(base=IdempotentTask, shared=False, name="orders.late", acks_late=False)
    def late() -> None: ...

    @app.on_after_finalize.connect(weak=False)
    def warn(**_: Any) -> None:
        warnings.warn("deprecated by somebody else", DeprecationWarning, stacklevel=1)

    with pytest.warns(DeprecationWarning, match="somebody else"):
        told = CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=app))

    (line,) = told.stderr.splitlines()
    assert line.startswith("Warning: orders.late: acks_late is off")


def test_key_of_a_call_is_printed(command: Any, app: Celery) -> None:
    """A person finds the record of a call by its arguments."""
    task = app.tasks["orders.charge"]

    for arguments in (("--args", "[7]"), ("--kwargs", '{"order_id": 7}')):
        assert command("key", "orders.charge", *arguments).output.strip() == task.idempotency_key_for(7)
    assert "has no task" in command("key", "orders.refund").output
    assert "no idempotency key" in command("key", "orders.charge", "--args", "[null]").output


@pytest.mark.parametrize(("left", "told"), [(60_000, "RELEASED, queued"), (0, "RELEASED, message in doubt")])
def test_show_and_list_tell_what_a_publisher_recorded(command: Any, app: Celery, left: int, told: str) -> None:
    """Its message is on its way, or nobody can tell; what an attempt gave back is neither."""
    store = app.conf.idempotency_store
    released = replace(a_record(), status=Status.RELEASED, lease_until=store.now() + left)
    announced = replace(released, key="announced", owner="", attempts=0)
    for each in (released, announced):
        store.swap(each, None)

    assert f"status  {told}\n" in command("show", announced.key).output
    assert "status  RELEASED\n" in command("show", released.key).output
    assert command("list").output.count(f"\n{told}  ") == 1


def test_show_and_list_tell_what_is_recorded(command: Any, app: Celery) -> None:
    """Records are found by status and task, and shown without their results."""
    deliver(app.tasks["orders.charge"], 7, task_id="the-id")
    key = app.tasks["orders.charge"].idempotency_key_for(7)
    unknown = _unknown(app)

    shown = command("show", key).output
    assert "COMPLETED" in shown
    assert "the-id" in shown
    assert "charged 7" not in shown
    assert "nothing is recorded" in command("show", "no-such-key").output
    assert key in command("list").output
    assert unknown in command("list", "--status", "UNKNOWN").output
    assert key not in command("list", "--status", "UNKNOWN").output
    assert unknown not in command("list", "--limit", "1", "--task", "orders.refund").output


def test_resolve_is_the_way_out_of_unknown(command: Any, app: Celery) -> None:
    """A person's verdict is asked back, recorded, and refused for anything that is not unknown."""
    store = app.conf.idempotency_store
    first, second = _unknown(app), _unknown(app)

    assert command("resolve", first, "--rerun", answer="n\n").exit_code == 1
    assert store.get(first).status is Status.UNKNOWN
    assert command("resolve", first, "--rerun", "--yes").exit_code == 0
    assert store.get(first).status is Status.RELEASED
    assert command("resolve", second, "--completed", '{"id": "ch_1"}', "--yes").exit_code == 0
    assert json.loads(store.get(second).result) == {"id": "ch_1"}
    assert store.get(second).expires_at

    assert "only an UNKNOWN outcome" in command("resolve", first, "--rerun", "--yes").output
    assert "nothing is recorded" in command("resolve", "none", "--rerun", "--yes").output
    assert "either" in command("resolve", first, "--yes").output
    assert "either" in command("resolve", first, "--rerun", "--completed", "1", "--yes").output


def test_verdict_does_not_overwrite_a_change_meanwhile(app: Celery) -> None:
    """A record that changed since it was read keeps its change."""
    from dataclasses import replace

    class Changing(MemoryStore):
        def get(self, key: str) -> Any:
            seen = super().get(key)
            assert seen is not None
            self.swap(replace(seen, revision="changed"), seen.revision)
            return seen

    store = Changing()
    record = replace(a_record(), status=Status.UNKNOWN)
    store.swap(record, None)

    with pytest.raises(PolicyError, match="meanwhile"):
        judge(store, record.key, Action.RERUN)
