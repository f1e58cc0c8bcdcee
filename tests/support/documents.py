"""README.md and the pages of docs, taken apart: their code, their tables, their links."""

import re
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "DOCUMENTS", "ROOT", "code", "execute_block", "table", "words"]

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
    *(
        page
        for folder in ("how-to", "reference", "explanation", "troubleshooting", "reliability")
        for page in sorted(DOCS.glob(f"{folder}/*.md"))
    ),
]


def code(document: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of ``language``: line of the first line, and text."""
    text = document.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: each.start(1)].count("\n") + 1, each.group(1)) for each in found]


def execute_block(document: Path, line: int, text: str, names: dict[str, Any]) -> None:
    """Execute a block that :func:`code` found; ``names`` are what it sees, and get what it defines."""
    exec(compile("\n" * (line - 1) + text, document, "exec"), names)  # tracebacks point into the document


def table(document: Path, first_column: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is called ``first_column``, by column name."""
    lines = dropwhile(lambda line: not line.startswith(f"| {first_column} |"), document.read_text().splitlines())
    names, _, *rows = map(_cells, takewhile(lambda line: line.startswith("|"), lines))
    return [dict(zip(names, row, strict=True)) for row in rows]


def words(document: Path) -> Iterator[str]:
    """Everything between backticks outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return (each.group(1) for each in re.finditer(r"`([^`\n]+)`", prose))


def _cells(line: str) -> list[str]:
    return [each.strip().replace("\\|", "|") for each in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
