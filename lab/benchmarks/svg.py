"""Two kinds of chart as SVG, legible on a light and on a dark page: bars that lie, and lines in panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Bars", "Lines", "Panel", "bars", "lines", "ticks"]

_WIDTH = 860
_LEFT = 60
_RIGHT = 34
_COLOURS = ("blue", "orange", "green", "purple", "red", "grey", "teal", "brown")

# A background of its own: the page's may be dark while the reader's system is light, and the other way round.
_STYLE = """<style>
svg { --page: #ffffff; --ink: #1f2328; --faint: #d8dee4; --blue: #1f6feb; --orange: #d9730d; --green: #1a8a4b;
  --purple: #8250df; --red: #cf222e; --grey: #7d8590; --teal: #0f8b8d; --brown: #9a6324; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #e6edf3; --faint: #30363d; --blue: #58a6ff;
  --orange: #f0983e; --green: #3fb950; --purple: #bc8cff; --red: #ff7b72; --grey: #9198a1; --teal: #39c5cf;
  --brown: #d2a679; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); } .title { font-weight: 600; font-size: 15px; }
.grid { stroke: var(--faint); } .frame { stroke: var(--ink); } .middle { text-anchor: middle; }
.end { text-anchor: end; } .line { fill: none; stroke-width: 2; }
.limit { stroke: var(--red); stroke-dasharray: 6 4; }
</style>"""


@dataclass(frozen=True, slots=True)
class Axis:
    """What is measured along it, with its unit; of a logarithmic one, every value must be positive."""

    title: str
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows of bars, one for each series; None: this row has none of it."""

    title: str
    axis: Axis
    rows: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One field of a chart with lines, by series."""

    title: str
    series: Mapping[str, Points]


@dataclass(frozen=True, slots=True)
class Lines:
    """Panels side by side, all on the same two axes."""

    title: str
    x: Axis
    y: Axis
    panels: Sequence[Panel]
    #: What every line is to stay below, if there is such a value.
    limit: float | None = None


def ticks(low: float, high: float, axis: Axis) -> list[float]:
    """Round numbers that cover ``low`` to ``high``: powers of ten, or some equal steps from 0."""
    if axis.is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [float(10**each) for each in range(first, max(last, first + 1) + 1)]
    raw = high / 5 or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [index * step for index in range(max(1, math.ceil(high / step)) + 1)]


def bars(chart: Bars) -> str:
    """The chart as SVG."""
    height_of_bar, gap, top = 15, 12, 64
    left = 30 + 7 * max(map(len, chart.rows))
    group = height_of_bar * len(chart.series) + gap
    bottom = top + group * len(chart.rows)
    marks = ticks(0, max(each for row in chart.series.values() for each in row if each is not None), chart.axis)
    x = _scale(marks, left, _WIDTH - 70, chart.axis)
    drawn = [*_head(chart.title, chart.series)]
    for mark in marks:
        drawn += [_line("grid", x(mark), top - 6, x(mark), bottom), _text(_told(mark), x(mark), bottom + 18, "middle")]
    drawn.append(_text(chart.axis.title, (left + _WIDTH - 70) / 2, bottom + 40, "middle"))
    for row, name in enumerate(chart.rows):
        begin = top + row * group
        drawn.append(_text(name, left - 10, begin + (group - gap) / 2 + 5, "end"))
        for index, values in enumerate(chart.series.values()):
            value = values[row]
            if value is not None:
                y, colour = begin + index * height_of_bar, _COLOURS[index]
                width, height = f"{x(value) - left:.1f}", height_of_bar - 2
                drawn.append(
                    f'<rect x="{left}" y="{y}" width="{width}" height="{height}" style="fill: var(--{colour})"/>'
                )
                drawn.append(_text(_told(value), x(value) + 5, y + 11.5))
    drawn.append(_line("frame", left, top - 6, left, bottom))
    return _svg(drawn, bottom + 54, chart.title)


def lines(chart: Lines) -> str:
    """The chart as SVG."""
    top, height, between = 92, 250, 34
    bottom, count = top + height, len(chart.panels)
    width = (_WIDTH - _LEFT - 20 - _RIGHT - between * (count - 1)) / count
    points = [point for panel in chart.panels for series in panel.series.values() for point in series]
    names = list(dict.fromkeys(name for panel in chart.panels for name in panel.series))
    xs, ys = (
        ticks(min(each[side] for each in points), max(each[side] for each in points), axis)
        for side, axis in enumerate((chart.x, chart.y))
    )
    y = _scale(ys, bottom, top, chart.y)
    drawn = [*_head(chart.title, names)]
    for index, panel in enumerate(chart.panels):
        begin = _LEFT + 20 + index * (width + between)
        x = _scale(xs, begin, begin + width, chart.x)
        for mark in ys:
            drawn.append(_line("grid", begin, y(mark), begin + width, y(mark)))
            drawn += [] if index else [_text(_short(mark), begin - 8, y(mark) + 4, "end")]
        drawn += [_text(_short(mark), x(mark), bottom + 18, "middle") for mark in xs]
        drawn += [_line("frame", begin, bottom, begin + width, bottom), _line("frame", begin, top, begin, bottom)]
        drawn.append(_text(panel.title, begin + width / 2, top - 10, "middle"))
        if chart.limit is not None:
            drawn.append(_line("limit", begin, y(chart.limit), begin + width, y(chart.limit)))
        for name, series in panel.series.items():
            colour = f"var(--{_COLOURS[names.index(name)]})"
            path = " ".join(f"{x(one):.1f},{y(other):.1f}" for one, other in series)
            drawn.append(f'<polyline class="line" points="{path}" style="stroke: {colour}"/>')
            drawn += [
                f'<circle cx="{x(one):.1f}" cy="{y(other):.1f}" r="3" style="fill: {colour}"/>' for one, other in series
            ]
    drawn.append(_text(chart.x.title, (_LEFT + _WIDTH) / 2, bottom + 42, "middle"))
    middle = (top + bottom) / 2
    drawn.append(f'<g transform="rotate(-90 18 {middle})">{_text(chart.y.title, 18, middle + 4, "middle")}</g>')
    return _svg(drawn, bottom + 56, chart.title)


def _scale(marks: Sequence[float], first: float, last: float, axis: Axis) -> Callable[[float], float]:
    of: Callable[[float], float] = math.log10 if axis.is_log else float
    low, high = of(marks[0]), of(marks[-1])
    return lambda value: first + (of(value) - low) / (high - low) * (last - first)


def _head(title: str, names: Sequence[str] | Mapping[str, object]) -> Iterator[str]:
    yield _text(title, 16, 24, "title")
    at = 16.0
    for index, name in enumerate(names if len(names) > 1 else ()):
        yield f'<rect x="{at:.0f}" y="37" width="12" height="12" style="fill: var(--{_COLOURS[index]})"/>'
        yield _text(name, at + 17, 48)
        at += 36 + 7.5 * len(name)


def _text(words: str, x: float, y: float, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _svg(drawn: Sequence[str], height: float, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img"'
    body = "\n".join(drawn)
    return (
        f'{head} width="{_WIDTH}">\n<title>{escape(title)}</title>\n{_STYLE}\n'
        f'<rect width="100%" height="100%" style="fill: var(--page)"/>\n{body}\n</svg>\n'
    )
