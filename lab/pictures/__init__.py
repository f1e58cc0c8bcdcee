"""The pictures of ``docs``, drawn from what they show: ``make pictures`` writes the files, and a test compares them."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str, first_column: str) -> list[list[str]]:
    """The cells of the table of ``page`` whose first column has that name, below its head."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    body = lines[start + 2 :]
    end = next((index for index, line in enumerate(body) if not line.startswith("|")), len(body))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def plain(cell: str) -> str:
    """A cell without its markup."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("*", "")
