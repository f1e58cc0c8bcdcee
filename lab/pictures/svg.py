"""SVG that can be read on a light and on a dark page, and at the width of a phone: what all pictures share.

Pictures are ``WIDTH`` wide, so that their text is still text where a phone makes them narrower.
"""

from collections.abc import Iterable
from html import escape
from textwrap import wrap

WIDTH = 480
LINE = 18.0  # from one line of text to the next

# A background of its own: the page's may be dark while the reader's system is light, and the other way round.
_STYLE = """<style>
svg { color: #1f2328; --page: #ffffff; --box: #f3f5f8; --green: #1a7f43; --grey: #656d76; }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; --page: #0d1117; --box: #1a2029; --green: #3fb950;
  --grey: #9198a1; } }
.green { color: var(--green); } .grey { color: var(--grey); } .page { fill: var(--page); }
.box { fill: var(--box); stroke: currentColor; stroke-width: 1.5; }
polyline { fill: none; stroke: currentColor; stroke-width: 2; } polygon { fill: currentColor; }
text { font: 14px system-ui, sans-serif; fill: currentColor; } .title { font-weight: 600; font-size: 15px; }
.bold { font-weight: 600; } .mono { font-family: ui-monospace, monospace; font-size: 13px; } .small { font-size: 13px; }
.middle { text-anchor: middle; }
</style>"""


def picture(title: str, says: str, drawn: Iterable[str], height: float) -> str:
    """The file: ``title`` names the picture, and ``says`` is for those who cannot see it."""
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'role="img" aria-labelledby="title desc">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="desc">{escape(says)}</desc>\n{_STYLE}\n'
        f'<rect width="100%" height="100%" class="page"/>\n{body}\n</svg>\n'
    )


def text(words: str, x: float, y: float, classes: str = "") -> str:
    """One line of text; its ``classes`` are those of the style: ``title``, ``bold``, ``middle``, ``grey``, ..."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(words)}</text>'


def paragraph(words: str, x: float, y: float, letters: int) -> list[str]:
    """Lines of at most so many letters, the first at ``y``."""
    return [text(each, x, y + index * LINE) for index, each in enumerate(wrap(words, letters))]


def box(x: float, y: float, width: float, height: float, colour: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" class="box {colour}"/>'


def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    """A line with its head at the end."""
    (x1, y1), (x2, y2) = start, end
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    foot = x2 - 9 * dx, y2 - 9 * dy
    head = [end, (foot[0] - 4.5 * dy, foot[1] + 4.5 * dx), (foot[0] + 4.5 * dy, foot[1] - 4.5 * dx)]
    line, corners = (" ".join(f"{x:.1f},{y:.1f}" for x, y in points) for points in ([start, foot], head))
    return f'<polyline class="{colour}" points="{line}"/><polygon class="{colour}" points="{corners}"/>'
