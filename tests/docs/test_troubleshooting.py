"""docs/troubleshooting against the source: every text that people meet leads to an entry, and every entry is led to."""

import ast
import inspect
import re
from collections import Counter

import pytest

from celery_idempotent import errors
from celery_idempotent.troubleshooting import link
from tests.support.messages import KINDS, VARIES, Module, Said, entries, logged, modules, quoted, said, texts_by_entry

ENTRIES = {each.see: each for each in entries()}
BY_SITE = {"PolicyError", "StoreUnavailable", "StoreMisconfigured"}
"""Errors of many texts: where one is raised, its entry is named."""


def test_every_error_names_an_entry_itself_or_where_it_is_raised() -> None:
    """A new error cannot be forgotten here; what a body raises itself needs no entry."""
    public = {name: getattr(errors, name) for name in errors.__all__}
    ours = {name for name, each in public.items() if issubclass(each, errors.IdempotencyError)} - {"IdempotencyError"}
    by_class = {name for name in ours if vars(public[name]).get("see")}
    assert ours - by_class == BY_SITE
    assert all("see" in inspect.signature(public[name]).parameters for name in BY_SITE)


@pytest.mark.parametrize("text", sorted(said(), key=str), ids=lambda each: each.where)
def test_every_text_names_its_entry(text: Said) -> None:
    """Where it is said, or where the function that says it is called: by a literal, so that it can be looked up."""
    assert text.see in ENTRIES


def _unnamed(module: Module) -> list[str]:
    """Calls of what takes an entry that name none; of a rule, those that have something to say."""
    return [
        f"{module.path.name}:{call.lineno}"
        for call in module.calls(*KINDS)
        if not any(each.arg == "see" for each in call.keywords)
        and (ast.unparse(call.func) != "Rule" or any(each.arg == "remedy" for each in call.keywords))
    ]


def test_no_site_leaves_its_entry_out() -> None:
    """Nor is a warning given by its category, past the class that carries an entry."""
    assert [where for module in modules() for where in _unnamed(module)] == []
    bare = [
        f"{module.path.name}:{call.lineno}"
        for module in modules()
        for call in module.calls("warn", "warn_explicit")
        if any(ast.unparse(each) == "IdempotencyWarning" for each in call.args)
    ]
    assert bare == []


def test_entries_are_those_that_something_leads_to() -> None:
    """No entry is left behind when its message goes, and no heading stands twice on a page."""
    assert ENTRIES.keys() == {each.see for each in said() | logged()}
    assert [see for see, count in Counter(each.see for each in entries()).items() if count > 1] == []


@pytest.mark.parametrize("see", sorted(texts_by_entry()))
def test_an_entry_quotes_what_people_see(see: str) -> None:
    """All texts, as they are now, and no others."""
    assert ENTRIES[see].quoted == quoted(texts_by_entry()[see]), "run: python -m tests.support.messages"


@pytest.mark.parametrize("see", sorted(ENTRIES))
def test_an_entry_has_cause_and_remedy(see: str) -> None:
    """And the remedy has something to type, unless nothing is to be done."""
    found = re.search(r"^\*\*Cause:\*\* (.+?)\n\n\*\*Remedy:\*\* (.+)", ENTRIES[see].text, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert len(found[1]) > 20


def test_a_loud_event_is_the_heading_of_its_entry() -> None:
    """So the search finds it by its name; the address is made of that and of its page."""
    assert {each.text for each in logged()} >= {"taken_over", "hold_lost", "sns_stays", "message_returned"}
    assert {each.text: ENTRIES[each.see].heading for each in logged()} == {each.text: each.text for each in logged()}


def test_no_entry_quotes_the_name_of_what_varies() -> None:
    """A reader sees what the program filled in, so ``{creation}`` is found by nobody."""
    assert [each.see for each in entries() if re.search(r"\{[a-z_]+\}", each.quoted)] == []


def test_texts_say_something_themselves() -> None:
    """What can be searched for: a text that is a placeholder alone is no text."""
    empty = {each.where for each in said() if not re.search("[a-z]{3}", each.text.replace(VARIES, ""))}
    assert empty == set()


def test_a_link_leads_to_a_page_and_a_heading() -> None:
    """As the site names them; tests/tools/test_site.py follows each."""
    assert link("keys#the-key-is-missing").endswith("/troubleshooting/keys.html#the-key-is-missing")
