"""docs/how-to/effect-*.md are acted out: every row of every table, in order, on the task that its page defines.

A receiver behaves as its page says, a worker dies (or stalls, or gets no answer) where the row says, its message is
delivered again, and the effects are counted at the receiver.
"""
# mypy: allow-untyped-decorators

import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Column, String, create_engine, text
from sqlalchemy.orm import Session, declarative_base

from celery_idempotent import IdempotentTask, Policy, Status, StoreUnavailable, open_store, outbox
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce, Committed, Fenced, Keyed, promise
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.scenarios import WorkerDied
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
        self.effects: list[str] = []
        self._known: dict[str, tuple[int, str]] = {}

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> str:
        return self.stage.ask("call", partial(self._charge, idempotency_key))

    def _charge(self, key: str) -> str:
        since, charge = self._known.get(key, (-API_REMEMBERS, ""))
        if since + API_REMEMBERS <= self.stage.ahead:
            since, charge = self.stage.ahead, f"ch_{len(self.effects) + 1}"
            self.effects.append(charge)
            self._known[key] = since, charge
        return charge


class Index:
    """A search index: refuses who shows a smaller token than one it has seen, and finds entries by their key."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.effects: list[tuple[str, str]] = []
        self._fence = 0

    def raise_fence(self, order_id: str, token: int) -> None:
        self.stage.ask("fence", partial(self._raise, token))

    def find(self, order_id: str, key: str) -> str | None:
        return self.stage.ask("probe", lambda: next((entry for entry, of in self.effects if of == key), None))

    def add(self, order_id: str, key: str, text: str, token: int) -> str:
        return self.stage.ask("act", partial(self._add, key, token))

    def _add(self, key: str, token: int) -> str:
        if token < self._fence:
            raise PermissionError(f"{token} is smaller than {self._fence}")
        self._raise(token)
        self.effects.append((f"entry {len(self.effects) + 1}", key))
        return self.effects[-1][0]

    def _raise(self, token: int) -> None:
        self._fence = max(self._fence, token)


class Line:
    """A phone or an old API: does what it is told, as often as it is told, and remembers nothing."""

    def __init__(self, stage: Stage, point: str) -> None:
        self.stage, self.point = stage, point
        self.effects: list[str] = []

    def send(self, what: str) -> str:
        return self.stage.ask(self.point, lambda: self.effects.append(what) or "sent")  # type: ignore[func-returns-value]

    post = print = send


class Scene:
    """The task of a page on a stage, and its receivers: the blocks of the page are executed, edited where needed."""

    def __init__(
        self, page: str, task: str, *args: Any, store: Any = None, edit: tuple[str, str] = ("", ""), **receivers: Any
    ) -> None:
        self.stage, self.app, document = Stage(), an_app(), DOCS / f"how-to/effect-{page}.md"
        self.store = self.app.conf.idempotency_store = StagedStore(store or MemoryStore(), self.stage)
        self.receivers = {name: make(self.stage) for name, make in receivers.items()}
        self.names: dict[str, Any] = {"app": self.app, "__name__": "shop", **self.receivers}
        blocks = code(document, "python")
        assert any(edit[0] in block for _, block in blocks)
        for line, block in blocks:
            execute_block(document, line, block.replace(*edit) if edit[0] else block, self.names)
        self.play = Play(self.stage, self.app.tasks[f"shop.{task}"], *args)
        #: By column of the page's table, what counts its effects.
        self.counts: dict[str, Callable[[], int]] = {}
        #: What happens after the act; as a rule, further deliveries and a duplicate.
        self.goes_on: Callable[[], None] = self.play.until_all_is_known
        #: What a relay and other workers do, once the task itself is settled.
        self.afterwards: Callable[[], None] = lambda: None
        self.stalled = False

    def counting(self, column: str, receiver: str) -> "Scene":
        self.counts[column] = lambda: len(self.receivers[receiver].effects)
        return self

    @property
    def status(self) -> Status:
        """How the operation stands."""
        (record,) = (each for each in self.store.scan() if each.task == self.play.task.name)
        return record.status

    def receipts(self) -> list[Any]:
        """The messages that ask for one."""
        return [each for each in published(self.app) if each.headers["task"] == "shop.receipt"]


RERUN, REFUSE = "`Keyed(window=w)`", '`Keyed(window=w, on_takeover="refuse")`'


def paying(request: pytest.FixtureRequest, column: str = "charges") -> Scene:
    edit = ("hours=24)", 'hours=24), on_takeover="refuse"' if column == REFUSE else "hours=24)")
    return Scene("payment-api", "charge", "o-1", 500, gateway=Gateway, edit=edit).counting(column, "gateway")


def reserving(request: pytest.FixtureRequest) -> Scene:
    address = request.getfixturevalue("dynamodb_endpoint").removeprefix("http://")
    store = open_store(f"dynamodb://test:test@{address}/effects-{uuid4().hex}?region=us-east-1")
    assert isinstance(store, DynamoDBStore)
    store.provision()
    request.addfinalizer(store.close)
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

    scene = Scene("dynamodb-commit", "reserve", "o-1", sku, 7, store=store)
    scene.counts = {"effects": taken}
    return scene


def in_sql(request: pytest.FixtureRequest, url: str) -> tuple[SQLStore, Any]:
    """A store in that database, and an engine."""
    store = SQLStore(url, table=f"t_{uuid4().hex}")
    store.provision()
    engine = create_engine(store._url)
    request.addfinalizer(store.close)
    request.addfinalizer(engine.dispose)
    return store, engine


def booking(request: pytest.FixtureRequest) -> Scene:
    store, engine = in_sql(request, request.getfixturevalue("postgres").url)
    ledger, printed = f"ledger_{uuid4().hex}", list[str]()
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {ledger} (order_id VARCHAR(40), cents INTEGER)"))
    scene = Scene("sql-transaction", "book", "o-1", 500, store=store, edit=("INTO ledger ", f"INTO {ledger} "))

    @scene.app.task(base=IdempotentTask, shared=False, name="shop.receipt", idempotent=Policy(key="order_id"))
    def receipt(order_id: str) -> None:
        printed.append(order_id)

    def booked() -> int:
        with engine.connect() as connection:
            rows = int(connection.execute(text(f"SELECT COUNT(*) FROM {ledger}")).scalar_one())
        assert len(printed) == rows
        return rows

    def relay_and_work() -> None:
        while outbox.relay(scene.app):
            pass
        for message in scene.receipts():
            deliver(receipt, *message.payload[0], task_id=message.headers["id"])

    scene.names["receipt"] = receipt
    scene.counts, scene.afterwards = {"effects": booked}, relay_and_work
    return scene


def publishing(request: pytest.FixtureRequest) -> Scene:
    return Scene("fenced-resource", "publish", "o-1", "text", index=Index).counting("effects", "index")


def following(request: pytest.FixtureRequest, store: Any = None) -> Scene:
    """Publishing a receipt is a point of the stage; each time with the same task id and arguments."""
    receivers: dict[str, Any] = {"gateway": Gateway, "printer": partial(Line, point="print")}
    scene = Scene("follow-up-task", "pay", "o-1", 500, store=store, **receivers).counting("receipts", "printer")
    receipt, messages = scene.app.tasks["shop.receipt"], list[Any]()
    publish = receipt.apply_async
    receipt.apply_async = lambda *args, **kwargs: scene.stage.ask("publish", lambda: publish(*args, **kwargs))

    def work() -> None:
        messages.extend(scene.receipts())
        for message in messages:
            deliver(receipt, *message.payload[0], task_id=message.headers["id"])
        assert len({(message.headers["id"], str(message.payload[:2])) for message in messages}) == 1

    scene.counts["messages"], scene.afterwards = lambda: len(messages), work
    return scene


def relaying(request: pytest.FixtureRequest) -> Scene:
    """A web request has placed an order, and a relay that dies publishes its message."""
    store, engine = in_sql(request, f"sqlite:///{request.getfixturevalue('tmp_path')}/shop.sqlite")
    scene, base = following(request, store), declarative_base()
    order = type("Order", (base,), {"__tablename__": "orders", "id": Column(String(40), primary_key=True)})
    base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        scene.names["place_order"](session, order(id="o-1"))
    scene.play = Play(scene.stage, scene.app.tasks["shop.receipt"], "o-1")

    def goes_on() -> None:
        with pytest.raises(WorkerDied):
            outbox.relay(scene.app)
        scene.stage.revive()
        assert outbox.relay(scene.app) == 0, "what a dead relay had is back after a minute, not before"
        scene.stage.ahead += RELAY_HOLDS
        while outbox.relay(scene.app):
            pass
        assert scene.stage.unplayed == []

    scene.goes_on = goes_on
    return scene


def notifying(column: str, receiver: str, request: pytest.FixtureRequest) -> Scene:
    lines: dict[str, Any] = {"sms": partial(Line, point="text call"), "hook": partial(Line, point="webhook call")}
    return Scene("at-most-once", "notify", "o-1", **lines).counting(column, receiver)


Act = Callable[[Scene], None]
"""Plans what happens in a scene; before its first delivery, or instead of it."""


def nothing(scene: Scene) -> None:
    """Nobody dies; the duplicate comes."""


def dies(moment: str, *points: str, hours_later: int = 0) -> Act:
    """The worker dies at ``moment``, and nobody asks anything at ``points`` any more."""

    def act(scene: Scene) -> None:
        def die() -> None:
            scene.stage.close(*points)
            scene.stage.die()

        scene.stage.plan(moment, die)
        if hours_later:
            assert scene.play.deliver() is None
            scene.stage.ahead += hours_later * HOUR

    return act


def stalls(moment: str) -> Act:
    """The worker waits at ``moment`` until a successor has come to its end, and goes on."""

    def act(scene: Scene) -> None:
        scene.stalled = True
        scene.stage.plan(moment, scene.play.stall)

    return act


def arrives(point: str, *moments: str, refused: type[Exception] | None = None) -> tuple[Act, ...]:
    """The worker dies with a request on its way, which arrives at the next ``moment``, of another worker."""

    def act(scene: Scene, moment: str) -> None:
        def die() -> None:
            scene.stage.plan(moment, partial(let_arrive, scene.stage.sent[point]))
            scene.stage.die()

        scene.stage.plan(f"before {point}", die)

    def let_arrive(sent: Callable[[], object]) -> None:
        with pytest.raises(refused) if refused else nullcontext():
            sent()

    return tuple(partial(act, moment=each) for each in moments)


def fails(error: Exception) -> None:
    raise error


def delivered(scene: Scene) -> str:
    ended = scene.play.deliver()
    assert ended is not None, "its worker died"
    return ended.state


def gets_no_answer(*moments: str) -> Act:
    """The store's answer, or the request, is lost at each of ``moments``; the first delivery makes it certain."""

    def act(scene: Scene) -> None:
        for moment in moments:
            scene.stage.plan(moment, partial(fails, StoreUnavailable("store", "commit", "no answer")))
        assert delivered(scene) == "SUCCESS"

    return act


