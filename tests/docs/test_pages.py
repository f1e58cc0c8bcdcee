"""README.md and the pages: their code runs, their commands exist, their tables and pictures are the code's."""
# mypy: allow-untyped-decorators

import ast
import configparser
import dataclasses
import importlib
import inspect
import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock
from uuid import UUID
from xml.etree import ElementTree

import click
import pydantic
import pytest
import yaml
from celery.utils.dispatch import Signal

import celery_idempotent
import pytest_celery_idempotent
from celery_idempotent import Attempt, IdempotentTask, Policy, Status, open_store, signals, stores
from celery_idempotent.engine.events import EventName
from celery_idempotent.integration import settings
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.headers import HEADERS, KEY_HEADER
from celery_idempotent.protocol.canonical import canonical
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.redis import client as redis_client
from celery_idempotent.stores.sql.drivers import _DRIVERS
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE
from celery_idempotent.stores.sql.store import SQLStore
from celery_idempotent.testing.effects import Promise, assert_effect_once
from tests.support.deliveries import an_app
from tests.support.documents import DOCS, DOCUMENTS, ROOT, code, execute_block, table, words
from tests.support.layers import FLOORS, MAY_USE, MODULES
from tests.support.messages import entries, linked

SOURCE = "\n".join(path.read_text() for path in Path(celery_idempotent.__file__).parent.rglob("*.py"))
_CONTEXT = click.Context(idempotency)
COMMANDS: dict[str, Any] = {
    name: idempotency.get_command(_CONTEXT, name) for name in idempotency.list_commands(_CONTEXT)
}
GATEWAY = Mock(**{"charge.return_value": "ch_1"})
"""A payment provider."""
by_page = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))


def _prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """Of headings, as GitHub and MyST write them, and those that are written out."""
    heads = re.findall(r"^#+ (.+)$", _prose(document), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts} | set(
        re.findall(r'id="([^"]+)"', _prose(document))
    )


@by_page
def test_links_lead_to_what_is_there(document: Path) -> None:
    """To files of the repository and headings of its pages; the site is built at night."""
    dead = []
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", _prose(document)):
        path, _, anchor = target.partition("#")
        there = document.parent / path if path else document
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in _anchors(there)):
            dead.append(target)
    assert dead == []


@by_page
def test_python_blocks_run(document: Path, unchanged_celery: None) -> None:
    """A reader can paste them: every block runs after those before it, and programs compile."""
    # A page may show a task first and the settings of its app later.
    blocks = sorted(code(document, "python"), key=lambda block: "app = Celery(" not in block[1])
    names: dict[str, Any] = {"app": an_app(), "gateway": GATEWAY, "__name__": document.stem}
    for line, text in blocks:
        execute_block(document, line, text, names)
        if "app = Celery(" in text:
            names["app"].conf.idempotency_store = open_store("memory://")
    for _, text in code(document, "py"):
        ast.parse(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "yaml": yaml.safe_load,
    "json": json.loads,
    "toml": tomllib.loads,
    "ini": lambda text: configparser.ConfigParser().read_string(text),
}


@by_page
def test_commands_and_configurations_are_understood(document: Path) -> None:
    """Commands, options, targets of make, extras and files are there, and configurations are of their language."""
    makefile, setup = (ROOT / "Makefile").read_text(), (ROOT / "setup.cfg").read_text()
    for language, parse in PARSERS.items():
        for _, text in code(document, language):
            parse(text)
    for line in "\n".join(text for _, text in code(document, "sh")).splitlines():
        command = line.split("#")[0]
        for name in re.findall(r"^make (\w+)", command):
            assert f"\n{name}:" in makefile, line
        for name in re.findall(r"celery-idempotent\[(\w+)\]", command):
            assert re.search(rf"^{name} =$", setup, re.MULTILINE), line
        for name, rest in re.findall(r"celery -A \w+ idempotency ([\w-]+)(.*)", command):
            assert set(re.findall(r"--[\w-]+", rest)) <= {each for one in COMMANDS[name].params for each in one.opts}
        for name in re.findall(r"--template-file (\S+)", command):
            assert (ROOT / name).is_file(), line


@by_page
def test_nothing_is_documented_that_does_not_exist(document: Path) -> None:
    """Names in backticks that look like ours are ours."""
    known = {
        *(*settings.SETTINGS, *HEADERS, TABLE, OUTBOX, f"{OUTBOX}_number_seq", *pytest_celery_idempotent.__all__),
        *(name for name in dir(IdempotentTask) if name.startswith("idempotency_")),
        *(f"idempotency_{field}" for field in ("event", "task", "key")),  # of a record of the log
    }
    fields = {each.name for each in dataclasses.fields(Policy)}
    metrics = {row["metric"].strip("`") for row in table(DOCS / "how-to/telemetry.md", "metric")}
    told = metrics | {f"celery_idempotent.{name}" for name in (*EventName, "event", "stores", "objects")}
    for word in words(document):
        for dotted in set(re.findall(r"^celery_idempotent(?:\.\w+)+$", word)) - told:
            assert _exists(dotted), word
        for name in re.findall(r"(?<!/)\battempt\.(\w+)", word):
            assert hasattr(Attempt, name), word
        for name in re.findall(r"\bPolicy\(([^)]*)", word):
            assert set(re.findall(r"(\w+)=", name)) <= fields, word
        for name in re.findall(r"\b(idempotency_\w+)", word):
            assert name in known, word
        for name in re.findall(r"^CELERY_(IDEMPOTENCY_\w+)$", word):
            assert name.lower() in known, word
        for name in re.findall(r'^(\w+)="', word):
            assert name in {*fields, KEY_HEADER, "namespace"}, word
        for name in re.findall(r"-A \w+ idempotency ([\w-]+)", word):
            assert name in COMMANDS, word


