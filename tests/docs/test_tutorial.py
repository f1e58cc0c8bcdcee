"""How the tutorial is read. What it says is done in tests/tools/test_wheel.py, with the package as it is published."""

import pytest

from tests.support.tutorial import PAGE, PUBLISHED, Commands, File, Logged, Printed, is_shown, steps


def test_a_reader_misses_no_block() -> None:
    """Each fenced block is a step; files have the names that the page says, and shop.py changes once."""
    done = list(steps(PAGE.read_text()))
    assert len(done) == PAGE.read_text().count("\n```") / 2
    assert [step.name for step in done if isinstance(step, File)] == ["bank.py", "shop.py", "shop.py"]
    assert {type(step) for step in done} == {File, Commands, Printed, Logged}


def test_the_package_is_installed_once() -> None:
    """What a test puts in its place stands in a command."""
    commands = [line for step in steps(PAGE.read_text()) if isinstance(step, Commands) for line in step.lines]
    assert [PUBLISHED in line for line in commands].count(True) == 1


def test_a_block_that_nobody_understands_is_an_error() -> None:
    """A file in another language, say, would otherwise be left out."""
    with pytest.raises(ValueError, match="a block of toml"):
        list(steps("```toml\na = 1\n```\n"))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("o-1: 500\n", "\no-1: 500  \n", True),
        ("o-1: 500\n", "o-1: 500\no-1: 500\n", False),
        ("DONE  18 s   shop\n", "DONE  7 s  shop\n", True),
        ("DONE  18 s   shop\n", "DONE  7 s  store\n", False),
        ("first\n...\nlast\n", "first\nsecond\nthird\nlast\n", True),
        ("first\n...\nlast\n", "first\nsecond\n", False),
        ("attempts  2\n...\n", "attempts  3\n", False),
    ],
)
def test_outputs_are_compared_but_for_what_each_run_has_of_its_own(shown: str, printed: str, same: bool) -> None:
    """An age may differ, a number of attempts may not."""
    assert is_shown(shown, printed) is same
