"""SVG that can be read on a light and on a dark page, and at the width of a phone: what all pictures share.

Pictures are ``WIDTH`` wide, so that their text is still text where a phone makes them narrower.
"""

from collections.abc import Iterable, Sequence
from html import escape
from textwrap import wrap

WIDTH = 480
LINE = 18.0  # from one line of text to the next
MONO = "mono"
"""A class of text, besides ``bold``, ``middle``, ``end``, ``small`` and the names of colours."""

# A background of its own: the page's may be dark while the reader's system is light, and the other way round.
_STYLE = """<style>
svg { --page: #ffffff; --ink: #1f2328; --faint: #d8dee4; --box: #f3f5f8; --blue: #1f6feb; --orange: #b75a00;
  --green: #1a7f43; --purple: #8250df; --red: #cf222e; --grey: #656d76; --teal: #0b7a7c; --brown: #9a6324; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #e6edf3; --faint: #30363d; --box: #1a2029;
  --blue: #58a6ff; --orange: #f0983e; --green: #3fb950; --purple: #bc8cff; --red: #ff7b72; --grey: #9198a1;
  --teal: #39c5cf; --brown: #d2a679; } }
text { font: 14px system-ui, sans-serif; fill: var(--ink); } .title { font-weight: 600; font-size: 15px; }
.bold { font-weight: 600; } .mono { font-family: ui-monospace, monospace; font-size: 13px; } .small { font-size: 13px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 5px; stroke-linejoin: round; }
.grid { stroke: var(--faint); } .frame { stroke: var(--ink); } .line { fill: none; stroke-width: 2; }
.limit { stroke: var(--red); stroke-dasharray: 6 4; } .dashed { stroke-dasharray: 5 4; }
</style>"""

_COLOURS = ("ink", "blue", "orange", "green", "purple", "red", "grey", "teal", "brown")


def picture(title: str, says: str, drawn: Iterable[str], height: float, *, width: float = WIDTH) -> str:
    """The file: ``title`` names the picture, and ``says`` is for those who cannot see it."""
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'role="img" aria-labelledby="title desc">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="desc">{escape(says)}</desc>\n{_STYLE}\n'
        f'<rect width="100%" height="100%" style="fill: var(--page)"/>\n{body}\n</svg>\n'
    )


def text(words: str, x: float, y: float, *kinds: str) -> str:
    """One line of text; ``kinds`` are classes and at most one colour."""
    classes = " ".join(each for each in kinds if each not in _COLOURS)
    colour = "".join(f' style="fill: var(--{each})"' for each in kinds if each in _COLOURS)
    named = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{colour}>{escape(words)}</text>'


def paragraph(words: str, x: float, y: float, letters: int, *kinds: str) -> list[str]:
    """Lines of at most so many letters, the first at ``y``."""
    return [text(each, x, y + index * LINE, *kinds) for index, each in enumerate(wrap(words, letters))]


def box(x: float, y: float, width: float, height: float, colour: str = "ink", *, fill: str = "box") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" '
        f'style="fill: var(--{fill}); stroke: var(--{colour}); stroke-width: 1.5"/>'
    )


def arrow(points: Sequence[tuple[float, float]], colour: str = "ink", kind: str = "") -> str:
    """A line through ``points``, with its head at the last one."""
    (x1, y1), (x2, y2) = points[-2:]
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    foot = x2 - 9 * dx, y2 - 9 * dy
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*points[:-1], foot])
    head = [(x2, y2), (foot[0] - 4.5 * dy, foot[1] + 4.5 * dx), (foot[0] + 4.5 * dy, foot[1] - 4.5 * dx)]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
    classes = f"line {kind}".strip()
    return (
        f'<polyline class="{classes}" points="{path}" style="stroke: var(--{colour})"/>'
        f'<polygon points="{corners}" style="fill: var(--{colour})"/>'
    )
