"""A worker's process lives for weeks: what strangers send must not stay in its memory."""

import gc
import tracemalloc

from celery.app.task import Context

from celery_idempotent.integration.messages import headers_of

MESSAGES = 20
LENGTH = 50_000


def test_names_of_headers_that_a_stranger_has_made_up_do_not_stay_in_memory() -> None:
    """Every message has a header with another name of 50 KB; all of them together would be 1 MB."""
    headers_of(Context(headers={"x": 1}, properties={}), "task")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(MESSAGES):
            headers_of(Context(headers={f"{number}".rjust(LENGTH, "-"): 1}, properties={}), "task")
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 * LENGTH


def test_header_whose_name_is_no_text_is_no_key() -> None:
    """A publisher that pickles can name a header by anything."""
    request = Context(headers={5: "five"}, properties={})
    assert list(headers_of(request, "task").values()) == ["five"]
