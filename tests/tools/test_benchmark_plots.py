"""The pictures of the benchmarks: well-formed, to scale, and with all that was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lab.benchmarks import plots
from lab.benchmarks.svg import Axis, Bars, Lines, Panel, bars, lines, ticks

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "results.json"
SVG = "{http://www.w3.org/2000/svg}"

LINEAR, LOGARITHMIC = Axis("MB"), Axis("records", is_log=True)


def words(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def widths(picture: str) -> list[float]:
    """Of the bars: what has a height of 13."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [float(each.attrib["width"]) for each in found if each.attrib["height"] == "13"]


def points(picture: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    return [[tuple(map(float, pair.split(","))) for pair in each.attrib["points"].split()] for each in found]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("low", "high", "axis", "expected"),
    [
        (0, 950, LINEAR, [0, 200, 400, 600, 800, 1000]),
        (0, 5, LINEAR, [0, 1, 2, 3, 4, 5]),
        (0, 0, LINEAR, [0, 1]),
        (1_000, 1_000_000, LOGARITHMIC, [1e3, 1e4, 1e5, 1e6]),
        (40, 900, LOGARITHMIC, [10, 100, 1000]),
        (100, 100, LOGARITHMIC, [100, 1000]),
    ],
)
def test_ticks_are_round_and_cover_what_was_measured(
    low: float, high: float, axis: Axis, expected: list[float]
) -> None:
    """Bars begin at 0: a bar that begins elsewhere exaggerates."""
    assert ticks(low, high, axis) == expected


def test_bars_are_as_long_as_their_values() -> None:
    """Three to one is three times as long, in every row; what was not measured has no bar."""
    picture = bars(Bars("CPU", LINEAR, ["memory", "Redis"], {"library": [30, 10], "driver": [None, 20]}))
    assert widths(picture) == pytest.approx([widths(picture)[1] * each for each in (3, 1, 2)], abs=0.1)
    assert {"CPU", "MB", "memory", "Redis", "library", "driver", "30", "10", "20"} <= set(words(picture))


def test_equal_values_are_a_flat_line_and_powers_of_ten_are_equal_steps() -> None:
    """Which is how a reader sees that nothing grows."""
    series = {"flat": [(1e3, 50.0), (1e4, 50.0), (1e5, 50.0)], "grows": [(1e3, 10.0), (1e4, 100.0), (1e5, 1000.0)]}
    flat, grows = points(lines(Lines("Growth", LOGARITHMIC, LOGARITHMIC, [Panel("claim", series)])))
    assert len({y for _, y in flat}) == 1
    (x1, y1), (x2, y2), (x3, y3) = grows
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2)
    assert y1 > y2, "larger is higher"


def test_limit_is_drawn_where_a_line_at_that_value_would_be() -> None:
    """A reader sees which lines stay below it."""
    picture = lines(Lines("Growth", LOGARITHMIC, LINEAR, [Panel("claim", {"a": [(10, 1.2), (100, 1.2)]})], limit=1.2))
    limit = next(each for each in ElementTree.fromstring(picture).iter(f"{SVG}line") if each.attrib["class"] == "limit")
    assert {y for _, y in points(picture)[0]} == {float(limit.attrib["y1"])} == {float(limit.attrib["y2"])}


def test_a_series_has_its_colour_in_all_panels() -> None:
    """The legend is above all of them, and a panel may lack a series."""
    chart = Lines(
        "Storm", LINEAR, LINEAR, [Panel("Redis", {"a": [(0, 1)], "b": [(0, 2)]}), Panel("SQS", {"b": [(0, 3)]})]
    )
    colours = [each.attrib["style"] for each in ElementTree.fromstring(lines(chart)).iter(f"{SVG}polyline")]
    assert colours[1] == colours[2] != colours[0]


def test_names_are_text_and_no_markup() -> None:
    """A name with an ampersand or an angle bracket leaves the picture well-formed."""
    assert "a < b & c" in words(bars(Bars("a < b & c", LINEAR, ["<x>"], {"s": [1]})))


def test_pictures_follow_the_readers_theme_on_a_background_of_their_own() -> None:
    """A transparent picture with dark text could not be read on a dark page."""
    picture = bars(Bars("CPU", LINEAR, ["memory"], {"library": [1]}))
    assert "@media (prefers-color-scheme: dark)" in picture
    first = next(ElementTree.fromstring(picture).iter(f"{SVG}rect"))
    assert (first.attrib["width"], first.attrib["style"]) == ("100%", "fill: var(--page)")
    used = set(re.findall(r"var\((--\w+)\)", picture))
    for theme in picture.split("@media")[:2]:
        assert used <= set(re.findall(r"(--\w+):", theme))


def spread(value: float) -> dict[str, float]:
    return {"median": value, "p25": value, "p75": value, "count": 1}


def section(number: int, data: Mapping[str, Any]) -> dict[str, Any]:
    return {"title": f"{number}. Whatever", "data": data}


NEW = [
    section(8, {"cpu_us": {"plain task": spread(20), "new key": spread(60)}}),
    section(
        9,
        {
            "calls": {
                "Redis": {
                    str(size): {call: {"wall_to_smallest": spread(1)} for call in ("claim", "completion", "duplicate")}
                    for size in (1_000, 10_000)
                }
            }
        },
    ),
    section(10, {"resident_bytes": {"1000": 5e7, "2000": 5e7}}),
]


def test_every_picture_is_saved_and_shown_with_its_axes_and_a_caption(tmp_path: Path) -> None:
    """The page shows each file that is there; each has a title, two axes, units, and says what was measured."""
    results = json.loads(RESULTS.read_text())
    known = [each for each in results["sections"] if each["title"].partition(".")[0] not in {"8", "9", "10"}]
    (tmp_path / "results.json").write_text(json.dumps({**results, "sections": [*known, *NEW]}))
    plots.save(tmp_path)
    page = (tmp_path / "README.md").read_text()
    files = {each.name for each in tmp_path.glob("*.svg")}
    assert set(re.findall(r"\]\(([\w-]+\.svg)\)", page)) == files
    assert {"growth.svg", "memory.svg", "own-code.svg", "storm.svg", "cpu-stores.svg", "workers-peers.svg"} <= files
    for name in files:
        ElementTree.parse(tmp_path / name)
        _, _, below = page.partition(f"]({name})\n\n")
        is_shown = re.search(rf"!\[[^]]+\]\({name}\)", page)
        assert not is_shown or len(below.partition("\n")[0]) > 100
    assert 3 <= page.count("![") < len(files)  # the others are worth a link


def test_page_says_which_goals_were_missed(tmp_path: Path) -> None:
    """All of them, as many as there are, and none that was reached."""
    results = json.loads(RESULTS.read_text())
    (tmp_path / "results.json").write_text(json.dumps(results))
    plots.save(tmp_path)
    _, _, missed = (tmp_path / "README.md").read_text().partition("## What falls short")
    goals = [goal for section in results["sections"] for goal in section["goals"]]
    assert {goal["what"] for goal in goals if f"| {goal['what']} |" in missed} == {
        goal["what"] for goal in goals if not goal["reached"]
    }


def test_results_that_lack_a_section_are_drawn_without_it() -> None:
    """Results that were saved before a part was written can still be drawn."""
    assert [each.name for each in plots.draw({"sections": NEW[1:]}, None)] == ["growth", "memory"]
