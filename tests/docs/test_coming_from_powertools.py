"""The page on coming from Powertools is acted out: its code, and every row of a move while both run."""
# mypy: allow-untyped-decorators

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from queue import Queue
from threading import Event
from typing import Any
from uuid import uuid4

import boto3
import pytest
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)

from celery_idempotent import KeyMissing, Policy, current_attempt, idempotent, open_store
from celery_idempotent.stores.memory import MemoryStore
from tests.support.documents import DOCS, code, execute_block, table

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:aws_lambda_powertools"),
    pytest.mark.filterwarnings("ignore:Couldn't determine the remaining time left"),
]

PAGE = DOCS / "how-to/from-powertools.md"
ROW = "while both run"
ORDER = {"id": "o-1", "cents": 500}

KILLED = """
import os, sys
from tests.docs.test_coming_from_powertools import Scene

Scene(sys.argv[1], sys.argv[2], lambda: os._exit(9)).functions[sys.argv[3]](order={"id": "o-1", "cents": 500})
"""


@dataclass
class Scene:
    """The page's functions on an emulated DynamoDB; ``act`` is the effect."""

    endpoint: str
    name: str
    act: Callable[[], object]
    functions: dict[str, Callable[..., Any]] = field(init=False)
    client: Any = field(init=False)

    def __post_init__(self) -> None:
        self.client = boto3.client(
            "dynamodb",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        names: dict[str, Any] = {"client": self.client, "act": self.act, "__name__": "shop"}
        ((line, block),) = code(PAGE, "python")
        for written, here in (
            ('table_name="orders"', f'table_name="theirs-{self.name}"'),
            ('boto_config=Config(region_name="eu-west-1")', "boto3_client=client"),
            ('"dynamodb://@eu-west-1/idempotency"', repr(self.url)),
            ("    return {", "    act()\n    return {"),
        ):
            assert written in block
            block = block.replace(written, here)
        execute_block(PAGE, line, block, names)
        self.functions = {name: names[name] for name in ("old", "both", "new")}

    @property
    def url(self) -> str:
        return f"dynamodb://test:test@{self.endpoint.removeprefix('http://')}/ours-{self.name}?region=us-east-1"

    def provision(self) -> None:
        self.client.create_table(
            TableName=f"theirs-{self.name}",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )
        with closing(open_store(self.url)) as store:
            store.provision()


@dataclass
class Effect:
    """Counts itself, and waits where it is told to."""

    times: int = 0
    is_held: bool = False
    began: Queue[int] = field(default_factory=Queue)
    may_end: Event = field(default_factory=Event)

    def __call__(self) -> None:
        self.times += 1
        self.began.put(self.times)
        if self.is_held and self.times == 1:
            assert self.may_end.wait(60)


@pytest.fixture
def effect() -> Effect:
    return Effect()


@pytest.fixture
def scene(dynamodb_endpoint: str, effect: Effect) -> Scene:
    """The page's functions, with empty tables."""
    scene = Scene(dynamodb_endpoint, uuid4().hex, effect)
    scene.provision()
    return scene


def _gets(function: Callable[..., Any], effect: Effect) -> str:
    """What a call gets, in the words of the page."""
    before = effect.times
    try:
        assert function(order=ORDER) == {"charged": 500}
    except Exception as error:  # noqa: BLE001 - whatever it is, the page names it
        told = f"`{type(error).__name__}`"
    else:
        told = "the result"
    return "**a second body**" if effect.times > before else f"{told}; no body"


@pytest.mark.parametrize("row", table(PAGE, ROW), ids=lambda row: row[ROW])
def test_call_while_both_run(scene: Scene, effect: Effect, row: dict[str, str]) -> None:
    """A first call by one, and what the last one gets."""
    happens = row[ROW].split(" ")[0]
    first, *others = re.findall("`(.+?)`", row[ROW])

    if happens == "killed":
        arguments = [scene.endpoint, scene.name, first]
        killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, *arguments], check=False, timeout=120)
        assert killed.returncode == 9
        told = [_gets(scene.functions[each], effect) for each in others]
    else:
        effect.is_held = happens == "running"
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(scene.functions[first], order=ORDER)
            assert effect.began.get(timeout=60) == 1
            if happens == "completed":
                running.result(60)
            told = [_gets(scene.functions[each], effect) for each in others]
            effect.may_end.set()

    assert told[-1] == row["the second call gets"]


def test_result_that_powertools_loses_is_recorded_as_it_comes_back(scene: Scene) -> None:
    """As the page warns: 0 comes back as None, and what has both guards records that."""
    theirs = _theirs(scene)(lambda order: 0)
    assert theirs(order=ORDER) == 0

    both = idempotent(Policy("order.id"), store=scene.url, name="zero")
    assert both(theirs)(order=ORDER) is None
    assert both(lambda order: 0)(order=ORDER) is None


