"""Log lines for machines and one line for people: whatever comes from elsewhere forges no field and no line."""
# mypy: allow-untyped-decorators

import ast
import json
import logging
import logging.handlers
import unicodedata
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import logfmtkv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import celery_idempotent
from celery_idempotent import Policy
from celery_idempotent.printable import one_line, say
from celery_idempotent.troubleshooting import link
from tests.support.deliveries import Shop
from tests.support.documents import DOCS, code, execute_block
from tests.support.links import unlinked

SAID = logging.getLogger("celery_idempotent.of_this_test")


def _said(log: Any, event: str, **fields: Any) -> list[logging.LogRecord]:
    kept = logging.handlers.BufferingHandler(100)
    SAID.addHandler(kept)
    say(log, event, **fields)
    SAID.removeHandler(kept)
    return kept.buffer


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example('\\"a=b c" \ufffd')
@example("a\nb level=ERROR\x1b[2J")
@example("{}%s")
def test_any_value_is_read_back_as_it_stands_on_the_record(value: str) -> None:
    """By a parser as strict as Go's: no value ends early, opens another field, or breaks the line."""
    (record,) = _said(SAID.warning, "tick", entry=value, task="shop.report")
    line = logfmtkv.parse(record.getMessage(), strict=True, duplicates="error")
    fields = {"entry": vars(record)["idempotency_entry"], "task": "shop.report", "see": link("log-lines#tick")}
    assert line == {"event": "idempotency.tick", **fields}
    assert not set(record.getMessage()) & set("\n\r\x1b")


def test_numbers_stay_numbers_and_nothing_is_left_out() -> None:
    """A formatter can add and compare what a record has; what is not known is no field at all."""
    (record,) = _said(SAID.warning, "hold_failed", messages=3, observed=True, token=None, queue="")
    ours = {name: value for name, value in vars(record).items() if name.startswith("idempotency_")}
    told = {"event": "idempotency.hold_failed", "messages": 3, "observed": True, "queue": ""}
    told["see"] = link("log-lines#hold-failed")
    assert ours == {f"idempotency_{each}": value for each, value in told.items()}
    assert unlinked(record.getMessage()) == 'event=idempotency.hold_failed messages=3 observed=true queue=""'


@pytest.mark.parametrize(
    ("log", "is_loud"),
    [(SAID.warning, True), (partial(SAID.log, logging.WARNING), True), (partial(SAID.log, logging.INFO), False)],
)
def test_a_warning_ends_with_the_address_of_its_entry(log: Any, is_loud: bool, caplog: Any) -> None:
    """Whoever is woken by it has one more click to go; a line that asks for nothing has none."""
    with caplog.at_level(logging.DEBUG, SAID.name):
        say(log, "hold_failed", queue="orders")
    see = f" see={link('log-lines#hold-failed')}" if is_loud else ""
    assert caplog.messages == [f"event=idempotency.hold_failed queue=orders{see}"]


def test_an_outcome_that_waits_is_one_warning_and_an_event_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """The signal is counted; the log of people has ``result_waits``."""
    shop = Shop()
    shop.store.faults.append("none")
    shop.store.faults.extend(["request lost"] * 4)
    with caplog.at_level(logging.DEBUG, "celery_idempotent"):
        assert shop.deliver("o-1").state == "SUCCESS"
    lines = [(each.levelname, vars(each)["idempotency_event"].partition(".")[2]) for each in caplog.records]
    assert ("DEBUG", "store_unavailable") in lines
    assert [event for level, event in lines if level == "WARNING"] == ["result_waits", "result_recorded"]


def test_every_line_of_the_package_is_logfmt() -> None:
    """Nobody logs past the function that quotes."""
    methods = {f"logger.{each}" for each in ("debug", "info", "warning", "error", "exception", "critical", "log")}
    modules = Path(celery_idempotent.__file__).parent.rglob("*.py")
    calls = [each for path in modules for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)]
    assert not {ast.unparse(call) for call in calls if ast.unparse(call.func) in methods}


def test_json_of_the_page_has_every_field(request: pytest.FixtureRequest) -> None:
    """Event, task, key and token are members of their own; nothing of arguments and results is in it."""
    stream, shop = StringIO(), Shop(Policy("order_id"))
    ((line, text),) = [each for each in code(DOCS / "how-to/telemetry.md", "python") if "pythonjsonlogger" in each[1]]
    names: dict[str, Any] = {}
    execute_block(DOCS / "how-to/telemetry.md", line, text, names)
    request.addfinalizer(lambda: names["logger"].setLevel(logging.NOTSET))
    request.addfinalizer(lambda: names["logger"].removeHandler(names["handler"]))
    names["handler"].setStream(stream)
    for task_id in ("a", "b"):
        shop.deliver("4111-1111", task_id=task_id)
    (replayed,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = {"event": "idempotency.replayed", "task": "charge", "task_id": "b", "token": shop.record.fencing_token}
    told |= {"key": shop.charge.idempotency_key_for("4111-1111")}
    assert {name: replayed[f"idempotency_{name}"] for name in told} == told
    assert (replayed["levelname"], "4111-1111" in stream.getvalue()) == ("INFO", False)


FORGED = "7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
SHOWN = r"7\nERROR idempotency.outcome_unknown \x1b]0;owned\x07\u2028\u202e"
UNSEEN = "\u200e\u200f\u061c\u2066\u2069\u2029\u200b\u200d\u2060\ufeff\xad\u3164\U000e0041\ufe0f"
"""What changes direction, or has no width."""


@given(st.text(st.characters()))
@example(FORGED)
@example(UNSEEN)
@example("Überlast 💥 日本 \\n")
def test_what_a_terminal_obeys_is_escaped(text: str) -> None:
    """Control characters, ends of lines, changes of direction, and what has no width; every script stays readable."""
    printed = one_line(text)
    assert not {unicodedata.category(each) for each in printed} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(printed) & set(UNSEEN)
    escaped = {each for each in text if one_line(each) != each}
    assert printed == "".join(
        each.encode("unicode_escape", "surrogatepass").decode() if each in escaped else each for each in text
    )
    assert not [each for each in escaped if each.isalnum() and "FILLER" not in unicodedata.name(each)]
    assert (one_line(FORGED), one_line(None)) == (SHOWN, "None")
