"""Where the project's pages say more about an error, a warning or a line of the log."""

import re

PAGES = "https://celery-idempotent.readthedocs.io/en/stable/troubleshooting"


def link(entry: str) -> str:
    """The address of an entry: a page and a heading on it, such as ``"errors#key-missing"``."""
    page, _, heading = entry.partition("#")
    return f"{PAGES}/{page}.html#{heading}"


_ENTRY = re.compile(r"[a-z0-9-]+#[a-z0-9-]+")


def with_link(text: str, see: object) -> str:
    """``text`` and where to read more; the text alone without an entry.

    A subclass of somebody else can have a ``see`` of its own, and a record a forged one: neither leads anywhere.
    """
    if not (isinstance(see, str) and _ENTRY.fullmatch(see)):
        return text
    sentence = text if text.endswith("...") else text.removesuffix(".")
    return f"{sentence}; see {link(see)}"
