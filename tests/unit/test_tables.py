"""What a table of text looks like in a terminal that is too narrow for it, and where there is no terminal."""

import pytest

from celery_idempotent.integration.tables import table

ROWS = [("STATUS", "TASK", "KEY", "WORKER"), ("FAILED", "shop.charge", "k" * 20, "vm"), ("UNKNOWN", "mail", "", "vm-2")]
WHOLE = [
    "STATUS   TASK         KEY                   WORKER",
    "FAILED   shop.charge  kkkkkkkkkkkkkkkkkkkk  vm",
    "UNKNOWN  mail                               vm-2",
]


@pytest.mark.parametrize("width", [None, len(WHOLE[0]), 200])
def test_row_is_a_line_where_it_fits(width: int | None) -> None:
    """So it is, too, for a pipe, however wide."""
    assert table(ROWS, last=2, width=width).splitlines() == WHOLE


def test_key_gets_a_line_of_its_own_where_the_row_does_not_fit() -> None:
    """Whole, so that it can be copied; an empty one gets none."""
    assert table(ROWS, last=2, width=len(WHOLE[0]) - 1).splitlines() == [
        "STATUS   TASK         WORKER",
        "  KEY",
        "FAILED   shop.charge  vm",
        "  kkkkkkkkkkkkkkkkkkkk",
        "UNKNOWN  mail         vm-2",
    ]


def test_everything_but_the_key_is_cut_to_the_width() -> None:
    """In a terminal no line wraps but that of a key which is wider than it."""
    assert table(ROWS, last=2, width=19).splitlines() == [
        "STATUS   TASK   ...",
        "  KEY",
        "FAILED   shop.ch...",
        "  kkkkkkkkkkkkkkkkkkkk",
        "UNKNOWN  mail   ...",
    ]
