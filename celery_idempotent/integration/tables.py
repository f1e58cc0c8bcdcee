"""Tables of text, as wide as a terminal."""

from collections.abc import Sequence

Row = Sequence[str]


def table(rows: Sequence[Row], *, last: int, width: int | None) -> str:
    """``rows`` in columns; the first one is the heads.

    Args:
        rows: As many cells in each.
        last: The column that is never cut: where a line would be wider than ``width``, it gets a line of its own, so
            that it can be copied.
        width: Characters in a line; None: without limit, one line for each row, for other programs to read.
    """
    lines = _aligned(rows)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    others = _aligned([[*row[:last], *row[last + 1 :]] for row in rows])
    return "\n".join(
        _cut(line, width) + (f"\n  {row[last]}" if row[last] else "") for line, row in zip(others, rows, strict=True)
    )


def _aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
