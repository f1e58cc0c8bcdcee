"""What `make demo` prints: recorded once, and the part of it that says most as a picture of a terminal.

``python -m lab.pictures record`` makes the recording, with real workers; ``make pictures`` draws it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from lab.demo.__main__ import OURS, PLAIN
from lab.demo.screen import STYLES
from lab.svg import picture

RECORDING = Path(__file__).with_name("demo.txt")

_ROOT = Path(__file__).resolve().parents[2]
_LETTERS, _LINE = 58, 18
_CUT = "⋮"
_COLOURS = {"dim": "grey", "red": "red", "cyan": "teal", "green": "green", "bold red": "red", "yellow": "orange"}
"""By style of the demo's screen."""
_KEPT = "Every promise was kept."


def record() -> None:
    """Run the demo and keep what it prints, if its promises were kept.

    Raises:
        subprocess.CalledProcessError: They were not, or it proves nothing.
    """
    command = [sys.executable, "-m", "lab.demo"]
    ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    RECORDING.write_text("".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines()))


def shown(recording: Sequence[str]) -> list[str]:
    """The lines of a recording that the picture has: the first two charges that were killed, and the verdict.

    What is left out of a column is marked once, at its end.
    """
    first = [*_act(recording, PLAIN), "", *_act(recording, OURS)]
    return ["$ make demo", "", *first, "", *_verdict(recording)]


def _verdict(recording: Sequence[str]) -> list[str]:
    """What became of the charges; of the other effects the page of the demo tells."""
    begin = recording.index(_KEPT)
    return list(recording[begin : begin + 4])


def _act(recording: Sequence[str], name: str) -> list[str]:
    """A column of the first act."""
    begin = recording.index(name)
    told = recording[begin + 1 : recording.index("", begin)]
    killed = [found[1] for line in told if (found := re.search(r" (charge \d+) +\d+ killed", line))]
    first = set(killed[:2])
    return [name, *(line for line in told if any(each in line for each in first)), f"   {_CUT}"]


def draw() -> str:
    """The picture."""
    lines = [
        (row, bool(_TOLD.match(line))) for line in shown(RECORDING.read_text().splitlines()) for row in _folded(line)
    ]
    drawn = [
        f'<text class="mono" xml:space="preserve" x="12" y="{26 + index * _LINE}">{_spans(row, is_told)}</text>'
        for index, (row, is_told) in enumerate(lines)
        if row
    ]
    verdict = " ".join(RECORDING.read_text().partition(_KEPT)[2].split())
    return picture(
        "make demo: plain Celery and IdempotentTask under the same fire", verdict, drawn, 26 + len(lines) * _LINE
    )


def _folded(line: str) -> list[str]:
    """The line as a narrow terminal has it, what follows below the beginning of its text."""
    told = _TOLD.match(line)
    indent = told.end() if told else len(line) - len(line.lstrip())
    return wrap(line, _LETTERS, subsequent_indent=" " * indent) or [""]


_TOLD = re.compile(r" +[\d.]+  \S+ \d+ +\d+ ")


def _spans(line: str, is_told: bool) -> str:
    if line in (PLAIN, OURS, _KEPT) or line.startswith("$"):
        colour = ' style="fill: var(--green)"' if line == _KEPT else ""
        return f'<tspan class="bold"{colour}>{escape(line)}</tspan>'
    styles = [""] * len(line)
    for pattern, style in (STYLES if is_told else {}).items():
        for found in re.finditer(pattern, line):
            styles[found.start() : found.end()] = [style] * (found.end() - found.start())
    return "".join(_span(line[start:end], styles[start]) for start, end in pairwise(_edges(styles)))


def _edges(styles: Sequence[str]) -> list[int]:
    return [0, *(index for index in range(1, len(styles)) if styles[index] != styles[index - 1]), len(styles)]


def _span(words: str, style: str) -> str:
    if not style:
        return escape(words)
    bold = ' class="bold"' if "bold" in style else ""
    return f'<tspan{bold} style="fill: var(--{_COLOURS[style]})">{escape(words)}</tspan>'
