"""``effect_coverage`` finds the line that repeats an effect, and blames no other."""

from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.testing import effect_coverage
from tests.support import effect_helpers, effect_holes
from tests.support.effect_receiver import charges

SOURCE = ("tests.support.effect_holes", "tests.support.effect_helpers")
HOLES = {
    line.rpartition("# hole: ")[2]: (path, number)
    for path in (effect_holes.__file__, effect_helpers.__file__)
    for number, line in enumerate(Path(path).read_text().splitlines(), 1)
    if "# hole: " in line
}


def covered(task: Any, **options: Any) -> Any:
    def order(trial: int) -> str:
        return f"{task.name}-{trial}"

    return effect_coverage(
        task, lambda trial: (order(trial),), effects=lambda trial: charges[order(trial)], source=SOURCE, **options
    )


@pytest.mark.parametrize("name", effect_holes.holes)
def test_a_hole_is_found_at_its_line(name: str) -> None:
    """Before, in and after steps; wherever Python can be; none of its neighbours is to blame."""
    report = covered(effect_holes.holes[name])
    assert {(each.path, each.line) for each in report.deaths if not each.ok} == {HOLES[name]}
    assert (report.is_complete, report.percent < 100) == (False, True)


@pytest.mark.parametrize("name", effect_holes.sound)
def test_a_sound_task_has_no_hole(name: str) -> None:
    """An effect that its receiver knows again is one, wherever its worker dies."""
    report = covered(effect_holes.sound[name])
    assert {each for each in report.deaths if not each.ok or each.effects != each.expected} == set()
    assert (report.is_complete, report.percent) == (True, 100)
