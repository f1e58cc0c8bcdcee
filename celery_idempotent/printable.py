"""What came from elsewhere, made safe to print: a task id that could forge a line of a log, a URL with a password."""

import re

_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, ends of lines, changes of direction, and what no terminal can encode."""


def one_line(value: object) -> str:
    """``str(value)`` on one line, with nothing in it that a terminal obeys: that is written as its escape in Python."""
    return _UNSAFE.sub(_escaped, str(value))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.IGNORECASE | re.ASCII)


def scheme_of(url: str) -> str:
    """What an error shows of ``url``: its scheme. A password can stand anywhere behind it, above all in a wrong URL."""
    scheme, separator, _ = url.partition("://")
    return f"'{scheme}://...'" if separator and _SCHEME.fullmatch(scheme) else "'...'"
