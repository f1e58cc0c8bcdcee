"""Two kinds of chart: bars that lie, and lines in panels, one below the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from lab.svg import LINE, WIDTH, line, picture, text

__all__ = ["Axis", "Bars", "Lines", "Panel", "bars", "lines", "ticks"]

_LEFT, _RIGHT = 52, 30
_COLOURS = ("blue", "orange", "green", "purple", "red", "grey", "teal", "brown")


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
    """Panels below each other, all on the same two axes."""

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
    height_of_bar, gap = 15, 10
    drawn, top = _head(chart.title, "", list(chart.series))
    left, right = 16.0, WIDTH - 62
    group = LINE + height_of_bar * len(chart.series) + gap
    bottom = top + group * len(chart.rows)
    marks = ticks(0, max(each for row in chart.series.values() for each in row if each is not None), chart.axis)
    x = _scale(marks, left, right, chart.axis)
    for mark in marks:
        drawn += [line("grid", x(mark), top, x(mark), bottom), text(_told(mark), x(mark), bottom + LINE, "middle")]
    drawn += _below(chart.axis, bottom)
    for row, name in enumerate(chart.rows):
        begin = top + row * group
        drawn.append(text(name, left + 6, begin + 14, "bold", "halo"))
        for index, values in enumerate(chart.series.values()):
            value = values[row]
            if value is not None:
                y, colour = begin + LINE + index * height_of_bar, _COLOURS[index]
                width, height = f"{x(value) - left:.1f}", height_of_bar - 2
                drawn.append(
                    f'<rect x="{left}" y="{y}" width="{width}" height="{height}" style="fill: var(--{colour})"/>'
                )
                drawn.append(text(_told(value), x(value) + 5, y + 11.5, "small", "halo"))
    drawn.append(line("frame", left, top, left, bottom))
    return picture(chart.title, "; ".join(_in_words(chart)), drawn, bottom + 54)


def _in_words(chart: Bars) -> Iterator[str]:
    """The axis, and the values of every row."""
    yield chart.axis.title
    for row, name in enumerate(chart.rows):
        values = {of: each[row] for of, each in chart.series.items()}
        yield f"{name}: {', '.join(f'{of} {_told(each)}' for of, each in values.items() if each is not None)}"


def lines(chart: Lines) -> str:
    """The chart as SVG."""
    height, between = 140, 52
    points = [point for panel in chart.panels for series in panel.series.values() for point in series]
    names = list(dict.fromkeys(name for panel in chart.panels for name in panel.series))
    xs, ys = (
        ticks(min(each[side] for each in points), max(each[side] for each in points), axis)
        for side, axis in enumerate((chart.x, chart.y))
    )
    drawn, first = _head(chart.title, chart.y.title, names)
    for index, panel in enumerate(chart.panels):
        top = first + LINE + index * (height + between)
        drawn += _panel(chart, panel, names, (xs, ys), top, top + height)
    bottom = first + LINE + len(chart.panels) * (height + between) - between
    drawn += _below(chart.x, bottom)
    says = f"{chart.y.title}, by {chart.x.title}, of {', '.join(names)}"
    return picture(chart.title, says, drawn, bottom + 56)


def _panel(
    chart: Lines, panel: Panel, names: Sequence[str], marks: tuple[list[float], list[float]], top: float, bottom: float
) -> Iterator[str]:
    xs, ys = marks
    left, right = _LEFT, WIDTH - _RIGHT
    x, y = _scale(xs, left, right, chart.x), _scale(ys, bottom, top, chart.y)
    for mark in ys:
        yield line("grid", left, y(mark), right, y(mark))
        yield text(_short(mark), left - 8, y(mark) + 4, "end")
    yield from (text(_short(mark), x(mark), bottom + LINE, "middle") for mark in xs)
    yield from (line("frame", left, bottom, right, bottom), line("frame", left, top, left, bottom))
    yield text(panel.title, (left + right) / 2, top - 8, "middle", "bold")
    if chart.limit is not None:
        yield line("limit", left, y(chart.limit), right, y(chart.limit))
    for name, series in panel.series.items():
        colour = f"var(--{_COLOURS[names.index(name)]})"
        path = " ".join(f"{x(one):.1f},{y(other):.1f}" for one, other in series)
        yield f'<polyline class="line" points="{path}" style="stroke: {colour}"/>'
        for one, other in series:
            yield f'<circle cx="{x(one):.1f}" cy="{y(other):.1f}" r="3" style="fill: {colour}"/>'


def _scale(marks: Sequence[float], first: float, last: float, axis: Axis) -> Callable[[float], float]:
    of: Callable[[float], float] = math.log10 if axis.is_log else float
    low, high = of(marks[0]), of(marks[-1])
    return lambda value: first + (of(value) - low) / (high - low) * (last - first)


def _head(title: str, measured: str, names: Sequence[str]) -> tuple[list[str], float]:
    """Title, what goes up, and legend; and where what is below them begins."""
    rows = wrap(title, 48)
    drawn = [text(row, 16, 24 + index * 20, "title") for index, row in enumerate(rows)]
    y = 24.0 + 20 * len(rows)
    if measured:
        drawn.append(text(measured, 16, y, "small"))
        y += 22
    x = 16.0
    for index, name in enumerate(names if len(names) > 1 else ()):
        wide = 38 + 8 * len(name)
        if index and x + wide > WIDTH:
            x, y = 16.0, y + 20
        drawn.append(
            f'<rect x="{x:.0f}" y="{y - 11:.0f}" width="12" height="12" style="fill: var(--{_COLOURS[index]})"/>'
        )
        drawn.append(text(name, x + 17, y))
        x += wide
    return drawn, y + 14


def _below(axis: Axis, bottom: float) -> list[str]:
    return [text(axis.title, WIDTH / 2, bottom + 42, "middle", "small")]


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