def _exists(dotted: str) -> bool:
    try:
        return bool(importlib.import_module(dotted))
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return hasattr(importlib.import_module(module), name)


QUIET = set(re.findall(r'say\(\s*(?:logger\.(?:info|debug)|partial\(logger\.log, level, .*\)),\s*"(\w+)"', SOURCE))
REDIS = {*redis_client._OPTIONS, *redis_client._OPTIONS_OF_TLS, *redis_client._OPTIONS_OF_SENTINEL}
KEYWORDS = inspect.signature(assert_effect_once).parameters.values()
NAME = r"^`(\w+)`"
TABLES: list[tuple[str, str, str, Iterable[str]]] = [
    # page, head of the table, what is a name in its first column, and the names in the code
    ("reference/policy", "field", NAME, [each.name for each in dataclasses.fields(Policy)]),
    ("reference/record", "record field", NAME, [each.name for each in dataclasses.fields(Record)]),
    ("reference/record", "status", NAME, Status),
    ("reference/settings", "setting", NAME, settings.SETTINGS),
    ("reference/signals", "signal", NAME, [name for name, value in vars(signals).items() if isinstance(value, Signal)]),
    ("reference/signals", "event", r"`idempotency\.(\w+)`", QUIET),
    ("reference/cli", "command", r"^`([\w-]+)", COMMANDS),
    ("how-to/dynamodb", "option | default", NAME, inspect.signature(DynamoDBStore).parameters),
    ("how-to/sql", "option | default", NAME, inspect.signature(SQLStore).parameters),
    ("how-to/sql", "URL", r"^`(\w+\+\w+):", [f"{sql}+{driver}" for sql in _DRIVERS for driver in _DRIVERS[sql]]),
    ("how-to/redis", "option | for", r"`(\w+)`", REDIS | {"db", "virtual_host"}),
    ("how-to/testing", "argument", NAME, [each.name for each in KEYWORDS if each.kind is each.KEYWORD_ONLY]),
    ("how-to/testing", "promise", r"^`([\w ]+)`", get_args(Promise)),
]


