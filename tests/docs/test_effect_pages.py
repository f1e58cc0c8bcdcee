"""docs/effect*.md are acted out: every row of every table, on the task that its page defines.

A receiver behaves as its page says, a worker dies (or stalls, or gets no answer) where the row says, its message is
delivered again, and the effects are counted at the receiver.
"""
# mypy: allow-untyped-decorators

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Column, String, create_engine, text
from sqlalchemy.orm import Session, declarative_base

from celery_idempotent import (
    AtLeastOnce,
    AtMostOnce,
    Committed,
    Fenced,
    IdempotentTask,
    Keyed,
    OutcomeUnknown,
    Policy,
    Status,
    StoreUnavailable,
    current_attempt,
    open_store,
    outbox,
)
from celery_idempotent.protocol.effects import promise
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.scenarios import WorkerDied
from lab.embedded import EmbeddedPostgres
from tests.support.deliveries import an_app, deliver, published
from tests.support.documents import DOCS, code, execute_block, table
from tests.support.stage import Play, Stage, StagedStore

HOUR = 3_600_000
API_REMEMBERS = 24 * HOUR
RELAY_HOLDS = 60_000


class Gateway:
    """A payment API: honours a key for 24 hours from its first request, then forgets it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.charges: list[str] = []
        self._known: dict[str, tuple[int, str]] = {}

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> str:
        return self.stage.ask("call", partial(self._charge, idempotency_key))

    def _charge(self, key: str) -> str:
        since, charge = self._known.get(key, (-API_REMEMBERS, ""))
        if since + API_REMEMBERS <= self.stage.ahead:
            since, charge = self.stage.ahead, f"ch_{len(self.charges) + 1}"
            self.charges.append(charge)
            self._known[key] = since, charge
        return charge


class Index:
    """A search index: refuses who shows a smaller token than one it has seen, and finds entries by their key."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.entries: list[tuple[str, str]] = []
        self._fence = 0

    def raise_fence(self, order_id: str, token: int) -> None:
        self.stage.ask("fence", lambda: self._raise(token))

    def find(self, order_id: str, key: str) -> str | None:
        return self.stage.ask("probe", lambda: next((entry for entry, of in self.entries if of == key), None))

    def add(self, order_id: str, key: str, text: str, token: int | None) -> str:
        return self.stage.ask("act", lambda: self._add(key, token))

    def _add(self, key: str, token: int | None) -> str:
        if token is not None and token < self._fence:
            raise PermissionError(f"{token} is smaller than {self._fence}")
        self._raise(token or 0)
        self.entries.append((f"entry {len(self.entries) + 1}", key))
        return self.entries[-1][0]

    def _raise(self, token: int) -> None:
        self._fence = max(self._fence, token)


class Line:
    """A phone or an old API: does what it is told, as often as it is told, and remembers nothing."""

    def __init__(self, stage: Stage, point: str) -> None:
        self.stage = stage
        self.point = point
        self.sent: list[str] = []

    def send(self, what: str) -> str:
        return self.stage.ask(self.point, lambda: self.sent.append(what) or "sent")  # type: ignore[func-returns-value]

    post = print = send


# -- scenes


@dataclass
class Scene:
    """The task of a page on a stage, its receivers, and what counts their effects, by column of the page's table."""

    stage: Stage
    app: Celery
    store: StagedStore
    names: dict[str, Any]
    play: Play
    counts: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    #: What happens after the act; as a rule, further deliveries and a duplicate.
    goes_on: Callable[[], None] = field(init=False)
    #: What a relay and other workers do, once the task itself is settled.
    afterwards: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.goes_on = self.play.until_all_is_known

    @property
    def status(self) -> Status:
        """How the operation stands."""
        (record,) = (each for each in self.store.scan() if each.task == self.play.task.name)
        return record.status


Setting = Callable[..., Scene]


@pytest.fixture
def set_scene(unchanged_celery: None) -> Setting:
    """Makes the scene of a page: executes its blocks, and puts its task on the stage."""

    def set_scene(
        page: str,
        task: str,
        *args: Any,
        store: Store | None = None,
        edit: Callable[[str], str] = lambda block: block,
        **receivers: Callable[[Stage], Any],
    ) -> Scene:
        stage, app = Stage(), an_app()
        staged = app.conf.idempotency_store = StagedStore(store or MemoryStore(), stage)
        names = {"app": app, "__name__": "shop", **{name: make(stage) for name, make in receivers.items()}}
        for line, block in code(DOCS / page, "python"):
            execute_block(DOCS / page, line, edit(block), names)
        return Scene(stage, app, staged, names, Play(stage, app.tasks[f"shop.{task}"], *args))

    return set_scene


