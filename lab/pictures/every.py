"""The pictures that follow from code and pages, by the name of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.pictures import rooms, tools
from lab.pictures.pages import DOCS

FOLDER = DOCS / "pictures"

PICTURES: Mapping[str, Callable[[], str]] = {
    "which-tool": tools.draw,
    "rooms": rooms.draw,
}
