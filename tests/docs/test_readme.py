"""README.md and docs/*.md say what is so: their code runs, their tables are the code's, their links lead somewhere."""
# mypy: allow-untyped-decorators

import dataclasses
import importlib
import inspect
import logging
import re
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import click
import pydantic
import pytest
from celery import Celery
from celery.beat import _evaluate_entry_args
from celery.utils.dispatch import Signal

import celery_idempotent
import pytest_celery_idempotent
from celery_idempotent import (
    Attempt,
    IdempotentTask,
    InFlight,
    KeyMissing,
    KeyReused,
    Policy,
    PolicyError,
    StoreUnavailable,
    open_store,
    signals,
    stores,
)
from celery_idempotent.engine.events import EventName
from celery_idempotent.integration import settings
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.headers import HEADERS, KEY_HEADER
from celery_idempotent.protocol.canonical import canonical
from celery_idempotent.protocol.effects import AtMostOnce, Effect
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import an_app, deliver, published
from tests.support.documents import DOCS, DOCUMENTS, ROOT, anchors, code, execute_block, table, words

README = ROOT / "README.md"
SOURCE = "\n".join(path.read_text() for path in Path(celery_idempotent.__file__).parent.rglob("*.py"))
SETTINGS = set(re.findall(r'(?:conf\.get|= _row|_given)\(\s*(?:[\w.]+, )?"(idempotency_\w+)"', SOURCE))
TOLD = {
    *(row["metric"].strip("`") for row in table(DOCS / "how-to/telemetry.md", "metric")),
    *(f"celery_idempotent.{name}" for name in (*EventName, "event")),
}
"""What OpenTelemetry is told, by names that look like those of modules."""
_CONTEXT = click.Context(idempotency)
COMMANDS = {
    name: command
    for name in idempotency.list_commands(_CONTEXT)
    if (command := idempotency.get_command(_CONTEXT, name))
}
PROSE = {document: document.read_text() for document in DOCUMENTS}
EVERYTHING = "\n".join(PROSE.values())


class Gateway:
    """A payment provider that honours idempotency keys."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.charges: dict[str, str] = {}

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> str:
        self.calls.append(order_id)
        return self.charges.setdefault(idempotency_key, f"ch_{len(self.charges) + 1}")


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def run(gateway: Gateway, unchanged_celery: None) -> Callable[[Path], dict[str, Any]]:
    """Executes a document's Python blocks in order and returns what they defined."""

    def execute(document: Path) -> dict[str, Any]:
        # A page may show a task first and the settings of its app later.
        blocks = sorted(code(document, "python"), key=lambda block: "app = Celery(" not in block[1])
        names: dict[str, Any] = {"app": an_app(), "gateway": gateway, "__name__": document.stem}
        for line, text in blocks:
            execute_block(document, line, text, names)
            if "app = Celery(" in text:
                names["app"].conf.idempotency_store = open_store("memory://")
        return names

    return execute


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_python_blocks_run(document: Path, run: Callable[[Path], dict[str, Any]]) -> None:
    """A reader can paste them: every block compiles and runs, after those before it."""
    run(document)


def test_blocks_are_found() -> None:
    """The test above would also pass on documents without code."""
    assert sum(len(code(document, "python")) for document in DOCUMENTS) >= 8


# -- the first screen


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock.now))


@pytest.fixture
def charge(run: Callable[[Path], dict[str, Any]], store: FaultyStore, gateway: Gateway) -> Any:
    """The task of the README's first example, and a receiver that has seen nothing yet."""
    task = run(README)["charge"]
    task.app.conf.update(idempotency_store=store, broker_url="memory://", task_default_queue="readme")
    task.app.conf.result_backend = "cache+memory://"
    gateway.calls.clear()
    gateway.charges.clear()
    return task


def test_first_screen_replays(charge: Any, gateway: Gateway) -> None:
    """'It comes again after success': the recorded result is returned; the body does not run."""
    assert deliver(charge, "o-1", 500, task_id="a") == deliver(charge, "o-1", 500, task_id="a")
    assert gateway.calls == ["o-1"]