@pytest.fixture
def paying(set_scene: Setting) -> Scene:
    scene = set_scene("how-to/effect-payment-api.md", "charge", "o-1", 500, gateway=Gateway)
    scene.counts = {"charges": lambda: len(scene.names["gateway"].charges)}
    return scene


def _windowed(set_scene: Setting, column: str, edit: Callable[[str], str]) -> Scene:
    scene = set_scene("how-to/effect-payment-api.md", "charge", "o-1", 500, gateway=Gateway, edit=edit)
    scene.counts = {column: lambda: len(scene.names["gateway"].charges)}
    return scene


@pytest.fixture
def paying_past_the_window(set_scene: Setting) -> Scene:
    return _windowed(set_scene, RERUN, lambda block: block)


@pytest.fixture
def refusing_past_the_window(set_scene: Setting) -> Scene:
    def edit(block: str) -> str:
        assert "hours=24)" in block
        return block.replace("hours=24)", 'hours=24), on_takeover="refuse"')

    return _windowed(set_scene, REFUSE, edit)


RERUN, REFUSE = "`Keyed(window=w)`", '`Keyed(window=w, on_takeover="refuse")`'


@pytest.fixture
def reserving(set_scene: Setting, dynamodb_endpoint: str) -> Iterator[Scene]:
    address = dynamodb_endpoint.removeprefix("http://")
    store = open_store(f"dynamodb://test:test@{address}/effects-{uuid4().hex}?region=us-east-1")
    assert isinstance(store, DynamoDBStore)
    store.provision()
    client, sku = store._connected(), uuid4().hex
    with suppress(client.exceptions.ResourceInUseException):
        client.create_table(
            TableName="stock",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "sku", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "sku", "KeyType": "HASH"}],
        )
    client.put_item(TableName="stock", Item={"sku": {"S": sku}, "left": {"N": "100"}})

    def taken() -> int:
        item = client.get_item(TableName="stock", Key={"sku": {"S": sku}}, ConsistentRead=True)["Item"]
        return (100 - int(item["left"]["N"])) // 7

    scene = set_scene("how-to/effect-dynamodb-commit.md", "reserve", "o-1", sku, 7, store=store)
    scene.counts = {"effects": taken}
    yield scene
    store.close()


def _booking(set_scene: Setting, url: str) -> Iterator[Scene]:
    ledger = f"ledger_{uuid4().hex}"
    store = SQLStore(url, table=f"t_{uuid4().hex}")
    store.provision()
    engine = create_engine(store._url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {ledger} (order_id VARCHAR(40), cents INTEGER)"))

    def booked() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text(f"SELECT COUNT(*) FROM {ledger}")).scalar_one())

    printer: list[str] = []

    def edit(block: str) -> str:
        assert "INTO ledger " in block
        return block.replace("INTO ledger ", f"INTO {ledger} ")

    scene = set_scene("how-to/effect-sql-transaction.md", "book", "o-1", 500, store=store, edit=edit)

    @scene.app.task(base=IdempotentTask, shared=False, name="shop.receipt", idempotent=Policy(key="order_id"))
    def receipt(order_id: str) -> None:
        printer.append(order_id)

    def both() -> int:
        assert len(printer) == booked()
        return booked()

    scene.names["receipt"] = receipt
    scene.counts = {"effects": both}
    scene.afterwards = partial(_relay_and_work, scene)
    yield scene
    engine.dispose()
    store.close()


@pytest.fixture
def booking_on_sqlite(set_scene: Setting, tmp_path: Path) -> Iterator[Scene]:
    yield from _booking(set_scene, f"sqlite:///{tmp_path}/shop.sqlite")


@pytest.fixture
def booking_on_postgresql(set_scene: Setting, postgres: EmbeddedPostgres) -> Iterator[Scene]:
    yield from _booking(set_scene, postgres.url)


def _receipts_of(scene: Scene) -> list[Any]:
    return [each for each in published(scene.app) if each.headers["task"] == "shop.receipt"]


