"""What came from elsewhere, made safe to print: a task id that could forge a line of a log, a URL with a password."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent.troubleshooting import link

_UNSAFE = re.compile(
    "[\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Control characters, ends of lines, changes of direction, what nobody sees, and what no terminal can encode."""


def one_line(value: object) -> str:
    """``str(value)`` on one line, with nothing in it that a terminal obeys: that is written as its escape in Python."""
    return _UNSAFE.sub(_escaped, str(value))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def say(log: Callable[..., None], event: str, /, **fields: object) -> None:
    """Log what happened: in logfmt for people and parsers, and by field for formatters that make JSON of it.

    A warning or an error ends with the field ``see``: the address of the entry that says what to do. ``log`` is the
    method of a logger, or a partial with the level. A field that is None is left out.
    """
    told = {name: _plain(value) for name, value in fields.items() if value is not None}
    if _is_loud(log):
        told["see"] = link(f"log-lines#{event.replace('_', '-')}")
    name = f"idempotency.{event}"
    log(
        " ".join((f"event={name}", *(f"{each}=%s" for each in told))),  # trackers of errors group by the template
        *map(_logfmt, told.values()),
        # Under names that neither LogRecord nor anybody else has.
        extra={"idempotency_event": name, **{f"idempotency_{each}": value for each, value in told.items()}},
        stacklevel=2,
    )


_WARNING = 30
"""Of the module ``logging``."""


def _is_loud(log: Any) -> bool:
    level = next(iter(log.args), None) if isinstance(log, partial) else getattr(log, "__name__", None)
    return level >= _WARNING if isinstance(level, int) else level not in {"debug", "info"}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float) else one_line(value)


_QUOTED = re.compile('[ ="\ufffd]|^$')
"""What a value of logfmt holds only between quotes; :func:`one_line` leaves no control character in it."""


def _logfmt(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if not _QUOTED.search(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def not_installed(error: ModuleNotFoundError, extra: str | None) -> str:
    """What to do where an optional package is missing."""
    return f'{error.name} is not installed; run: pip install "celery-idempotent[{extra}]"'


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.IGNORECASE | re.ASCII)


def scheme_of(url: str) -> str:
    """What an error shows of ``url``: its scheme. A password can stand anywhere behind it, above all in a wrong URL."""
    scheme, separator, _ = url.partition("://")
    return f"'{scheme}://...'" if separator and _SCHEME.fullmatch(scheme) else "'...'"