def is_undone(scene: Scene) -> None:
    """The database undoes a transaction at its commit, and the worker does not learn of it."""

    def undo() -> None:
        scene.stage.sent["commit"].__self__.rollback()  # type: ignore[attr-defined]  # a method of the transaction
        fails(StoreUnavailable("store", "commit", "no answer"))

    scene.stage.plan("before commit", undo)
    assert delivered(scene) == "RETRY"


def raises(moment: str) -> Act:
    """The call raises at ``moment``; another delivery follows."""

    def act(scene: Scene) -> None:
        scene.stage.plan(moment, partial(fails, TimeoutError()))
        assert delivered(scene) == "FAILURE"
        assert isinstance(scene.play.ends.pop().value, TimeoutError)

    return act


def of_step(step: str, *before: str) -> list[tuple[Act, ...]]:
    call = f"{step} call"
    return [
        tuple(map(dies, before)),
        (dies(f"before {call}"),),
        (dies(f"after {call}"),),
        (dies(f"before end {step}"),),
        (dies(f"after end {step}", call),),
        (stalls(f"before {call}"), stalls(f"after {call}")),
        (raises(f"after {call}"),),
    ]


CHARGE: list[tuple[Act, ...]] = [
    (dies("after claim"),),
    (dies("before call"),),
    arrives("call", "after call", "after end charge", "after COMPLETED"),
    (dies("after call"), *arrives("call", "before call")),
    (dies("before end charge"),),
    (dies("after end charge", "call"), dies("before COMPLETED", "call")),
    (dies("after COMPLETED", "call"), nothing),
    (stalls("before call"), stalls("after call"), stalls("before COMPLETED")),
]
WINDOW: list[tuple[Act, ...]] = [
    (dies(when, hours_later=hours),) for hours in (23, 24) for when in ("before call", "after call")
]
COMMIT: list[tuple[Act, ...]] = [
    (dies("after claim"), dies("before commit")),
    (dies("after commit", "commit"), *arrives("commit", "before claim")),
    arrives("commit", "after claim", "before commit", "after commit"),
    (nothing,),
    tuple(
        gets_no_answer(*at) for at in (["before commit"], ["after commit"], ["after commit"] * 2 + ["before commit"])
    ),
    (stalls("after claim"), stalls("before commit")),
]
WITHIN = ("before record in the transaction", "after message in the transaction")
TRANSACTION: list[tuple[Act, ...]] = [
    tuple(map(dies, (*WITHIN, "after transaction", "after record in the transaction"))),
    (dies("before commit"),),
    (dies("after commit"),),
    (nothing,),
    tuple(map(stalls, (*WITHIN, "before transaction"))),
    (gets_no_answer("after commit"), is_undone),
]
late = partial(arrives, refused=PermissionError)
FENCED: list[tuple[Act, ...]] = [
    (dies("after claim"), dies("before fence")),
    arrives("fence", "after fence", "before act", "after act"),
    (dies("after fence"), dies("after probe"), dies("before act")),
    arrives("act", "before fence", "after claim"),
    late("act", "after fence", "after probe", "after act", "after COMPLETED"),
    (dies("after act"), dies("before end index")),
    (dies("after end index", "fence", "probe", "act"),),
    (stalls("after probe"), stalls("before act")),
]
RECEIPT: list[tuple[Act, ...]] = [
    (dies("after end charge"), dies("before publish")),
    (dies("after publish"), dies("before end receipt")),
    (dies("after end receipt", "call", "publish"), dies("after COMPLETED", "call", "publish")),
    (stalls("after publish"),),
]
RELAY: list[tuple[Act, ...]] = [
    (dies("after take"), dies("before publish")),
    (dies("after publish"), dies("before forget")),
    (dies("after forget"),),
]