def test_first_screen_postpones_without_using_up_retries(charge: Any, store: FaultyStore, gateway: Gateway) -> None:
    """'Another delivery is running it': this one is published again with the retry count it came with."""
    _leave_running(charge, store)
    published(charge.app)

    end = deliver(charge, "o-1", 500, request={"retries": 2})

    assert end.state == "RETRY"
    assert gateway.calls == ["o-1"]
    (message,) = published(charge.app)
    assert message.headers["retries"] == 2


def test_first_screen_takes_over_after_lease_and_grace(
    charge: Any, store: FaultyStore, clock: FakeClock, gateway: Gateway
) -> None:
    """'The worker dies in the body': 61 s later another delivery runs, with a larger fencing token and one charge."""
    dead = _leave_running(charge, store)

    clock.advance(61_000 - 1)
    assert deliver(charge, "o-1", 500).state == "RETRY"
    clock.advance(1)
    assert deliver(charge, "o-1", 500).value == "ch_1"

    (record,) = store.scan()
    assert record.fencing_token > dead.fencing_token
    assert (len(gateway.calls), len(gateway.charges)) == (2, 1)


def test_first_screen_refuses_a_late_worker(charge: Any, store: FaultyStore, clock: FakeClock) -> None:
    """'A late worker wakes up': its write is refused, its successor's result is reported."""
    ends: list[Any] = []

    def stall(record: Record) -> None:
        if record.status == "COMPLETED" and not ends:
            ends.append(None)
            clock.advance(61_000)
            ends.append(deliver(charge, "o-1", 500))

    store.before_swap = stall
    late = deliver(charge, "o-1", 500)

    assert late == ends[1]
    (record,) = store.scan()
    assert record.attempts == 2


def test_first_screen_releases_when_the_body_raises(charge: Any, gateway: Gateway) -> None:
    """'The body raises': the claim is given back, and the next delivery runs."""
    gateway.charge = None  # type: ignore[assignment, method-assign]  # calling it raises
    assert deliver(charge, "o-1", 500).state == "FAILURE"
    del gateway.charge
    assert deliver(charge, "o-1", 500).value == "ch_1"


def test_first_screen_refuses_other_arguments_and_missing_keys(charge: Any, gateway: Gateway) -> None:
    """'The same key comes with other arguments', 'the key is missing or null': an error, and nothing runs."""
    deliver(charge, "o-1", 500)
    assert isinstance(deliver(charge, "o-1", 501).value, KeyReused)
    assert isinstance(deliver(charge, None, 500).value, KeyMissing)
    assert gateway.calls == ["o-1"]


def test_first_screen_runs_nothing_without_the_store(charge: Any, store: FaultyStore, gateway: Gateway) -> None:
    """'The store does not answer': nothing runs; the delivery is postponed."""
    store.faults.extend(["request lost"] * 2)
    assert deliver(charge, "o-1", 500).state == "RETRY"
    assert gateway.calls == []


def test_requests_are_as_many_as_the_table_says(charge: Any, store: FaultyStore, clock: FakeClock) -> None:
    """New key 2, duplicate 1, conflict 1, takeover 3: all of them swaps, each of which is one PutItem."""
    costs = {
        row["path"]: int(row["requests to the store"][0]) for row in table(DOCS / "explanation/how-it-works.md", "path")
    }

    def cost_of(*args: Any) -> int:
        store.swaps.clear()
        deliver(charge, *args)
        return len(store.swaps)

    assert cost_of("o-1", 500) == costs["new key"]
    assert cost_of("o-1", 500) == costs["duplicate of something finished"]
    _leave_running(charge, store, "o-2")
    assert cost_of("o-2", 500) == costs["duplicate of something running"]
    clock.advance(61_000)
    assert cost_of("o-2", 500) == costs["takeover, or running again after a release"]


