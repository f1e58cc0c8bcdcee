"""``effect_coverage`` finds the line that repeats an effect, and blames no other."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.testing import deaths, effect_coverage
from tests.support import effect_helpers, effect_holes
from tests.support.effect_receiver import charges

SOURCE = ("tests.support.effect_holes", "tests.support.effect_helpers")
HOLES = {
    line.rpartition("# hole: ")[2]: (path, number)
    for path in (effect_holes.__file__, effect_helpers.__file__)
    for number, line in enumerate(Path(path).read_text().splitlines(), 1)
    if "# hole: " in line
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker lets go of what the next one waits for."""
    monkeypatch.setattr(deaths, "_PATIENCE", 0.2)


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


def test_a_report_blames_the_hole_and_not_what_it_repeats() -> None:
    """It is a text, the source with margins, so that pytest shows it where an assertion fails."""
    report = covered(effect_holes.holes["after_a_step"])
    rows = {line.split()[0]: line.rpartition("  ")[2] for line in report.splitlines() if line[:5].strip().isdigit()}
    _, hole = HOLES["after_a_step"]
    assert rows == {
        str(hole - 1): "ok",
        str(hole): "died after: 2x instead of 1x",
        str(hole + 1): f"ok but for effect_holes.py:{hole}",
    }
    assert (isinstance(report, str), repr(report)) == (True, "<effect coverage of holes.after_a_step: 62 %>")


def test_a_promise_allows_what_it_says() -> None:
    """At most once may miss an effect, at least once may repeat it; a message can be lost with its worker."""
    task = effect_holes.others["at_most_once"]
    assert [covered(task, promise=each).is_complete for each in ("exactly once", "at most once")] == [False, True]
    assert covered(effect_holes.holes["plain"], promise="at least once").is_complete
    assert not covered(effect_holes.holes["plain"], promise="at most once").is_complete
    report = covered(effect_holes.others["early"])
    assert "died before: 0x instead of 1x" in report
    assert report.notes[0].startswith("Its message is lost with its worker: set task_acks_late")


def test_what_a_dead_worker_holds_is_let_go_and_nothing_of_it_runs() -> None:
    """The next delivery waits for its lock; on the way out neither a handler nor ``finally`` has effects."""
    report = covered(effect_holes.others["locked"])
    assert {each.effects for each in report.deaths} == {1}
    assert not effect_holes.lock.locked()


def test_a_line_that_no_trial_comes_by_again_is_not_called_safe() -> None:
    """Where chance decides, a report says that it knows nothing."""
    report = covered(effect_holes.others["seldom"])
    assert {each.effects for each in report.deaths if not each.ok} == {None}
    assert "not reached again" in report


def test_threads_of_a_body_are_told() -> None:
    """In them nobody dies."""
    (note,) = covered(effect_holes.others["threaded"]).notes
    assert note.endswith("starts a thread, in which nobody dies")


def test_what_cannot_be_covered_is_refused() -> None:
    """No effect, with what the body raised; trials that depend on each other; no task; and no promise."""
    plain, total = effect_holes.holes["plain"], count()
    with pytest.raises(ValueError, match="must be about one trial"):
        effect_coverage(plain, lambda trial: ("o",), effects=lambda trial: next(total) ** 2, source=SOURCE)
    with pytest.raises(ValueError, match="KeyError.*args="):
        covered(effect_holes.others["failing"])
    with pytest.raises(TypeError, match="must be a Celery task"):
        effect_coverage(covered, effects=lambda trial: 1)
    with pytest.raises(ValueError, match="must be one of"):
        covered(effect_holes.holes["plain"], promise="once")
