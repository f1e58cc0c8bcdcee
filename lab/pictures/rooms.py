"""The rooms of the house, from the table of docs/architecture.md."""

from collections.abc import Mapping
from graphlib import TopologicalSorter

from lab.pictures import plain, rows
from lab.pictures.svg import WIDTH, arrow, box, picture, text

Rooms = Mapping[str, frozenset[str]]
"""By room: those that it may import from."""

_HEIGHT, _BETWEEN, _WIDE = 54, 44, 210
_SAYS = {
    "protocol": "decides: pure functions",
    "engine": "carries decisions out",
    "stores": "where records live",
    "integration": "Celery's side",
    "contrib": "optional: Django, HTTP, AWS",
    "testing": "for users' tests",
}


def rooms() -> Rooms:
    found = rows("architecture.md", "room")
    return {plain(each[0]): frozenset(plain(each[2]).replace(",", " ").split()) for each in found}


def arrows(of: Rooms) -> list[tuple[str, str]]:
    """The imports that do not follow from others: who follows them comes to all that a room may import from."""
    return [
        (room, below)
        for room, used in of.items()
        for below in sorted(used)
        if not any(below in of[other] for other in used)
    ]


def draw() -> str:
    """The picture: each room above those that it imports from."""
    of, floors = rooms(), list[list[str]]()
    sorter = TopologicalSorter(of)
    sorter.prepare()
    while floor := sorter.get_ready():
        floors.insert(0, sorted(floor))
        sorter.done(*floor)
    at = {
        room: (WIDTH / 2 + (index - (len(floor) - 1) / 2) * (_WIDE + 20), 16.0 + level * (_HEIGHT + _BETWEEN))
        for level, floor in enumerate(floors)
        for index, room in enumerate(floor)
    }
    drawn = [arrow(*_way(at[room], at[below]), "grey") for room, below in arrows(of)]
    for room, (x, y) in at.items():
        drawn += [box(x - _WIDE / 2, y, _WIDE, _HEIGHT), text(room, x, y + 22, "middle bold mono")]
        drawn.append(text(_SAYS[room], x, y + 42, "middle small"))
    height = 16 + len(floors) * (_HEIGHT + _BETWEEN) - _BETWEEN + 16
    said = "; ".join(f"{room} imports from {', '.join(sorted(used)) or 'no other room'}" for room, used in of.items())
    return picture("The rooms of the package: imports point downwards", f"{said}.", drawn, height)


def _way(start: tuple[float, float], end: tuple[float, float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """From the lower edge of one room to the upper edge of another, each nearer to the other than its middle."""
    (x1, y1), (x2, y2) = start, end
    lean = (x2 - x1) / 4
    return (x1 + lean, y1 + _HEIGHT), (x2 - lean, y2)
