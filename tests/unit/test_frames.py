"""How much of the library stands between Celery and a body in a traceback, which whoever is paged has to read."""

import traceback
from pathlib import Path

import pytest

import celery_idempotent
from celery_idempotent import Policy, idempotent
from tests.support.deliveries import Shop
from tests.support.scene import raising

OURS = str(Path(celery_idempotent.__file__).parent)


@pytest.mark.parametrize("is_task", [True, False])
def test_a_traceback_of_a_body_shows_at_most_six_frames_of_ours(is_task: bool) -> None:
    """From the call to the author's first line."""
    shop = Shop()
    shop.does = raising(ValueError("declined"))
    function = idempotent(Policy(), app=shop.app, name="decline")(shop.does)
    with pytest.raises(ValueError, match="declined") as raised:
        shop.charge.apply(("o",), throw=True) if is_task else function()

    frames = [each.name for each in traceback.extract_tb(raised.tb) if each.filename.startswith(OURS)]
    frames = [each for each in frames if each != "apply"]  # of this test: a worker calls the task itself
    assert 0 < len(frames) <= 6, frames
