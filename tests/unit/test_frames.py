"""How much of the library stands between Celery and a body in a traceback, which whoever is paged has to read."""

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

import celery_idempotent
from celery_idempotent import IdempotentTask, Policy, idempotent

OURS = str(Path(celery_idempotent.__file__).parent)


def _decline() -> None:
    raise ValueError("declined")


def _of_a_task() -> Callable[[], object]:
    app = Celery("frames", set_as_current=False)
    app.conf.update(idempotency_store="memory://", task_acks_late=True, task_reject_on_worker_lost=True)
    task = app.task(shared=False, base=IdempotentTask, name="charge", idempotent=Policy(scope="frames"))(_decline)
    return lambda: task.apply(throw=True)


def _of_a_function() -> Callable[[], object]:
    return idempotent(Policy(scope="frames"), store="memory://", name="charge")(_decline)


@pytest.mark.parametrize("made", [_of_a_task, _of_a_function])
def test_a_traceback_of_a_body_shows_at_most_six_frames_of_ours(made: Callable[[], Callable[[], object]]) -> None:
    """From the call to the author's first line."""
    call = made()
    with pytest.raises(ValueError, match="declined") as raised:
        call()
    frames = [each.name for each in traceback.extract_tb(raised.tb) if each.filename.startswith(OURS)]
    frames = [each for each in frames if each != "apply"]  # of this test: a worker calls the task itself
    assert 0 < len(frames) <= 6, frames
