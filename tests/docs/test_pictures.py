"""docs/pictures: whole, readable, and, where they follow from code and pages, what these are now."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.pictures.every import FOLDER, PICTURES
from tests.support.browser import a_window
from tests.support.documents import DOCS, ROOT

DRAWN = sorted([*FOLDER.glob("*.svg"), *(DOCS / "benchmarks").glob("*.svg")])
SVG = "{http://www.w3.org/2000/svg}"
TAGS = {"svg", "title", "desc", "style", "rect", "text", "tspan", "line", "circle", "polyline", "polygon"}
READABLE = 4.5
"""The least contrast of text with what is behind it (WCAG 2.2, AA)."""
PHONE, SMALLEST = 328, 8.5
"""How wide a page of the site is on a phone, and the least height of text there, in CSS pixels."""


@pytest.mark.parametrize("name", PICTURES)
def test_the_file_is_what_the_code_draws(name: str) -> None:
    """And draws again: no time, random number or order of a set is in it."""
    drawn = PICTURES[name]()
    assert drawn == PICTURES[name]()
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run: make pictures"


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_is_small_whole_and_readable(path: Path) -> None:
    """It loads nothing, has words for those who cannot see it, and its text stands out by day and by night."""
    text, root = path.read_text(), ElementTree.parse(path).getroot()
    assert len(text) < 120_000
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= TAGS
    assert re.findall(r"(?:href|src|url\()", text) == []
    says = [(each.text or "") if (each := root.find(f"{SVG}{tag}")) is not None else "" for tag in ("title", "desc")]
    assert all(says)
    used = {"ink", *re.findall(r'<t(?:ext|span)[^>]*style="fill: var\(--(\w+)\)', text)}
    for colours in (dict(re.findall(r"--(\w+): (#\w+)", each)) for each in text.split("@media")):
        assert {name for name in used if contrast(colours[name], colours["page"]) < READABLE} == set()
        assert contrast(colours["ink"], colours["box"]) >= READABLE


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(each * weight for each, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


OUTSIDE = """
const frames = [...document.querySelectorAll('rect')].map(each => each.getBBox())
  .filter(each => each.height > 20 && each.width > 20);
const inside = (word, frame) => word.x >= frame.x && word.x + word.width <= frame.x + frame.width;
const middle = word => [word.x + word.width / 2, word.y + word.height / 2];
const holds = (frame, [x, y]) => x > frame.x && x < frame.x + frame.width && y > frame.y && y < frame.y + frame.height;
return [...document.querySelectorAll('text')].filter(each => {
  const word = each.getBBox();
  return frames.some(frame => holds(frame, middle(word)) && !inside(word, frame));
}).map(each => each.textContent);
"""
"""Text that crosses the edge of the picture, or of the box that its middle is in."""


def test_text_stays_within_its_picture_and_its_box(tmp_path: Path) -> None:
    """In the browser, by the widest of usual fonts; and no text is too small to read on a phone."""
    sizes_of = "[...document.querySelectorAll('text')].map(each => parseFloat(getComputedStyle(each).fontSize))"
    with a_window(tmp_path) as browser:
        for path in DRAWN:
            browser.get(path.as_uri())
            assert (path.stem, browser.execute_script(OUTSIDE)) == (path.stem, [])
            width = float(ElementTree.parse(path).getroot().attrib["viewBox"].split()[2])
            assert min(browser.execute_script(f"return {sizes_of}")) * PHONE / width >= SMALLEST, path.stem


def test_every_picture_is_on_a_page_with_words_for_those_who_cannot_see_it() -> None:
    """A file that no page shows is not kept; the demo is the README's, with its text beside it."""
    pages = "".join(page.read_text() for page in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    linked = [(at, says) for says, at in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", pages)]
    shown = {Path(at).name: says for at, says in [*linked, *re.findall(r'<img src="(.+?)" alt="(.*?)"', pages)]}
    assert {path.name for path in FOLDER.iterdir() if len(shown.get(path.name, "")) < 10} <= {"demo.svg"}