def test_lookup_in_place_of_the_claim_leaves_a_window(scene: Scene, effect: Effect) -> None:
    """As the page says: who only reads Powertools' record is overtaken by an old process."""

    def asking(order: dict[str, Any]) -> None:
        found = scene.client.scan(TableName=f"theirs-{scene.name}", ConsistentRead=True)
        assert not found["Items"], "nobody has done it"
        scene.functions["old"](order=order)  # an old process, right now
        effect()

    idempotent(Policy("order.id"), store=scene.url, name="shop.charge")(asking)(order=ORDER)

    assert effect.times == 2


def test_body_with_both_guards_has_its_attempt(scene: Scene) -> None:
    """Powertools stands between the claim and the body, and takes nothing from it."""
    both = idempotent(Policy("order.id"), store=scene.url, name="attempt")

    assert both(_theirs(scene)(lambda order: current_attempt().effect_key("charge")))(order=ORDER)


# -- why the table is not shared


def _theirs(scene: Scene, **options: Any) -> Any:
    layer = DynamoDBPersistenceLayer(table_name=f"theirs-{scene.name}", boto3_client=scene.client)
    config = IdempotencyConfig(**options)
    return lambda body: idempotent_function(
        body, data_keyword_argument="order", persistence_store=layer, config=config, key_prefix=scene.name
    )


def test_powertools_completes_and_takes_back_without_a_condition(scene: Scene) -> None:
    """Only its claim has one."""
    conditions: dict[str, set[bool]] = {}

    def seen(params: dict[str, Any], model: Any, **told: Any) -> None:
        conditions.setdefault(model.name, set()).add("ConditionExpression" in params)

    scene.client.meta.events.register("provide-client-params.dynamodb", seen)

    def refusing(order: Any) -> None:
        raise ValueError(order)

    _theirs(scene)(lambda order: 1)(order={"id": 1})
    with pytest.raises(ValueError, match="2"):
        _theirs(scene)(refusing)(order={"id": 2})

    assert conditions == {"PutItem": {True}, "UpdateItem": {False}, "DeleteItem": {False}}


@pytest.mark.parametrize(
    ("one", "other", "is_one_there", "is_one_here"),
    [
        (1, "1", False, False),
        (1, 1.0, False, False),
        ({1: "a"}, {"1": "a"}, True, False),
        (Decimal("1.0"), "1.0", True, False),
    ],
)
def test_what_is_one_key_there(scene: Scene, one: Any, other: Any, is_one_there: bool, is_one_here: bool) -> None:
    """By the MD5 of the payload as JSON; here a value has its type."""
    there = _theirs(scene)(lambda order: repr(order))
    here: Any = idempotent(Policy(), store=MemoryStore(), name="here")(lambda order: None)

    assert (there(order={"value": one}) == there(order={"value": other})) is is_one_there
    keys = [here.idempotency_key_for(order={"value": each}) for each in (one, other)]
    assert (keys[0] == keys[1]) is is_one_here


# -- options


def test_handler_names_its_event_alone() -> None:
    """A Lambda context is another object in every invocation; the body of an event may be JSON."""
    effect = Effect()

    def handler(event: dict[str, Any], context: object) -> None:
        effect()

    plain = idempotent(Policy("event.id", fingerprint="event"), store=MemoryStore(), name="plain")(handler)
    parsed = idempotent(
        Policy(lambda event, context: json.loads(event["body"])["id"], fingerprint="event"),
        store=MemoryStore(),
        name="parsed",
    )(handler)

    for _ in range(2):
        plain({"id": "o-1"}, object())
        parsed({"body": '{"id": "o-1"}'}, object())

    assert effect.times == 2


def test_every_part_of_a_key_must_be_there(scene: Scene) -> None:
    """Powertools takes a key of which a part is missing, and gives one tenant what another one did."""
    there = _theirs(scene, event_key_jmespath="[tenant, id]", raise_on_no_idempotency_key=True)(
        lambda order: order["of"]
    )
    here: Any = idempotent(Policy(("order.tenant", "order.id")), store=MemoryStore(), name="here")(
        lambda order: order["of"]
    )

    assert [there(order={"id": 1, "of": tenant}) for tenant in "ab"] == ["a", "a"]
    with pytest.raises(KeyMissing):
        here(order={"id": 1, "of": "a"})


def test_argument_is_passed_in_any_way(scene: Scene) -> None:
    """Powertools wants it by keyword."""
    here: Any = idempotent(Policy("order.id"), store=MemoryStore(), name="here")(lambda order: uuid4().hex)

    with pytest.raises(RuntimeError, match="keyword argument"):
        _theirs(scene)(lambda order: 1)(ORDER)
    assert here(ORDER) == here(order=ORDER)