def _relay_and_work(scene: Scene) -> None:
    """Another process relays; then workers execute what came of it."""
    while outbox.relay(scene.app):
        pass
    for message in _receipts_of(scene):
        deliver(scene.app.tasks["shop.receipt"], *message.payload[0], task_id=message.headers["id"])


@pytest.fixture
def publishing(set_scene: Setting) -> Scene:
    scene = set_scene("how-to/effect-fenced-resource.md", "publish", "o-1", "text", index=Index)
    scene.counts = {"effects": lambda: len(scene.names["index"].entries)}
    return scene


def _following(set_scene: Setting, monkeypatch: pytest.MonkeyPatch, store: Store | None) -> Scene:
    """The page on follow-up tasks; publishing a receipt is a point of the stage."""
    page, args = "how-to/effect-follow-up-task.md", ("o-1", 500)
    printer = partial(Line, point="print")
    scene = set_scene(page, "pay", *args, store=store, gateway=Gateway, printer=printer)
    receipt, messages = scene.app.tasks["shop.receipt"], list[Any]()
    publish = receipt.apply_async
    monkeypatch.setattr(
        receipt,
        "apply_async",
        lambda *args, **kwargs: scene.stage.ask("publish", lambda: publish(*args, **kwargs)),
    )

    def work() -> None:
        messages.extend(_receipts_of(scene))
        for message in messages:
            deliver(receipt, *message.payload[0], task_id=message.headers["id"])
        assert len({message.headers["id"] for message in messages}) == 1, "each time with the same task id"
        assert len({str(message.payload[:2]) for message in messages}) == 1, "and with the same arguments"

    scene.counts = {"messages": lambda: len(messages), "receipts": lambda: len(scene.names["printer"].sent)}
    scene.afterwards = work
    return scene


