"""Log lines for machines: logfmt that a parser takes, fields on the record, and JSON made of them."""

import ast
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import logfmtkv
import pytest
from celery import Celery

import celery_idempotent
from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.printable import say
from celery_idempotent.testing import FakeStore
from celery_idempotent.troubleshooting import link
from tests.support.deliveries import an_app, deliver
from tests.support.documents import DOCS, code, execute_block
from tests.support.links import unlinked

SAID = logging.getLogger("celery_idempotent.of_this_test")
HOSTILE = [
    "",
    " ",
    "a b",
    'say "no"',
    "a=b",
    "back\\slash",
    "\\",
    '\\"',
    "a\nb level=ERROR",
    "\x1b[2J",
    "\ufffd",
    "é 漢",
    "{}%s",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_any_value_is_read_back_as_it_stands_on_the_record(value: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a parser as strict as Go's: no value ends early, opens another field, or breaks the line."""
    say(SAID.warning, "tick", entry=value, task="shop.report")

    (record,) = caplog.records
    line = logfmtkv.parse(record.getMessage(), strict=True, duplicates="error")
    fields = {"entry": vars(record)["idempotency_entry"], "task": "shop.report", "see": link("log-lines#tick")}
    assert line == {"event": "idempotency.tick", **fields}
    assert record.getMessage().isprintable()


def test_numbers_stay_numbers_and_nothing_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A formatter can add and compare what a record has; what is not known is no field at all."""
    say(SAID.warning, "hold_failed", messages=3, observed=True, token=None, queue="")

    (record,) = caplog.records
    ours = {name: value for name, value in vars(record).items() if name.startswith("idempotency_")}
    assert ours == {
        "idempotency_event": "idempotency.hold_failed",
        "idempotency_messages": 3,
        "idempotency_observed": True,
        "idempotency_queue": "",
        "idempotency_see": link("log-lines#hold-failed"),
    }
    assert unlinked(record.getMessage()) == 'event=idempotency.hold_failed messages=3 observed=true queue=""'


@pytest.mark.parametrize("loud", [SAID.warning, SAID.error, SAID.exception, partial(SAID.log, logging.WARNING)])
def test_a_warning_ends_with_the_address_of_its_entry(loud: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is woken by it has one more click to go."""
    say(loud, "hold_failed", queue="orders")

    (line,) = caplog.messages
    assert line.endswith(f" see={link('log-lines#hold-failed')}")


@pytest.mark.parametrize("quiet", [SAID.debug, SAID.info, partial(SAID.log, logging.INFO)])
def test_a_line_that_asks_for_nothing_has_no_address(quiet: Any, caplog: pytest.LogCaptureFixture) -> None:
    """There is no entry that it could lead to."""
    with caplog.at_level(logging.DEBUG, SAID.name):
        say(quiet, "hold_recovered", queue="orders")

    assert caplog.messages == ["event=idempotency.hold_recovered queue=orders"]


def _nameless(told: list[str]) -> Any:
    """A method as a mock and many a proxy of a logger has it."""
    log = MagicMock(side_effect=lambda template, *values, **options: told.append(template % values))
    assert not hasattr(log, "__name__")
    return log


@pytest.mark.parametrize(
    "wrapped",
    [
        _nameless,
        lambda told: partial(_nameless(told)),
    ],
)
def test_a_log_of_another_kind_fails_nothing(wrapped: Callable[[list[str]], Any]) -> None:
    """A test or a tracer puts its own in a logger's place; at worst the line has one field too many."""
    told: list[str] = []

    say(wrapped(told), "tick", entry="a")

    assert told == [f"event=idempotency.tick entry=a see={link('log-lines#tick')}"]


def test_a_line_tells_where_it_was_logged_and_is_grouped_by_its_template(caplog: pytest.LogCaptureFixture) -> None:
    """Trackers of errors group by the template, and people look for the line of code."""
    say(SAID.warning, "tick", entry="a")
    say(SAID.warning, "tick", entry="b")

    first, second = caplog.records
    assert first.msg == second.msg == "event=idempotency.tick entry=%s see=%s"
    assert first.funcName == "test_a_line_tells_where_it_was_logged_and_is_grouped_by_its_template"


def _log_calls(path: Path) -> Iterator[str]:
    """The calls of a logger's methods that a module makes itself."""
    methods = {"debug", "info", "warning", "error", "exception", "critical", "log"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.partition(".")[0] == "logger" and called.partition(".")[2] in methods:
            yield f"{path.name}:{node.lineno}"


def test_an_outcome_that_waits_is_one_warning_and_an_event_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The signal is counted; the log of people has ``result_waits``."""
    app = an_app(idempotency_store=FakeStore("none", "request lost", "request lost", "request lost", "request lost"))

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(key="order_id"))
    def charge(order_id: str) -> str:
        return "paid"

    with caplog.at_level(logging.DEBUG, "celery_idempotent"):
        assert deliver(charge, "o-1").value == "paid"

    lines = [(each.levelname, vars(each)["idempotency_event"]) for each in caplog.records]
    assert ("DEBUG", "idempotency.store_unavailable") in lines
    assert [event for level, event in lines if level == "WARNING"] == [
        "idempotency.result_waits",
        "idempotency.result_recorded",
    ]


def test_every_line_of_the_package_is_logfmt() -> None:
    """Nobody logs past the function that quotes."""
    modules = Path(celery_idempotent.__file__).parent.rglob("*.py")
    assert [call for path in modules for call in _log_calls(path)] == []


@pytest.fixture
def json_lines() -> Iterator[StringIO]:
    """What the formatter of the page writes."""
    stream = StringIO()
    ((line, text),) = [each for each in code(DOCS / "how-to/telemetry.md", "python") if "pythonjsonlogger" in each[1]]
    names: dict[str, Any] = {}
    execute_block(DOCS / "how-to/telemetry.md", line, text, names)
    names["handler"].setStream(stream)
    yield stream
    names["logger"].removeHandler(names["handler"])
    names["logger"].setLevel(logging.NOTSET)


def test_json_of_the_page_has_every_field(json_lines: StringIO) -> None:
    """Event, task, key and token are members of their own; nothing of arguments and results is in it."""
    app: Celery = an_app()

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy("card"), name="shop.charge")
    def charge(card: str) -> str:
        return card

    for task_id in ("a", "b"):
        deliver(charge, "4111-1111", task_id=task_id)

    (replayed,) = [json.loads(line) for line in json_lines.getvalue().splitlines()]
    assert replayed["idempotency_event"] == "idempotency.replayed"
    assert replayed["idempotency_task"] == "shop.charge"
    assert replayed["idempotency_task_id"] == "b"
    assert replayed["idempotency_key"] == charge.idempotency_key_for("4111-1111")
    assert isinstance(replayed["idempotency_token"], int)
    assert replayed["levelname"] == "INFO"
    assert "4111-1111" not in json_lines.getvalue()
