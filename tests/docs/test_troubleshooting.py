"""docs/troubleshooting against the source: every link leads to an entry, and every entry is led to."""

import re

import pytest

from celery_idempotent.contrib.http import semantics
from tests.support.messages import PAGES, UNTOLD, entries, linked


def test_entries_are_those_that_a_link_leads_to() -> None:
    """A new error, option, warning or event needs an entry, and no entry is left behind when its cause goes."""
    assert entries().keys() == linked().keys()


def test_an_option_that_varies_is_of_a_class_of_its_own() -> None:
    """What an author named has no entry: such an error is of a class that has one."""
    assert {see: where for see, where in linked().items() if see.endswith("#") or UNTOLD in see} == {}


def test_the_index_has_at_most_eighty_entries() -> None:
    """Who is paged at night finds what he looks for."""
    assert sum(len(re.findall("^## ", page.read_text(), re.MULTILINE)) for page in PAGES.glob("*.md")) <= 80


def test_an_entry_says_what_to_do() -> None:
    """More than the heading does."""
    assert {see for see, text in entries().items() if len(text.split()) < 10} == set()


@pytest.mark.parametrize("problem", semantics.Problem)
def test_the_entry_of_an_http_problem_quotes_it(problem: semantics.Problem) -> None:
    """As the client gets it."""
    slug, status, title, detail = problem.value
    assert f"```text\n{status} {title}: {detail}\n```\n" in entries()[f"http#{slug}"]