@pytest.mark.parametrize(
    ("page", "head", "pattern", "names"), TABLES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_table_has_every_name_of_code_and_no_other(page: str, head: str, pattern: str, names: Iterable[str]) -> None:
    """Fields, settings, events, commands, options."""
    column, *_ = head.split(" | ")
    documented = [name for row in table(DOCS / f"{page}.md", head) for name in re.findall(pattern, row[column])]
    assert sorted(documented) == sorted(map(str, names))


@pytest.mark.parametrize(
    ("page", "of"), [("reference/policy", Policy), ("how-to/dynamodb", DynamoDBStore), ("how-to/sql", SQLStore)]
)
def test_defaults_are_the_codes(page: str, of: Any) -> None:
    """As the author of a policy or a store's URL gets them."""
    policy, column = (vars(Policy()), "field") if of is Policy else ({}, "option")
    for row in table(DOCS / f"{page}.md", column if of is Policy else "option | default"):
        name = row[column].strip("`")
        default = inspect.signature(of).parameters[name].default
        if row["default"].startswith("`"):
            assert eval(row["default"].strip("`"), {"timedelta": timedelta}) == policy.get(name, default), name


def test_levels_of_events_are_the_codes() -> None:
    """Of those that are signals."""
    rows = table(DOCS / "reference/signals.md", "signal")
    levels = {row["signal"].strip("`"): logging.getLevelName(row["log level"]) for row in rows}
    assert levels == {str(each): each.level for each in EventName}


def test_options_of_commands_are_the_codes() -> None:
    """Every one, no other; all commands but ``web`` print JSON, which is said once."""
    page = DOCS / "reference/cli.md"
    common = {
        "FILTERS": " ".join(row["filter"] for row in table(page, "filter")),
        "VERDICT": " ".join(row["verdict option"] for row in table(page, "verdict option")),
    }
    for row in table(page, "command"):
        name, written = re.findall(r"`([\w-]+) ?(.*)`", row["command"])[0]
        written = re.sub("|".join(common), lambda found: common[found[0]], written)
        documented = set(re.findall(r"--[\w-]+", written)) | ({"--json"} if name != "web" else set())
        options_of = (each for each in COMMANDS[name].params if isinstance(each, click.Option))
        assert documented == {option for each in options_of for option in each.opts}, name


@pytest.mark.parametrize(("page", "head"), [("set-up", "`idempotency_store`"), ("sql", "URL"), ("redis", "form")])
def test_urls_of_stores_open(page: str, head: str, tmp_path: Path) -> None:
    """Each as it stands there; the built-in schemes are all of them."""
    (tmp_path / "ca.pem").touch()
    urls = [
        url for row in table(DOCS / f"how-to/{page}.md", head) for url in re.findall("`([^`]+://[^`]*)`", row[head])
    ]
    for url in urls[:1] if page == "sql" else urls:  # not every driver is installed
        if url != "django://default" and re.search(r"://.", url):  # that is opened in tests/django
            assert open_store(url.replace("/etc/ssl/ca.pem", str(tmp_path / "ca.pem")))
    if page == "set-up":
        schemes = {url.split(":")[0] for url in urls}
        built_in = {each if each in stores._BUILT_IN else each.partition("+")[0] for each in schemes}
        assert built_in == set(stores._BUILT_IN) - {"db"}


def test_rooms_and_steps_of_the_architecture_are_in_the_source() -> None:
    """What each room and floor may import from, and where each step of a delivery is."""
    page = DOCS / "architecture.md"
    rooms = {row["room"].strip("`"): set(re.findall("`(.+?)`", row["may import from"])) for row in table(page, "room")}
    floors = [re.findall("`(.+?)`", row["floor of `integration`"]) for row in table(page, "floor of `integration`")]
    modules = {name.split(".")[1] for name in MODULES if name.startswith("integration.")}
    assert rooms == MAY_USE
    assert [name for row in floors[1:] for name in row] == list(FLOORS)
    assert {*floors[0], *FLOORS, "__init__"} == modules
    for row in table(page, "file | function"):
        path = ROOT / "celery_idempotent" / re.findall("`(.+?)`", row["file"])[0]
        owner, _, name = row["function"].strip("`").rpartition(".")
        scope: Any = ast.parse(path.read_text())
        for each in filter(None, (owner, name)):
            scope = next(node for node in scope.body if getattr(node, "name", "") == each)


def test_every_message_has_its_entry() -> None:
    """A new error, option, warning or event needs one, and none is left behind when its cause goes."""
    assert entries().keys() == linked()


class Color(Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Price(pydantic.BaseModel):
    amount: Decimal


TYPES = (Color, Point, Price, Decimal, UUID, date, datetime, timedelta, timezone)
VALUES: dict[str, Any] = {"UTC": UTC, **{each.__name__: each for each in TYPES}}
"""What the table of equal values names."""


def test_values_that_equal_are_the_documented_ones() -> None:
    """Each pair has one canonical form, or two, as the table says."""
    for row in table(DOCS / "how-to/keys.md", "one value"):
        one, other = (eval(re.findall("`([^`]*)`", row[name])[0], dict(VALUES)) for name in ("one value", "another"))
        assert (canonical(one) == canonical(other)) is row["one key?"].startswith("yes"), row


def test_words_of_a_promise_are_the_codes(unchanged_celery: None) -> None:
    """What the page shows is what its task prints."""
    page, names = DOCS / "how-to/effects.md", {"app": an_app(), "gateway": GATEWAY, "__name__": "shop"}
    execute_block(page, *code(page, "python")[0], names)
    assert code(page, "text")[0][1] == f"{names['app'].tasks['shop.check_out'].guarantee()}\n"


@pytest.mark.parametrize(
    ("picture", "page", "first_column", "saying"),
    [
        ("rooms", "architecture.md", "room", "{0} imports from {2}"),
        ("which-tool", "how-to/effects.md", "the effect is ...", "{0}: {1}, declared {2}, {3}"),
    ],
)
def test_a_picture_says_what_the_table_beside_it_says(picture: str, page: str, first_column: str, saying: str) -> None:
    """To those who see it, and to those who cannot."""
    rows = [[each.replace("`", "") for each in row.values()] for row in table(DOCS / page, first_column)]
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(DOCS / "pictures" / f"{picture}.svg").getroot()
    assert (
        root.findtext(f"{svg}desc")
        == "; ".join(saying.format(*(cell or "no other room" for cell in row)) for row in rows) + "."
    )
    seen = {word for each in root.iter(f"{svg}text") for word in (each.text or "").split()}
    assert {word for row in rows for cell in row[: saying.count("{") - 1] for word in cell.split()} <= seen


def test_pictures_are_small_and_whole() -> None:
    """They load nothing, and have words for those who cannot see them."""
    svg = "{http://www.w3.org/2000/svg}"
    tags = {"svg", "title", "desc", "style", "rect", "text", "tspan", "line", "circle", "polyline", "polygon"}
    for path in (DOCS / "pictures").glob("*.svg"):
        text, root = path.read_text(), ElementTree.parse(path).getroot()
        assert len(text) < 120_000, path
        assert {each.tag.removeprefix(svg) for each in root.iter()} <= tags, path
        assert re.findall(r"(?:href|src|url\()", text) == [], path
        assert all(root.findtext(f"{svg}{tag}") for tag in ("title", "desc")), path