@pytest.fixture
def following(set_scene: Setting, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return _following(set_scene, monkeypatch, None)


@pytest.fixture
def relaying(set_scene: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scene]:
    """A web request has placed an order, and relays publish its message."""
    store = SQLStore(f"sqlite:///{tmp_path}/shop.sqlite")
    store.provision()
    scene = _following(set_scene, monkeypatch, store)
    base: Any = declarative_base()

    class Order(base):
        __tablename__ = "orders"
        id = Column(String(40), primary_key=True)

    engine = create_engine(store._url)
    base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        scene.names["place_order"](session, Order(id="o-1"))
    engine.dispose()
    scene.play = Play(scene.stage, scene.app.tasks["shop.receipt"], "o-1")
    scene.goes_on = partial(_relay_that_dies, scene)
    yield scene
    store.close()


def _relay_that_dies(scene: Scene) -> None:
    with pytest.raises(WorkerDied):
        outbox.relay(scene.app)
    scene.stage.revive()
    assert outbox.relay(scene.app) == 0, "what a dead relay had is back after a minute, not before"
    scene.stage.ahead += RELAY_HOLDS
    while outbox.relay(scene.app):
        pass
    assert scene.stage.unplayed == []


def _notifying(set_scene: Setting, column: str, receiver: str) -> Scene:
    lines = {"sms": partial(Line, point="text call"), "hook": partial(Line, point="webhook call")}
    scene = set_scene("how-to/effect-at-most-once.md", "notify", "o-1", **lines)
    scene.counts = {column: lambda: len(scene.names[receiver].sent)}
    return scene


@pytest.fixture
def texting(set_scene: Setting) -> Scene:
    return _notifying(set_scene, "texts", "sms")


@pytest.fixture
def posting(set_scene: Setting) -> Scene:
    return _notifying(set_scene, "posts", "hook")


# -- acts


Act = Callable[[Scene], None]
"""Plans what happens in a scene; before its first delivery, or instead of it."""


def nothing(scene: Scene) -> None:
    """Nobody dies; the duplicate comes."""


def dies(moment: str) -> Act:
    """The worker dies at ``moment``."""
    return lambda scene: scene.stage.plan(moment, scene.stage.die)


def dies_done_with(moment: str, *points: str) -> Act:
    """The same, and nobody asks anything at ``points`` any more."""

    def act(scene: Scene) -> None:
        def die() -> None:
            scene.stage.close(*points)
            scene.stage.die()

        scene.stage.plan(moment, die)

    return act


def stalls(moment: str) -> Act:
    """The worker waits at ``moment`` until a successor has come to its end, and goes on."""
    return lambda scene: scene.stage.plan(moment, scene.play.stall)


def arrives(point: str, moment: str, refused: type[Exception] | None = None) -> Act:
    """The worker dies with a request on its way, which arrives at the next ``moment``, of another worker."""

    def act(scene: Scene) -> None:
        def die() -> None:
            request = scene.stage.sent[point]
            scene.stage.plan(moment, partial(_let_arrive, request, refused))
            scene.stage.die()

        scene.stage.plan(f"before {point}", die)

    return act


def _let_arrive(request: Callable[[], object], refused: type[Exception] | None) -> None:
    with pytest.raises(refused) if refused else nullcontext():
        request()


def is_refused(point: str, moment: str) -> Act:
    """The same, and it is refused."""
    return arrives(point, moment, PermissionError)


def gets_no_answer(*moments: str) -> Act:
    """The store's answer, or the request, is lost at each of ``moments``."""

    def lose() -> None:
        raise StoreUnavailable("store", "commit", "no answer")

    def act(scene: Scene) -> None:
        for moment in moments:
            scene.stage.plan(moment, lose)
        assert _delivered(scene) == "SUCCESS", "the first delivery makes it certain"

    return act


def is_undone(scene: Scene) -> None:
    """The database undoes a transaction at its commit, and the worker does not learn of it."""

    def undo() -> None:
        scene.stage.sent["commit"].__self__.rollback()  # type: ignore[attr-defined]  # a method of the transaction
        raise StoreUnavailable("store", "commit", "no answer")

    scene.stage.plan("before commit", undo)
    assert _delivered(scene) == "RETRY"


def _delivered(scene: Scene) -> str:
    ended = scene.play.deliver()
    assert ended is not None, "its worker died"
    return ended.state


def raises(moment: str) -> Act:
    """The call raises at ``moment``; what follows is another delivery."""

    def fail() -> None:
        raise TimeoutError

    def act(scene: Scene) -> None:
        scene.stage.plan(moment, fail)
        assert _delivered(scene) == "FAILURE"
        assert isinstance(scene.play.ends.pop().value, TimeoutError)

    return act


def comes(hours: int, moment: str) -> Act:
    """The worker dies at ``moment``, and the next attempt comes that many hours later."""

    def act(scene: Scene) -> None:
        scene.stage.plan(moment, scene.stage.die)
        assert scene.play.deliver() is None
        scene.stage.ahead += hours * HOUR

    return act


# -- tables


@dataclass(frozen=True)
class Table:
    """A table of a page, and by its rows what is acted out.

    Args:
        page: The page.
        first_column: Name of the table's first column.
        scene: Fixture that sets the scene.
        tells: Name of the column that says how the operation ends.
        rows: By the first cell, one or more acts that the row speaks of.
    """

    page: str
    first_column: str
    scene: str
    tells: str
    rows: Mapping[str, tuple[Act, ...]]


DEATHS = "the worker dies ..."
STALLS = "it does not die, but stalls past its lease"


def _of_step(step: str, *before: str) -> dict[str, tuple[Act, ...]]:
    return {
        "before the step": tuple(map(dies, before)),
        "in the call, before the effect": (dies(f"before {step} call"),),
        "in the call, after the effect": (dies(f"after {step} call"),),
        "after the answer, before its end is recorded": (dies(f"before end {step}"),),
        "after its end is recorded": (dies_done_with(f"after end {step}", f"{step} call"),),
        f"{STALLS} in the call": (stalls(f"before {step} call"), stalls(f"after {step} call")),
        "it does not die, but the call raises after its effect": (raises(f"after {step} call"),),
    }


def _of_transaction(*stalls_at: str) -> dict[str, tuple[Act, ...]]:
    return {
        "in the block": (
            dies("after transaction"),
            dies("after message in the transaction"),
            dies("before record in the transaction"),
            dies("after record in the transaction"),
        ),
        "with the commit on its way, and it is lost": (dies("before commit"),),
        "with the commit on its way, and it arrives": (dies("after commit"),),
        "after the commit": (nothing,),
        STALLS: tuple(map(stalls, stalls_at)),
        "it does not die, but gets no answer to its commit": (gets_no_answer("after commit"), is_undone),
    }


WINDOW = {
    "within the window, and the request was lost": (comes(23, "before call"),),
    "within the window, and the API had charged": (comes(23, "after call"),),
    "past it, and the request was lost": (comes(24, "before call"),),
    "past it, and the API had charged": (comes(24, "after call"),),
}

TABLES = [
    Table(
        "how-to/effect-payment-api.md",
        DEATHS,
        "paying",
        "then the next attempt",
        {
            "before the call": (dies("after claim"),),
            "in the call, and its request is lost": (dies("before call"),),
            "in the call, and its request arrives after the next attempt's": (
                arrives("call", "after call"),
                arrives("call", "after end charge"),
                arrives("call", "after COMPLETED"),
            ),
            "in the call, after the API has charged": (dies("after call"), arrives("call", "before call")),
            "after the answer, before it is recorded": (dies("before end charge"),),
            "after it is recorded": (
                dies_done_with("after end charge", "call"),
                dies_done_with("before COMPLETED", "call"),
            ),
            "after the result is recorded": (dies_done_with("after COMPLETED", "call"), nothing),
            STALLS: (stalls("before call"), stalls("after call"), stalls("before COMPLETED")),
        },
    ),
    Table("how-to/effect-payment-api.md", "the next attempt comes ...", "paying_past_the_window", RERUN, WINDOW),
    Table("how-to/effect-payment-api.md", "the next attempt comes ...", "refusing_past_the_window", REFUSE, WINDOW),
    Table(
        "how-to/effect-dynamodb-commit.md",
        DEATHS,
        "reserving",
        "then",
        {
            "before the request": (dies("after claim"), dies("before commit")),
            "with the request on its way, and it arrives": (
                dies_done_with("after commit", "commit"),
                arrives("commit", "before claim"),
            ),
            "with the request on its way, and it arrives after a takeover": (
                arrives("commit", "after claim"),
                arrives("commit", "before commit"),
                arrives("commit", "after commit"),
            ),
            "after the answer": (nothing,),
            "it does not die, but gets no answer": (
                gets_no_answer("before commit"),
                gets_no_answer("after commit"),
                gets_no_answer("after commit", "after commit", "before commit"),
            ),
            STALLS: (stalls("after claim"), stalls("before commit")),
        },
    ),
    Table(
        "how-to/effect-sql-transaction.md",
        DEATHS,
        "booking_on_postgresql",
        "then",
        _of_transaction("before transaction", "after message in the transaction", "before record in the transaction"),
    ),
    # Nobody can take over within a block of SQLite, as the page says.
    Table(
        "how-to/effect-sql-transaction.md", DEATHS, "booking_on_sqlite", "then", _of_transaction("before transaction")
    ),
    Table(
        "how-to/effect-fenced-resource.md",
        DEATHS,
        "publishing",
        "then the next attempt",
        {
            "before `fence` arrives": (dies("after claim"), dies("before fence")),
            "with `fence` on its way, and it arrives late": (
                arrives("fence", "after fence"),
                arrives("fence", "before act"),
                arrives("fence", "after act"),
            ),
            "after `fence`, before `act` arrives": (dies("after fence"), dies("after probe"), dies("before act")),
            "with `act` on its way, and it arrives before the next attempt's `fence`": (
                arrives("act", "before fence"),
                arrives("act", "after claim"),
            ),
            "with `act` on its way, and it arrives after the next attempt's `fence`": (
                is_refused("act", "after fence"),
                is_refused("act", "after probe"),
                is_refused("act", "after act"),
                is_refused("act", "after COMPLETED"),
            ),
            "after `act`, before it is recorded": (dies("after act"), dies("before end index")),
            "after it is recorded": (dies_done_with("after end index", "fence", "probe", "act"),),
            f"{STALLS} before `act`": (stalls("after probe"), stalls("before act")),
        },
    ),
    Table(
        "how-to/effect-follow-up-task.md",
        DEATHS,
        "following",
        "then the next attempt",
        {
            "before publishing": (dies("after end charge"), dies("before publish")),
            "after publishing, before it is recorded": (dies("after publish"), dies("before end receipt")),
            "after it is recorded": (
                dies_done_with("after end receipt", "call", "publish"),
                dies_done_with("after COMPLETED", "call", "publish"),
            ),
            f"{STALLS} after publishing": (stalls("after publish"),),
        },
    ),
    Table(
        "how-to/effect-follow-up-task.md",
        "the relay dies ...",
        "relaying",
        "then",
        {
            "before publishing": (dies("after take"), dies("before publish")),
            "after publishing, before deleting": (dies("after publish"), dies("before forget")),
            "after deleting": (dies("after forget"),),
        },
    ),
    Table(
        "how-to/effect-at-most-once.md",
        DEATHS,
        "texting",
        "then, with `AtMostOnce`",
        _of_step("text", "after claim", "before begin text"),
    ),
    Table(
        "how-to/effect-at-most-once.md",
        DEATHS,
        "posting",
        "then, with `AtLeastOnce`",
        _of_step("webhook", "after end text"),
    ),
]

CASES = [
    pytest.param(each, row, act, id=f"{each.scene}: {row}: {number}")
    for each in TABLES
    for row, acts in each.rows.items()
    for number, act in enumerate(acts, 1)
]


def test_every_row_of_every_page_is_acted_out() -> None:
    """No table and no row stands there without a scenario, and none is acted out that does not stand there."""
    acted = {(each.page, each.first_column): list(each.rows) for each in TABLES}
    documented = {
        (f"how-to/{page.name}", first_column): [row[first_column] for row in table(page, first_column)]
        for page in sorted(DOCS.glob("how-to/effect-*.md"))
        for first_column in re.findall(r"^\| ([^|]+) \|.*\n\|---", page.read_text(), re.MULTILINE)
    }

    assert documented == acted
    assert all(acts for each in TABLES for acts in each.rows.values())
    assert len(documented) == 8


@pytest.mark.parametrize(("of", "row", "act"), CASES)
def test_effects_are_as_many_as_the_page_says(of: Table, row: str, act: Act, request: pytest.FixtureRequest) -> None:
    """After the act, further deliveries and a duplicate, the receiver counts what the row says; all get one outcome."""
    scene: Scene = request.getfixturevalue(of.scene)
    (documented,) = (each for each in table(DOCS / of.page, of.first_column) if each[of.first_column] == row)

    act(scene)
    scene.goes_on()
    scene.afterwards()

    assert {column: count() for column, count in scene.counts.items()} == {
        column: int(re.findall(r"\d", documented[column])[0]) for column in scene.counts
    }
    outcomes = {(end.state, str(end.value)) for end in scene.play.ends if end.state != "RETRY"}
    unknown = "`UNKNOWN`" in documented[of.tells]
    assert scene.status is (Status.UNKNOWN if unknown else Status.COMPLETED)
    assert {state for state, _ in outcomes} <= {"FAILURE" if unknown else "SUCCESS"}
    assert len(outcomes) <= 1, "all that have an outcome have the same"
    if "reports its successor's outcome" in documented[of.tells]:
        assert {end.state for end in scene.play.ends} == {"SUCCESS"}


def test_dead_worker_does_nothing_more(paying: Scene) -> None:
    """Not even give its claim back, as the handlers of an exception would: the record stays as a kill leaves it."""
    dies("before call")(paying)

    assert paying.play.deliver() is None

    assert paying.status is Status.IN_PROGRESS


# -- stories


def test_request_that_hangs_past_the_memory_of_the_api_is_a_second_charge(refusing_past_the_window: Scene) -> None:
    """What the page warns of: it left within the window, and arrived when the key was forgotten."""
    scene = refusing_past_the_window

    def hang() -> None:
        scene.stage.ahead += 2 * HOUR

    comes(23, "after call")(scene)
    scene.stage.plan("before call", hang)
    scene.play.until_all_is_known()

    assert len(scene.names["gateway"].charges) == 2


def test_window_shorter_than_the_memory_of_the_api_is_the_remedy(set_scene: Setting) -> None:
    """The same worker, with room for the request that hangs: it is not sent, and a person decides."""

    def edit(block: str) -> str:
        return block.replace("hours=24)", 'hours=21), on_takeover="refuse"')

    scene = _windowed(set_scene, REFUSE, edit)

    comes(23, "after call")(scene)
    scene.play.until_all_is_known()

    assert len(scene.names["gateway"].charges) == 1
    assert scene.status is Status.UNKNOWN


def _half(scene: Scene, call: Callable[[Any, Any], Any]) -> None:
    """Let the scene's task do only half of what a fenced step does."""
    index = scene.names["index"]

    @scene.app.task(bind=True, base=IdempotentTask, shared=False, name="shop.half", idempotent=Policy(key="order_id"))
    def half(self: Any, order_id: str, text: str) -> Any:
        return current_attempt().step("index", lambda step: call(index, step))

    scene.play = Play(scene.stage, scene.app.tasks["shop.half"], "o-1", "text")


def _by_token(index: Index, step: Any) -> str:
    return index.add("o-1", step.key, "text", step.fencing_token)


def _by_probe(index: Index, step: Any) -> str:
    return index.find("o-1", step.key) or index.add("o-1", step.key, "text", None)


def test_token_alone_is_not_enough(publishing: Scene) -> None:
    """The story of the page: attempt 1 writes and dies, and attempt 2, with a larger token, writes again."""
    _half(publishing, _by_token)

    dies("after act")(publishing)
    publishing.play.until_all_is_known()

    assert len(publishing.names["index"].entries) == 2


def test_token_alone_shuts_out_late_writers(publishing: Scene) -> None:
    """What it is good for: a write that arrives after the next attempt's is refused."""
    _half(publishing, _by_token)

    is_refused("act", "after act")(publishing)
    publishing.play.until_all_is_known()

    assert len(publishing.names["index"].entries) == 1


def test_probe_alone_is_not_enough(publishing: Scene) -> None:
    """The story of the page: attempt 2 finds nothing and writes, and then the write of attempt 1 arrives."""
    _half(publishing, _by_probe)

    arrives("act", "after act")(publishing)
    publishing.play.until_all_is_known()

    assert len(publishing.names["index"].entries) == 2


def test_probe_alone_finds_what_has_arrived(publishing: Scene) -> None:
    """What it is good for: an effect that is there is not had again."""
    _half(publishing, _by_probe)

    dies("after act")(publishing)
    publishing.play.until_all_is_known()

    assert len(publishing.names["index"].entries) == 1


# -- the overview


@pytest.fixture
def checking_out(set_scene: Setting) -> Scene:
    """The task of docs/how-to/effects.md."""
    return set_scene(
        "how-to/effects.md", "check_out", "o-1", 500, gateway=Gateway, sms=partial(Line, point="text call")
    )


def test_guarantee_of_the_page_is_the_codes(checking_out: Scene) -> None:
    """What the page quotes is what the task of the page prints, word by word."""
    ((_, quoted),) = code(DOCS / "how-to/effects.md", "text")

    assert quoted == f"{checking_out.play.task.guarantee()}\n"


def test_finished_steps_are_not_repeated(checking_out: Scene) -> None:
    """A body that dies in its second step does not repeat the first one; a person's verdict goes on from there."""
    charges, texts = checking_out.names["gateway"].charges, checking_out.names["sms"].sent
    dies_done_with("before text call", "call")(checking_out)

    unknown = checking_out.play.settle()
    assert isinstance(unknown.value, OutcomeUnknown)
    checking_out.names["it_was_not_sent"](unknown.value.key)
    outcome = checking_out.play.settle()

    assert outcome.value == "ch_1"
    assert (len(charges), len(texts)) == (1, 1)
    assert checking_out.status is Status.COMPLETED


def test_verdict_that_it_happened_is_the_outcome(checking_out: Scene) -> None:
    """Every later delivery gets it, and nothing is called."""
    dies("after text call")(checking_out)
    unknown = checking_out.play.settle()
    assert isinstance(unknown.value, OutcomeUnknown)

    checking_out.names["it_was_sent"](unknown.value.key, "ch_1")
    checking_out.stage.close("call", "text call")
    outcome = checking_out.play.settle()

    assert outcome.value == "ch_1"
    assert len(checking_out.names["sms"].sent) == 1


KINDS = {each.__name__: each for each in (AtLeastOnce, AtMostOnce, Committed, Fenced, Keyed)}


def test_overview_promises_what_its_kinds_promise() -> None:
    """Each row names the kinds of effect that it is declared by, and no more than they promise; every kind is named."""
    rows = table(DOCS / "how-to/effects.md", "the effect is ...")
    declared = [re.findall(r"`(\w+)\(", row["declare it"]) for row in rows]

    assert {name for names in declared for name in names} == set(KINDS)
    for row, names in zip(rows, declared, strict=True):
        promises = [promise(KINDS[name]()) for name in names]
        assert [re.split("[,:]", each)[0] for each in promises] == re.findall(
            r"\w+ \w+ once|exactly once", row["promise"]
        )
