"""A replay goes on to whatever follows the task, as its first delivery did."""

from __future__ import annotations

import pytest
from celery import chain, chord

from tests.integration.cluster import IdempotentSetup
from tests.integration.idempotent_tasks import charge, note
from tests.support.ledger import Ledger

pytestmark = pytest.mark.worker


def test_a_replay_goes_on_to_links_and_chains(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """What follows a duplicate gets the recorded result and runs for each caller."""
    assert charge.delay("o").get(timeout=60) == "o by attempt 1"
    assert chain(charge.s("o"), note.s()).delay().get(timeout=60) == "noted: o by attempt 1"
    charge.apply_async(("o",), link=note.s())
    notes = ledger.wait_for("note", count=2)
    assert {row.details["text"] for row in notes} == {"o by attempt 1"}
    assert len(ledger.rows("effect")) == 1


def test_a_chord_with_duplicates_in_its_header_completes(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Members that conflict or are replayed count like any other, and the body runs once with all results."""
    result = chord([charge.s("a", gate="go"), charge.s("a", gate="go"), charge.s("b")])(note.s())
    ledger.wait_for("conflicted")
    ledger.open("go:1")
    text = ["a by attempt 1", "a by attempt 1", "b by attempt 1"]
    assert result.get(timeout=60) == f"noted: {text}"
    assert len(ledger.rows("effect")) == 2
    assert len(ledger.rows("note")) == 1
