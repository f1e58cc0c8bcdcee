"""how-to/testing.md and how-to/testing.md do what they say: their blocks pass, and the report is the real one."""

import inspect
import re
from typing import get_args

import pytest

import pytest_celery_idempotent
from celery_idempotent import testing
from celery_idempotent.testing.effects import Promise, assert_effect_once
from tests.support.documents import DOCS, code, table, words

pytest_plugins = ["pytester"]

BARE = ("-p", "no:cacheprovider", "-p", "no:celery", "-p", "no:ddtrace", "-p", "no:docker_tools")
"""Without what else is installed here."""

PAGE = DOCS / "how-to/testing.md"
BLOCKS = [text for _, text in code(PAGE, "python")]


@pytest.mark.parametrize("blocks", [BLOCKS[:-1], BLOCKS[-1:]], ids=["shop", "ledger"])
def test_blocks_of_the_page_pass(blocks: list[str], pytester: pytest.Pytester) -> None:
    """All of its tests, in the files that it says, with every warning an error."""
    written = "\n".join(blocks)
    pytester.makepyfile(test_shop=written)

    result = pytester.runpytest_subprocess("-W", "error", *BARE)

    result.assert_outcomes(passed=len(re.findall(r"^def test_", written, re.MULTILINE)))


def test_first_test_of_the_page_passes_alone(pytester: pytest.Pytester) -> None:
    """As the page says after its first block."""
    pytester.makepyfile(test_shop=BLOCKS[0])

    pytester.runpytest_subprocess(*BARE).assert_outcomes(passed=1)


def test_failing_test_of_the_page_fails_as_it_shows(pytester: pytest.Pytester) -> None:
    """Its report, line by line."""
    ((_, shown),) = code(PAGE, "text")
    ((_, failing),) = code(PAGE, "py")
    pytester.makepyfile(test_shop=BLOCKS[0] + failing)

    result = pytester.runpytest_subprocess(*BARE)

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"E *{line}" for line in shown.splitlines() if line], consecutive=False)


def test_report_of_the_page_is_the_real_one(pytester: pytest.Pytester) -> None:
    """The table that the page shows is what its task gets without its promise."""
    ((_, shown),) = code(PAGE, "text")
    pytester.makepyfile(
        test_shop=BLOCKS[0],
        test_report="""
        import pytest
        from celery_idempotent.testing import assert_effect_once
        from test_shop import outbox, send_receipt

        def test_report():
            with pytest.raises(AssertionError) as raised:
                assert_effect_once(send_receipt, "ada@example.org", effects=outbox)
            open("report.txt", "w").write(str(raised.value))
            open("runs.txt", "w").write(str(len(outbox)))
        """,
    )

    pytester.runpytest_subprocess(*BARE, "test_report.py").assert_outcomes(passed=1)

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
    """What the test kit exports, and the plugin's fixtures, stand on these pages or on those about stores."""
    pages = PAGE, DOCS / "how-to/write-a-store.md"
    documented = {word for page in pages for word in words(page)} | set(re.findall(r"\w+", "\n".join(BLOCKS)))

    assert {*testing.__all__, *pytest_celery_idempotent.__all__} <= documented
