"""docs/pictures: whole, readable, and, where they follow from code and pages, what these are now."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.pictures import rooms, tools
from lab.pictures.every import FOLDER, PICTURES
from lab.pictures.pages import plain
from tests.support.browser import a_window
from tests.support.documents import DOCS, ROOT, table
from tests.support.layers import MAY_USE

DRAWN = sorted([*FOLDER.glob("*.svg"), *(DOCS / "benchmarks").glob("*.svg")])
SVG = "{http://www.w3.org/2000/svg}"
LARGEST = 120_000
"""Bytes."""
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
def test_a_picture_is_small_and_whole(path: Path) -> None:
    """It loads nothing, runs nothing, and says what it shows to those who cannot see it."""
    root = ElementTree.parse(path).getroot()
    assert path.stat().st_size < LARGEST
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "text", "tspan", "line", "circle", "polyline", "polygon"),
    }
    assert re.findall(r"(?:href|src|url\()", path.read_text()) == []
    title, says = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert says is not None
    assert len(title.text or "") > 10
    assert len(says.text or "") > 40


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_text_stands_out_by_day_and_by_night(path: Path) -> None:
    """Every colour of text, against the page and the boxes."""
    picture = path.read_text()
    used = {"ink", *re.findall(r'<t(?:ext|span)[^>]*style="fill: var\(--(\w+)\)', picture)}
    day, night = (dict(re.findall(r"--(\w+): (#\w+)", each)) for each in picture.split("@media"))
    for colours in (day, night):
        assert {name for name in used if _contrast(colours[name], colours["page"]) < READABLE} == set()
        assert _contrast(colours["ink"], colours["box"]) >= READABLE


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
    with a_window(tmp_path) as browser:
        for path in DRAWN:
            browser.get(path.as_uri())
            assert (path.stem, browser.execute_script(OUTSIDE)) == (path.stem, [])
            sizes = browser.execute_script(
                "return [...document.querySelectorAll('text')].map(each => parseFloat(getComputedStyle(each).fontSize))"
            )
            width = float(ElementTree.parse(path).getroot().attrib["viewBox"].split()[2])
            assert min(sizes) * PHONE / width >= SMALLEST, path.stem


def test_every_screenshot_is_on_a_page() -> None:
    """A file that no page shows is not kept."""
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert [path.name for path in FOLDER.glob("*.png") if f"pictures/{path.name}" not in pages] == []


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(each * weight for each, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_every_picture_is_on_a_page_with_words_for_those_who_cannot_see_it() -> None:
    """All but that of the demo, whose page is the README."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md"]
    shown = {
        Path(at).stem: says
        for page in pages
        for says, at in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert {path.stem for path in FOLDER.glob("*.svg") if len(shown.get(path.stem, "")) < 30} <= {"demo"}


def test_the_tree_ends_in_the_tools_of_the_table() -> None:
    """Every tool and every declaration, none else, in the table's order."""
    rows = table(DOCS / "how-to/effects.md", "the effect is ...")
    said = re.findall(r"(?:^|; )([^;]*?): ([^;:]*), declared ", _says(tools.draw()))
    assert [tool for _, tool in said] == [plain(row["use"]) for row in rows]
    leaves = [text for text, kinds in _texts(tools.draw()) if "mono" in kinds]
    assert " ".join(leaves) == " ".join(plain(f"{row['use']} {row['declare it']}") for row in rows)


def test_the_arrows_lead_to_all_that_a_room_may_import_from() -> None:
    """Who follows them from a room comes to no other."""
    arrows = rooms.arrows(rooms.rooms())
    assert {room: _reached(room, arrows) for room in MAY_USE} == MAY_USE
    assert [text for text, kinds in _texts(rooms.draw()) if "mono" in kinds] == sorted(
        MAY_USE, key=lambda room: (-len(MAY_USE[room]), room)
    )


def _reached(room: str, arrows: list[tuple[str, str]]) -> set[str]:
    below = {end for start, end in arrows if start == room}
    return below.union(*(_reached(each, arrows) for each in below))


def _elements(picture: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}{tag}"))


def _texts(picture: str) -> list[tuple[str, list[str]]]:
    return [(each.text or "", each.get("class", "").split()) for each in _elements(picture, "text")]


def _says(picture: str) -> str:
    (found,) = _elements(picture, "desc")
    return found.text or ""
