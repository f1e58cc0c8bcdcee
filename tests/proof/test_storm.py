"""The storm measures what it says: a crowd of duplicates, its questions on the wire, and its answers."""

from collections.abc import Sequence
from typing import Any

import pytest

from lab.proof import page
from lab.proof.storm import MOST, WINDOW, Storm, run
from tests.support.stores import a_store


@pytest.mark.worker
def test_crowd_asks_seldom_and_is_answered() -> None:
    """A real worker: one body, and fewer questions than a policy whose delays do not grow takes for it."""
    with a_store("redis"):  # or the test is skipped
        grow, stay = run(lambda news: None, duplicates=40, body=2 * WINDOW, leases=[1], brokers=["redis"])
    assert not list(grow.broken())
    assert [(each.is_control, each.runs) for each in (grow, stay)] == [(False, 1), (True, 1)]
    assert [len(each.told) for each in (grow, stay)] == [40, 40]
    assert [sentence for sentence in stay.broken() if "questions per duplicate" in sentence]
    # Besides these questions: the claim and the outcome of the body, renewals, and what a connection begins with.
    assert sum(grow.questions) < len(grow.asked) < sum(grow.questions) + 500


def _storm(asked: Sequence[float] = (), questions: Sequence[int] = (1, 9), runs: int = 1) -> Storm:
    return Storm(
        broker="Redis", lease=1, began=100, ended=190, asked=asked, questions=questions, told=(200.0, 191.0), runs=runs
    )


def test_rates_are_those_of_whole_windows_while_the_body_ran() -> None:
    """What came before it began or after it ended is none of them; the steady part is the last third."""
    storm = _storm(asked=[99.0, *([105.0] * 5000), *([135.0] * 800), *([189.0] * 300), 190.5])
    assert storm.per_second == [500, 0, 0, 80, 0, 0, 0, 0, 30]
    assert storm.steady == 10
    assert storm.late == [1, 10]
    assert not list(storm.broken())


@pytest.mark.parametrize(
    ("storm", "says"),
    [
        (_storm(asked=[165.0] * MOST * WINDOW * 3), "60.0 requests per second"),
        (_storm(questions=(9, 10)), "9.5 questions per duplicate"),
        (_storm(runs=2), "the body ran 2 times"),
    ],
)
def test_storm_that_is_too_much_says_so(storm: Storm, says: str) -> None:
    """Each bound has a sentence of its own."""
    (sentence,) = storm.broken()
    assert sentence.startswith(says)


def test_page_has_its_numbers() -> None:
    """As they were kept."""
    told: dict[str, Any] = _storm(asked=[165.0] * 100).as_json()
    line = page.storms([told]).splitlines()[-1]
    assert line.startswith("| Redis | 1 s | grow | 2 | 90 s | 1 |")
    assert "| 0, 0, 0, 0, 0, 0, 10, 0, 0 | 3.3 | 5.0 (8.5), 9 | 5.5 s / 10.0 s / 10.0 s |" in line
