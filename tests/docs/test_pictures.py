"""docs/pictures: whole and, where they follow from code and pages, what these are now."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.pictures.every import FOLDER, PICTURES
from tests.support.documents import DOCS, ROOT

DRAWN = sorted([*FOLDER.glob("*.svg"), *(DOCS / "benchmarks").glob("*.svg")])
SVG = "{http://www.w3.org/2000/svg}"
TAGS = {"svg", "title", "desc", "style", "rect", "text", "tspan", "line", "circle", "polyline", "polygon"}


@pytest.mark.parametrize("name", PICTURES)
def test_the_file_is_what_the_code_draws(name: str) -> None:
    """And draws again: no time, random number or order of a set is in it."""
    drawn = PICTURES[name]()
    assert drawn == PICTURES[name]()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: make pictures"


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_is_small_and_whole(path: Path) -> None:
    """It loads nothing, and has words for those who cannot see it."""
    text, root = path.read_text(), ElementTree.parse(path).getroot()
    assert len(text) < 120_000
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= TAGS
    assert re.findall(r"(?:href|src|url\()", text) == []
    says = [(each.text or "") if (each := root.find(f"{SVG}{tag}")) is not None else "" for tag in ("title", "desc")]
    assert all(says)


def test_every_picture_is_on_a_page_with_words_for_those_who_cannot_see_it() -> None:
    """A file that no page shows is not kept; the demo is the README's, with its text beside it."""
    pages = "".join(page.read_text() for page in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    linked = [(at, says) for says, at in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", pages)]
    shown = {Path(at).name: says for at, says in [*linked, *re.findall(r'<img src="(.+?)" alt="(.*?)"', pages)]}
    assert {path.name for path in FOLDER.iterdir() if len(shown.get(path.name, "")) < 10} <= {"demo.svg"}
