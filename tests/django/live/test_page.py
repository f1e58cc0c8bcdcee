"""A reader follows the how-to on Django in an empty folder, up to the output that it shows."""

import sys
from pathlib import Path

import pytest

from tests.support.documents import DOCS, code
from tests.support.tutorial import READY, Terminal, is_shown

PAGE = DOCS / "how-to/django.md"
BIN = Path(sys.executable).parent


def _write_files(folder: Path) -> None:
    """Each block into the file that its first line names: in place of what Django made, but for the settings."""
    for _, text in code(PAGE, "py"):
        first, rest = text.split("\n", 1)
        name, *at_its_end = first.removeprefix("# ").split(", ")
        with (folder / name).open("a" if at_its_end else "w") as file:
            file.write(rest)


@pytest.mark.worker
def test_page_can_be_followed_in_an_empty_folder(tmp_path: Path) -> None:
    """From ``startproject`` to a charge that two messages make once, with the output that the page shows."""
    _, create, prepare, twice = (text.splitlines() for _, text in code(PAGE, "sh"))
    *migrate, start = prepare
    publish, *look = twice
    with Terminal(tmp_path) as worker, Terminal(tmp_path) as other:
        for terminal in (worker, other):
            terminal.run(f"export PATH={BIN}:$PATH; unset ${{!DJANGO*}}")
        for line in create:
            worker.run(line)
        _write_files(tmp_path)
        for line in migrate:
            worker.run(line)
        worker.start(f"{start} --loglevel INFO", READY)
        other.run(publish)
        worker.see(["...Task orders.tasks.charge...succeeded..."] * 2)
        printed = "".join(map(other.run, look))
    ((_, shown),) = code(PAGE, "text")
    assert is_shown(shown, printed), printed