DIES, COMES, RELAYS = "the worker dies ...", "the next attempt comes ...", "the relay dies ..."
TABLES: list[tuple[str, str, Callable[[pytest.FixtureRequest], Scene], list[tuple[Act, ...]]]] = [
    ("payment-api", DIES, paying, CHARGE),
    ("payment-api", COMES, partial(paying, column=RERUN), WINDOW),
    ("payment-api", COMES, partial(paying, column=REFUSE), WINDOW),
    ("dynamodb-commit", DIES, reserving, COMMIT),
    ("sql-transaction", DIES, booking, TRANSACTION),
    ("fenced-resource", DIES, publishing, FENCED),
    ("follow-up-task", DIES, following, RECEIPT),
    ("follow-up-task", RELAYS, relaying, RELAY),
    ("at-most-once", DIES, partial(notifying, "texts", "sms"), of_step("text", "after claim", "before begin text")),
    ("at-most-once", DIES, partial(notifying, "posts", "hook"), of_step("webhook", "after end text")),
]
"""A page, a table on it, its scene, and by row one or more acts that the row speaks of."""

CASES = [
    pytest.param(scene, row, act, id=f"{page}-{len(rows)}-{number}-{row[first_column]}-{index}")
    for number, (page, first_column, scene, rows) in enumerate(TABLES)
    for row, acts in zip(table(DOCS / f"how-to/effect-{page}.md", first_column), rows, strict=True)
    for index, act in enumerate(acts)
]


