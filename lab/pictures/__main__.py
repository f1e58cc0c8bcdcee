"""``python -m lab.pictures``: draw the pictures that follow from code and pages into ``docs/pictures``."""

from __future__ import annotations

from lab.pictures.every import FOLDER, PICTURES

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
