"""docs/adr: every decision is in the index, has the same parts, and leads to pages that exist."""

import re
from pathlib import Path

import pytest

from tests.support.documents import DOCS, anchors

INDEX = DOCS / "adr" / "README.md"
DECISIONS = sorted((DOCS / "adr").glob("[0-9]*.md"))
PARTS = ["Context", "Decision", "Consequences", "Sources"]


def test_the_index_lists_every_decision_under_its_title() -> None:
    """In the order of their numbers, without a gap."""
    listed = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", INDEX.read_text(), re.MULTILINE)
    found = [(str(number), _title(path), path.name) for number, path in enumerate(DECISIONS, start=1)]
    assert listed == found


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_a_status_and_four_parts(decision: Path) -> None:
    """Its file is called after its number and its title; each part says something."""
    text = decision.read_text()
    number, words = int(decision.stem[:4]), decision.stem[5:].split("-")
    assert text.startswith(f"# {number}. ")
    assert set(words) <= set(re.findall(r"[a-z]+", _title(decision).lower()))
    assert re.search(r"^Status: (accepted|superseded by \[\d+\]\(\d{4}-[a-z-]+\.md\))$", text, re.MULTILINE)
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    assert parts[1::2] == PARTS
    assert all(len(part.split()) > 10 for part in parts[2::2])


@pytest.mark.parametrize("page", [INDEX, *DECISIONS], ids=lambda path: path.stem)
def test_links_of_decisions_lead_somewhere(page: Path) -> None:
    """Files and headings within the project exist; what is outside is an https address."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        target = page.parent / path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def _title(decision: Path) -> str:
    return decision.read_text().splitlines()[0].partition(". ")[2]
