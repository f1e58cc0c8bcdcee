"""Which tool for which effect: the table of docs/how-to/effects.md as questions, asked in its order."""

from textwrap import wrap

from lab.pictures import plain, rows
from lab.pictures.svg import LINE, WIDTH, arrow, box, paragraph, picture, text

_ASKED, _GAP, _LETTERS = 196, 40, 22
_LEAF = WIDTH - 16 - _ASKED - _GAP


def draw() -> str:
    """The picture: a question for each row but the last, which is what is left; its tool beside it."""
    table = [[plain(cell) for cell in row] for row in rows("how-to/effects.md", "the effect is ...")]
    drawn, y, beside = [text("The effect is ...", 8, 22, "title")], 34.0, 8 + _ASKED + _GAP
    for index, (effect, tool, declared, promise, *_) in enumerate(table, 1):
        leaf = [("mono bold", each) for each in wrap(tool, 27)] + [("mono", each) for each in wrap(declared, 27)]
        leaf += [("small", each) for each in wrap(promise.partition(":")[0], 29)]
        asked = len(wrap(effect, _LETTERS)) * LINE + 16
        height, middle = max(asked, len(leaf) * LINE + 16), y + 24
        drawn += [box(8, y, _ASKED, asked), *paragraph(effect, 18, y + 22, _LETTERS)]
        drawn += [arrow((8 + _ASKED, middle), (beside, middle), "green"), box(beside, y, _LEAF, height, "green")]
        drawn += [text(each, beside + 10, y + 22 + row * LINE, classes) for row, (classes, each) in enumerate(leaf)]
        if index < len(table):
            drawn.append(text("yes", 8 + _ASKED + 16, middle - 7, "middle small green"))
            drawn.append(arrow((40, y + asked), (40, y + height + 28), "grey"))
            drawn.append(text("no", 50, y + height + 19, "small grey"))
        y += height + 28
    said = "; ".join(
        f"{effect}: {tool}, declared {declared}, {promise}" for effect, tool, declared, promise, *_ in table
    )
    return picture("Which tool for which effect", f"{said}.", drawn, y - 12)
