"""Where the project's pages say more about an error, a warning or a line of the log."""

PAGES = "https://celery-idempotent.readthedocs.io/en/stable/troubleshooting"


def link(entry: str) -> str:
    """The address of an entry.

    Args:
        entry: A page and a heading on it, such as ``"keys#the-key-is-missing"``.
    """
    page, _, heading = entry.partition("#")
    return f"{PAGES}/{page}.html#{heading}"


def with_link(text: str, see: str) -> str:
    """``text`` and where to read more; without an entry the text alone."""
    return f"{text}; see {link(see)}" if see else text
