"""``python -m lab.pictures``: draw the pictures that follow from code and pages into ``docs/pictures``."""

from collections.abc import Callable, Mapping

from lab.pictures import DOCS, rooms, tools

FOLDER = DOCS / "pictures"

PICTURES: Mapping[str, Callable[[], str]] = {"which-tool": tools.draw, "rooms": rooms.draw}
"""By the name of the file."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
