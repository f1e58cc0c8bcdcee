"""The address that ends a message of the package: what a test that quotes the message leaves out."""

import re


def unlinked(text: str) -> str:
    """The text of an error, a warning or a line of the log without the address at its end."""
    return re.sub(r"(?:;? see[ =])https://\S+/troubleshooting/[\w-]+\.html#[\w-]+", "", text)
