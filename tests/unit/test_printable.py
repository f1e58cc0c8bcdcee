"""What came from elsewhere is printed on one line, in logs and on the command line."""
# mypy: allow-untyped-decorators

import unicodedata
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.integration.cli import idempotency
from celery_idempotent.printable import one_line
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app

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


def test_rows_of_the_command_line_cannot_be_forged() -> None:
    """A record is one row of a list, and each of its fields one line, whatever was written into it."""
    app = an_app()
    names: dict[str, Any] = dict.fromkeys(("task", "task_id", "worker", "error"), FORGED)
    record = replace(a_record(), key=f"k{FORGED}", steps={FORGED: {"lost": FORGED}}, **names)
    app.conf.idempotency_store.swap(record, None)
    rows = len(record.to_fields()) + 1  # and the effect key of the step
    for arguments, lines in ((("list",), 2), (("show", record.key), rows)):
        result = CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))
        shown = result.stdout.removesuffix("\n").split("\n")
        assert (len(shown), all(map(str.isprintable, shown)), SHOWN in result.stdout) == (lines, True, True)