def test_steps_and_commits_cost_what_the_table_says(store: FaultyStore) -> None:
    """A step is a write more, at most once two, and a commit none."""
    app = an_app()
    app.conf.idempotency_store = store
    costs = {
        row["path"]: re.findall(r"\d", row["requests to the store"])
        for row in table(DOCS / "explanation/how-it-works.md", "path")
    }

    def cost_of(work: Callable[[Attempt], object], **effects: Effect) -> str:
        @app.task(base=IdempotentTask, shared=False, name=f"task-{uuid4()}", idempotent=Policy(effects=effects))
        def task() -> None:
            work(celery_idempotent.current_attempt())

        store.swaps.clear()
        assert deliver(task).state == "SUCCESS"
        return str(len(store.swaps) - int(costs["new key"][0]))

    def step(attempt: Attempt) -> None:
        attempt.step("mail", lambda step: None)

    assert costs["each step in the body"] == [cost_of(step), cost_of(step, mail=AtMostOnce())]
    assert costs["an effect committed with the record"] == [cost_of(lambda attempt: attempt.commit(1, []))]


def test_apply_is_guarded_and_a_call_is_not(charge: Any, store: FaultyStore, gateway: Gateway) -> None:
    """Eager execution is a delivery, a conflict there raises ``InFlight``, and a direct call is a function call."""
    charge.apply(("o-1", 500))
    charge.apply(("o-1", 500))
    assert gateway.calls == ["o-1"]
    charge("o-1", 500)
    assert gateway.calls == ["o-1", "o-1"]
    _leave_running(charge, store, "o-2")
    assert isinstance(charge.apply(("o-2", 500)).result, InFlight)


def _leave_running(charge: Any, store: FaultyStore, order_id: str = "o-1") -> Record:
    """Deliver once, and let the worker die before it completes; what it left behind."""

    class Died(BaseException):
        pass

    def die(record: Record) -> None:
        if record.status != "IN_PROGRESS":
            raise Died

    store.before_swap = die
    with pytest.raises(Died):
        deliver(charge, order_id, 500)
    store.before_swap = lambda record: None
    return next(record for record in store.scan() if record.status == "IN_PROGRESS")


# -- references


def test_policy_table_is_the_policy() -> None:
    """Every field, no other, in the order of the code, with the code's default."""
    documented = [(row["field"].strip("`"), row["default"]) for row in table(DOCS / "reference/policy.md", "field")]
    actual = dataclasses.fields(Policy)
    assert [name for name, _ in documented] == [field.name for field in actual]
    for (name, default), field in zip(documented, actual, strict=True):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert eval(default.strip("`"), {"timedelta": timedelta}) == made, name


@pytest.mark.parametrize(
    ("option", "worst", "good"),
    [
        ("lease", 0.4, 0.5),
        ("backoff", 0, 0.1),
        ("retain", 60, 61),
        ("max_takeovers", 0, 1),
        ("scope", "s" * 1901, "s" * 1900),
    ],
)
def test_bounds_in_the_policy_table_are_the_codes(option: str, worst: Any, good: Any) -> None:
    """Each documented bound holds on both of its sides."""
    Policy(**{option: good})
    with pytest.raises(PolicyError, match=option):
        Policy(**{option: worst})


def test_store_options_are_the_stores() -> None:
    """Every option of DynamoDBStore, no other, with its default."""
    documented = table(DOCS / "reference/stores.md", "option")
    actual = inspect.signature(DynamoDBStore).parameters
    assert [row["option"].strip("`") for row in documented] == list(actual)
    for row, parameter in zip(documented, actual.values(), strict=True):
        if row["default"].startswith("`"):
            assert eval(row["default"].strip("`")) == parameter.default, parameter


