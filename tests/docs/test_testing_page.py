"""docs/testing.md does what it says: its blocks are one file that passes, and its report is the real one."""

import inspect
import re
from typing import get_args

import pytest

import pytest_celery_idempotent
from celery_idempotent import testing
from celery_idempotent.testing.effects import Promise, assert_effect_once
from tests.support.documents import DOCS, code, table, words

pytest_plugins = ["pytester"]

BARE = ("-p", "no:cacheprovider", "-p", "no:celery", "-p", "no:docker_tools")
"""Without what else is installed here."""

PAGE = DOCS / "testing.md"
BLOCKS = [text for _, text in code(PAGE, "python")]


def test_blocks_of_the_page_pass(pytester: pytest.Pytester) -> None:
    """All of its tests, in one file, with every warning an error."""
    pytester.makepyfile(test_shop="\n".join(BLOCKS))

    result = pytester.runpytest_subprocess("-W", "error", *BARE)

    result.assert_outcomes(passed=len(re.findall(r"^def test_", "\n".join(BLOCKS), re.MULTILINE)))


def test_report_of_the_page_is_the_real_one(pytester: pytest.Pytester) -> None:
    """The table that the page shows is what its task gets without its promise."""
    ((_, shown),) = code(PAGE, "text")
    pytester.makepyfile(
        shop=BLOCKS[0],
        test_report="""
        import pytest
        from celery_idempotent.testing import assert_effect_once
        from shop import outbox, send_receipt

        def test_report():
            with pytest.raises(AssertionError) as raised:
                assert_effect_once(send_receipt, "ada@example.org", effects=outbox)
            open("report.txt", "w").write(str(raised.value))
            open("runs.txt", "w").write(str(len(outbox)))
        """,
    )

    pytester.runpytest_subprocess(*BARE).assert_outcomes(passed=1)

    report = (pytester.path / "report.txt").read_text()
    assert report.startswith(shown)
    assert report.removeprefix(shown).startswith("\n* ")
    assert 16 <= int((pytester.path / "runs.txt").read_text()) <= 24  # "some twenty times"


def test_arguments_and_promises_are_the_codes() -> None:
    """Every argument and every promise, no other."""
    arguments = {row["argument"].strip("`") for row in table(PAGE, "argument")}
    parameters = inspect.signature(assert_effect_once).parameters.values()
    promises = [re.findall("`([^`]*)`", row["promise"])[0] for row in table(PAGE, "promise")]

    keywords = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert arguments == keywords | {"all others"}
    assert tuple(promises) == get_args(Promise)


def test_everything_public_is_documented() -> None:
    """What the test kit exports, and the plugin's fixtures, stand on this page or on that about stores."""
    documented = {*words(PAGE), *words(DOCS / "write-a-store.md")} | set(re.findall(r"\w+", "\n".join(BLOCKS)))

    assert {*testing.__all__, *pytest_celery_idempotent.__all__} <= documented
