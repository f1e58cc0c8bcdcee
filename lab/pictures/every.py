"""Every picture, by the name of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.pictures import demo, rooms, states, takeover, tools
from lab.pictures.pages import DOCS

FOLDER = DOCS / "pictures"

PICTURES: Mapping[str, Callable[[], str]] = {
    "record-states": states.draw,
    "takeover": takeover.draw,
    "which-tool": tools.draw,
    "rooms": rooms.draw,
    "demo": demo.draw,
}