def test_store_urls_open() -> None:
    """Each documented URL opens a store, and so does one with every documented option."""
    for row in table(DOCS / "reference/stores.md", "URL"):
        if row["URL"] != "`django://default`":  # opened in tests/django, where there is a Django
            assert open_store(row["URL"].strip("`"))
    assert open_store("dynamodb://@h:1/t?key_attr=k&sort_key_attr=s&sort_key_value=v&ttl_attr=e&region=r&secure=1")
    schemes = {row["URL"].strip("`").split(":")[0] for row in table(DOCS / "reference/stores.md", "URL")}
    assert {each if each in stores._BUILT_IN else each.partition("+")[0] for each in schemes} == set(stores._BUILT_IN)


def test_settings_are_those_that_the_code_reads() -> None:
    """Every setting of our own is documented, and no other."""
    documented = {row["setting"].strip("`") for row in table(DOCS / "reference/settings.md", "setting")}
    assert documented == SETTINGS == set(settings.SETTINGS)


def test_signals_are_documented_with_their_level() -> None:
    """Every signal, no other, each with the level of its log line."""
    levels = {
        row["signal"].strip("`"): logging.getLevelName(row["log level"])
        for row in table(DOCS / "reference/signals.md", "signal")
    }
    assert set(levels) == {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert levels == {str(each): each.level for each in EventName}
    when = {row["signal"].strip("`"): row["sent when"] for row in table(DOCS / "reference/signals.md", "signal")}
    assert when == {str(each): each.text for each in EventName}


def test_other_log_events_are_documented() -> None:
    """Every log event that is no signal, and no other; test_troubleshooting.py has those that are warnings or worse."""
    documented = {row["event"].strip("`") for row in table(DOCS / "reference/signals.md", "event")}
    quiet = set(re.findall(r'say\(\s*(?:logger\.(?:info|debug)|partial\(logger\.log, level, .*\)),\s*"(\w+)"', SOURCE))
    assert documented == {f"idempotency.{name}" for name in quiet}


def test_one_logger_configures_all() -> None:
    """Every module logs to a child of the package's, named after itself."""
    assert set(re.findall(r"getLogger\((.*?)\)", SOURCE)) == {"__name__"}


def test_commands_are_documented() -> None:
    """Every command with every option of its own, no other; that all but one print JSON is said once."""
    page = DOCS / "reference/cli.md"
    assert "All but `web` take `--json`." in page.read_text()
    common = {
        "FILTERS": " ".join(row["filter"] for row in table(page, "filter")),
        "VERDICT": " ".join(row["verdict option"] for row in table(page, "verdict option")),
    }
    documented = {}
    for row in table(page, "command"):
        name, *rest = row["command"].strip("`").split(" ", 1)
        written = re.sub("|".join(common), lambda found: common[found[0]], " ".join(rest))
        documented[name] = set(re.findall(r"--[\w-]+", written)) | ({"--json"} if name != "web" else set())
    actual = {
        name: {option for each in command.params if isinstance(each, click.Option) for option in each.opts}
        for name, command in COMMANDS.items()
    }
    assert documented == actual


def test_attempt_is_documented() -> None:
    """Everything that a body may ask its attempt, no other."""
    documented = {
        re.sub(r"\(.*", "", row["name"].strip("`").removeprefix("attempt."))
        for row in table(DOCS / "how-to/effects.md", "name")
    }
    assert documented == {name for name in vars(Attempt) if not name.startswith("_")}


def test_records_are_documented() -> None:
    """Every field and every status, no other; those that a table says expire are those that do."""
    page = DOCS / "reference/record.md"
    fields = {row["record field"].strip("`") for row in table(page, "record field")}
    assert fields == {each.name for each in dataclasses.fields(Record)}
    leaves = {row["status"].strip("`"): row["how the record leaves it"] for row in table(page, "status")}
    assert set(leaves) == set(Status)
    assert {status for status, how in leaves.items() if "`retain`" in how} == {Status.COMPLETED, Status.FAILED}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_nothing_is_documented_that_does_not_exist(document: Path) -> None:
    """Names in backticks that look like ours are ours."""
    known_words = {
        *SETTINGS,
        *(name for name in dir(IdempotentTask) if name.startswith("idempotency_")),
        *HEADERS,
        *(f"idempotency_{field}" for field in ("event", "task", "key")),  # of a record of the log
        TABLE,
        OUTBOX,
        f"{OUTBOX}_number_seq",  # PostgreSQL's own name
        *pytest_celery_idempotent.__all__,
    }
    for word in words(document):
        for module in set(re.findall(r"^celery_idempotent(?:\.\w+)+$", word)) - TOLD:
            _resolve(module)
        for name in re.findall(r"(?<!/)\battempt\.(\w+)", word):
            assert hasattr(Attempt, name), word
        for name in re.findall(r"\bPolicy\(([^)]*)", word):
            assert set(re.findall(r"(\w+)=", name)) <= {each.name for each in dataclasses.fields(Policy)}, word
        for name in re.findall(r"\b(idempotency_\w+)", word):
            assert name in known_words, word
        for name in re.findall(r"^CELERY_(IDEMPOTENCY_\w+)$", word):
            assert name.lower() in known_words, word
        for name in re.findall(r'^(\w+)="', word):
            assert name in _keywords(), word
        for name in re.findall(r"-A \w+ idempotency ([\w-]+)", word):
            assert name in COMMANDS, word


def test_shell_blocks_use_what_exists() -> None:
    """Commands, their options, make targets, extras and files that a shell block names are there."""
    makefile = (ROOT / "Makefile").read_text()
    setup = (ROOT / "setup.cfg").read_text()
    for document in DOCUMENTS:
        for line in "\n".join(text for _, text in code(document, "sh")).splitlines():
            command = line.split("#")[0]
            for name in re.findall(r"^make (\w+)", command):
                assert f"\n{name}:" in makefile, line
            for name in re.findall(r"celery-idempotent\[(\w+)\]", command):
                assert re.search(rf"^{name} =$", setup, re.MULTILINE), line
            for name, rest in re.findall(r"celery -A \w+ idempotency ([\w-]+)(.*)", command):
                options = {option for each in COMMANDS[name].params for option in each.opts}
                assert set(re.findall(r"--[\w-]+", rest)) <= options, line
            for name in re.findall(r"--template-file (\S+)", command):
                assert (ROOT / name).is_file(), line


def _resolve(dotted: str) -> None:
    module, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        # An entry point group is named like a module and is none.
        if dotted not in {"celery_idempotent.stores", "celery_idempotent.objects"}:
            assert hasattr(importlib.import_module(module), name), dotted


def _keywords() -> set[str]:
    """What may stand before ``="..."``."""
    return {each.name for each in dataclasses.fields(Policy)} | {KEY_HEADER, "namespace"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Files that a document links to exist, and so do the headings."""
    for link in re.findall(r"\]\(([^)]+)\)", PROSE[document]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_glossary_is_short() -> None:
    """At most twenty words, each once."""
    entries = [row["word"] for row in table(DOCS / "reference/glossary.md", "word")]
    assert len(set(entries)) == len(entries) <= 20


# -- keys


class Color(Enum):
    """The enum of the table."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """The dataclass of the table."""

    x: int
    y: int


class Price(pydantic.BaseModel):
    """The model of the table."""

    amount: Decimal


VALUES = {
    "Color": Color,
    "Point": Point,
    "Price": Price,
    "Decimal": Decimal,
    "UUID": UUID,
    "UTC": UTC,
    "date": date,
    "datetime": datetime,
    "timedelta": timedelta,
    "timezone": timezone,
}


@pytest.mark.parametrize("row", table(DOCS / "how-to/keys.md", "one value"), ids=lambda row: row["one value"])
def test_what_equals_what_is_so(row: dict[str, str]) -> None:
    """Each pair has one canonical form, or two, as the table says."""
    one, other = (eval(re.findall("`([^`]*)`", row[name])[0], dict(VALUES)) for name in ("one value", "another"))
    assert (canonical(one) == canonical(other)) is row["one key?"].startswith("yes")


def test_json_lets_through_what_is_documented() -> None:
    """What a worker sees: some types survive JSON, some change, some are refused at the publisher."""
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="any")
    def task(value: Any) -> None: ...

    for kept in (Decimal("1.5"), datetime(2026, 1, 1), date(2026, 1, 1), UUID(int=1), b"x", (1, 2)):
        assert task.idempotency_key_for(kept) == task.idempotency_key_for(value=kept)
    assert task.idempotency_key_for({1: "a"}) == task.idempotency_key_for({"1": "a"})
    for refused in ({1, 2}, timedelta(1), Point(1, 2), Color.RED, Price(amount=Decimal(1))):
        with pytest.raises(Exception, match="not JSON serializable"):
            task.idempotency_key_for(refused)


def test_explicit_key_travels_in_every_documented_way() -> None:
    """``apply_async``, ``set``, ``apply`` and, by header, ``send_task`` give one operation."""
    app = an_app()
    runs = []

    @app.task(base=IdempotentTask, shared=False, name="shop.ship", idempotent=Policy(fingerprint=None))
    def ship(order: str) -> None:
        runs.append(order)

    ship.apply_async(("a",), idempotency_key="k")
    ship.s("b").set(idempotency_key="k").apply_async()
    app.send_task("shop.ship", ("c",), headers={"idempotency_key": "k"})
    for message in published(app):
        deliver(ship, *message.payload[0], request={"headers": {KEY_HEADER: message.headers[KEY_HEADER]}})
    ship.apply(("d",), idempotency_key="k")
    assert runs == ["a"]

    app.send_task("shop.ship", ("e",), idempotency_key="k")
    (message,) = published(app)
    assert KEY_HEADER not in message.headers
    for bad, error in ((None, KeyMissing), ("", KeyMissing), (7, PolicyError)):
        with pytest.raises(error):
            ship.apply_async(("f",), idempotency_key=bad)


def test_equal_ticks_are_exempt_under_the_default_key_only() -> None:
    """Beat's ticks are operations of their own with all arguments as key, and one operation with any other."""
    app = an_app()
    runs = []
    tick = {"headers": {"celery_beat_task": True}}

    @app.task(base=IdempotentTask, shared=False, name="by_default")
    def by_default(shop: str) -> None:
        runs.append("default")

    @app.task(base=IdempotentTask, shared=False, name="by_key", idempotent=Policy(key="shop"))
    def by_key(shop: str) -> None:
        runs.append("key")

    for task in (by_default, by_key):
        deliver(task, "s", request=tick, task_id="1")
        deliver(task, "s", request=tick, task_id="1")
        deliver(task, "s", request=tick, task_id="2")
        deliver(task, "s", task_id="3")
        deliver(task, "s", task_id="4")

    assert (runs.count("default"), runs.count("key")) == (3, 1)


def test_beat_evaluates_the_documented_argument(run: Callable[[Path], dict[str, Any]]) -> None:
    """The schedule of docs/how-to/keys.md sends the day, so that two beats make one operation of it."""
    names = run(DOCS / "how-to/keys.md")
    entry = names["app"].conf.beat_schedule["close-books"]
    (day,) = _evaluate_entry_args(entry["args"])
    assert date.fromisoformat(day)
    assert names["close_books"].idempotency_key_for(day)


def test_new_parameter_changes_fingerprints_and_whole_call_keys() -> None:
    """A deploy that adds a parameter: ``KeyReused`` under a key, a second run under all arguments, peace if named."""
    ends = {}
    for name, policy in {
        "keyed": Policy(key="order_id"),
        "whole": Policy(),
        "named": Policy(key="order_id", fingerprint=("order_id", "cents")),
    }.items():
        before, after = an_app(), an_app()
        after.conf.idempotency_store = before.conf.idempotency_store

        @before.task(base=IdempotentTask, shared=False, name="charge", idempotent=policy)
        def charge(order_id: str, cents: int) -> str:
            return "old"

        @after.task(base=IdempotentTask, shared=False, name="charge", idempotent=policy)
        def recharge(order_id: str, cents: int, notify: bool = True) -> str:
            return "new"

        deliver(charge, "o-1", 500)
        end = deliver(recharge, "o-1", 500).value
        ends[name] = end if isinstance(end, str) else type(end)

    assert ends == {"keyed": KeyReused, "whole": "new", "named": "old"}


def test_call_that_failed_before_its_first_step_may_be_corrected_under_its_key() -> None:
    """Once it has an outcome or a step, other arguments are ``KeyReused``; under a key of their own they run."""
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(key="order_id"))
    def charge(order_id: str, cents: int) -> str:
        if cents == 0:
            celery_idempotent.current_attempt().step("reserve", lambda step: "r_1")
        if cents < 1:
            raise ValueError(cents)
        return f"ch_{cents}"

    assert deliver(charge, "o-1", -5).state == "FAILURE"
    assert deliver(charge, "o-1", 5).value == "ch_5"
    assert isinstance(deliver(charge, "o-1", 6).value, KeyReused)
    assert deliver(charge, "o-2", 0).state == "FAILURE"
    assert isinstance(deliver(charge, "o-2", 7).value, KeyReused)
    assert deliver(charge, "o-2", 7, request={"headers": {KEY_HEADER: "corrected"}}).value == "ch_7"


def test_observing_runs_everything_and_its_outcomes_count_later() -> None:
    """``mode="observe"`` suppresses nothing; what it recorded is replayed once the mode is gone."""
    observed, enforced = an_app(), an_app()
    enforced.conf.idempotency_store = observed.conf.idempotency_store
    runs = []

    @observed.task(base=IdempotentTask, shared=False, name="t", idempotent=Policy(mode="observe"))
    def watching(order: str) -> None:
        runs.append("observe")

    @enforced.task(base=IdempotentTask, shared=False, name="t")
    def enforcing(order: str) -> None:
        runs.append("enforce")

    deliver(watching, "o")
    deliver(watching, "o")
    deliver(enforcing, "o")
    assert runs == ["observe", "observe"]


def test_attempt_in_a_thread_of_the_bodys_own_is_not_found() -> None:
    """Threads that a body starts do not see ``current_attempt()``, as the documents say."""
    app = an_app()
    found: list[Any] = []

    @app.task(base=IdempotentTask, shared=False, name="t")
    def body() -> None:
        def look() -> None:
            try:
                found.append(celery_idempotent.current_attempt())
            except LookupError as error:
                found.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        found.append(celery_idempotent.current_attempt().key)

    deliver(body)
    assert isinstance(found[0], LookupError)
    assert isinstance(found[1], str)


def test_app_default_policy_and_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """``CELERY_IDEMPOTENCY_STORE`` and ``CELERY_IDEMPOTENCY_POLICY`` are found under the namespace CELERY."""
    store = MemoryStore()
    policy = Policy(retain=86_400)

    class Settings:
        CELERY_IDEMPOTENCY_STORE = store
        CELERY_IDEMPOTENCY_POLICY = policy
        CELERY_TASK_ACKS_LATE = True
        CELERY_TASK_REJECT_ON_WORKER_LOST = True

    app = Celery("namespaced", set_as_current=False, broker="memory://")
    app.config_from_object(Settings, namespace="CELERY")

    @app.task(base=IdempotentTask, shared=False, name="t")
    def task() -> None: ...

    deliver(task)
    assert len(list(store.scan())) == 1
    assert task.idempotency_policy is policy


def test_store_errors_reach_the_caller_in_eager_mode_only(charge: Any, store: FaultyStore) -> None:
    """An outage postpones a delivery, and raises where nothing can be postponed."""
    store.faults.extend(["request lost"] * 4)
    assert deliver(charge, "o-1", 500).state == "RETRY"
    assert isinstance(charge.apply(("o-1", 500)).result, StoreUnavailable)
