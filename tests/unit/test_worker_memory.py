"""A worker's process lives for weeks: what strangers send must not stay in its memory."""

import gc
import tracemalloc

import pytest
from celery.app.task import Context

from celery_idempotent.integration.headers import headers_of

ROOM = 50_000
"""Bytes of the names of one message."""


@pytest.mark.parametrize("names", [1, ROOM // 60], ids=["one long name", "many short names"])
def test_names_of_headers_that_a_stranger_has_made_up_do_not_stay_in_memory(names: int) -> None:
    """Every message has other names, of 50 KB; all of them together are 1 MB."""
    headers_of(Context(headers={"x": 1}, properties={}), "task")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(20):
            made_up = {f"{number} {each}".rjust(ROOM // names, "-"): 1 for each in range(names)}
            headers_of(Context(headers=made_up, properties={}), "task")
        del made_up
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * ROOM


def test_header_whose_name_is_no_text_is_no_key() -> None:
    """A publisher that pickles can name a header by anything."""
    assert list(headers_of(Context(headers={5: "five"}, properties={}), "task").values()) == ["five"]
