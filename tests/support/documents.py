"""README.md and the pages of docs, taken apart: their code, their tables, their links."""

import re
from collections.abc import Iterator
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
        for folder in ("how-to", "reference", "explanation", "troubleshooting")
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
    lines = document.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    names = _cells(lines[start])
    return [dict(zip(names, _cells(line), strict=True)) for line in _while_table(lines[start + 2 :])]


def words(document: Path) -> Iterator[str]:
    """Everything between backticks outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return (each.group(1) for each in re.finditer(r"`([^`\n]+)`", prose))


def _cells(line: str) -> list[str]:
    return [each.strip().replace("\\|", "|") for each in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _while_table(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line