def test_every_table_of_every_page_is_acted_out() -> None:
    """Each of their rows is, as the pairs of :data:`CASES` are strict."""
    acted = {(page, first_column) for page, first_column, *_ in TABLES}
    documented = {
        (page.stem.removeprefix("effect-"), first_column)
        for page in sorted(DOCS.glob("how-to/effect-*.md"))
        for first_column in re.findall(r"^\| ([^|]+) \|.*\n\|---", page.read_text(), re.MULTILINE)
    }
    assert documented == acted


@pytest.mark.parametrize(("scene_of", "row", "act"), CASES)
def test_effects_are_as_many_as_the_page_says(
    request: pytest.FixtureRequest,
    unchanged_celery: None,
    scene_of: Callable[[pytest.FixtureRequest], Scene],
    row: dict[str, str],
    act: Act,
) -> None:
    """After the act, further deliveries and a duplicate, the receiver counts what the row says; all get one outcome."""
    scene, columns = scene_of(request), list(row)

    act(scene)
    scene.goes_on()
    scene.afterwards()

    told = {column: row[columns[columns.index(column) - 1]] + row[column] for column in scene.counts}
    unknown = any("`UNKNOWN`" in each for each in told.values())
    outcomes = {(end.state, str(end.value)) for end in scene.play.ends if end.state != "RETRY"}
    assert {column: count() for column, count in scene.counts.items()} == {
        column: int(re.findall(r"\d", row[column])[0]) for column in scene.counts
    }
    assert scene.status is (Status.UNKNOWN if unknown else Status.COMPLETED)
    assert {state for state, _ in outcomes} <= {"FAILURE" if unknown else "SUCCESS"}
    assert len(outcomes) <= 1, "all that have an outcome have the same"
    if scene.stalled and not unknown:
        assert {end.state for end in scene.play.ends} == {"SUCCESS"}, "the stalled one reports its successor's"


KINDS = {each.__name__: each for each in (AtLeastOnce, AtMostOnce, Committed, Fenced, Keyed)}


def test_overview_promises_what_its_kinds_promise() -> None:
    """Each row names the kinds of effect that declare it, and no more than they promise; every kind is named."""
    rows = table(DOCS / "how-to/effects.md", "the effect is ...")
    declared = [re.findall(r"`(\w+)\(", row["declare it"]) for row in rows]

    assert {name for names in declared for name in names} == set(KINDS)
    for row, names in zip(rows, declared, strict=True):
        promises = [re.split("[,:]", promise(KINDS[name]()))[0] for name in names]
        assert promises == re.findall(r"\w+ \w+ once|exactly once", row["promise"])
