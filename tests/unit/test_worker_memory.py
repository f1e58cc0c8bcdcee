"""A worker's process lives for weeks: what strangers send must not stay in its memory."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from celery.app.task import Context

from celery_idempotent.integration.headers import headers_of

MESSAGES = 20
ROOM = 50_000
"""Bytes of the names of one message."""

NAMES: dict[str, Callable[[int], dict[str, Any]]] = {
    "one long name": lambda number: {f"{number}".rjust(ROOM, "-"): 1},
    "many short names": lambda number: {f"{number} {each}": 1 for each in range(ROOM // 60)},
}


@pytest.mark.parametrize("names", NAMES)
def test_names_of_headers_that_a_stranger_has_made_up_do_not_stay_in_memory(names: str) -> None:
    """Every message has other names, of 50 KB; all of them together are 1 MB."""
    headers_of(Context(headers={"x": 1}, properties={}), "task")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(MESSAGES):
            headers_of(Context(headers=NAMES[names](number), properties={}), "task")
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * ROOM


def test_header_whose_name_is_no_text_is_no_key() -> None:
    """A publisher that pickles can name a header by anything."""
    request = Context(headers={5: "five"}, properties={})
    assert list(headers_of(request, "task").values()) == ["five"]
