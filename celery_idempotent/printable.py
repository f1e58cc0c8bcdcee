"""Text that came from elsewhere, made safe to print: a task id must not be able to forge a line of a log."""

import re

__all__ = ["one_line"]

_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, ends of lines, changes of direction, and what no terminal can encode."""


def one_line(value: object) -> str:
    """``str(value)`` on one line, with nothing in it that a terminal obeys: that is written as its escape in Python."""
    return _UNSAFE.sub(_escaped, str(value))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
