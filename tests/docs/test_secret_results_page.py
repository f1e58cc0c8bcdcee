"""docs/how-to/secret-results.md: its script runs as it stands there, and the file of its store has no secret."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from tests.support.documents import DOCS, code

PAGE = DOCS / "how-to/secret-results.md"
((_, SCRIPT),) = code(PAGE, "py")
SECRET = "DE02120300000000202051"
OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "orders.py").write_text(SCRIPT)
    return tmp_path


def _run(here: Path, keys: str, *command: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{here}:{DOCS.parent}", "ORDER_KEYS": keys}
    return subprocess.run([sys.executable, *command], cwd=here, env=paths, capture_output=True, text=True)


def test_script_charges_once_and_keeps_no_secret_in_clear(here: Path) -> None:
    """The first run prints both lines, the second that of the store alone; so does one after a rotation."""
    lines = [each.split("# ")[1].split(", then ") for each in re.findall(r"^python orders.*$", PAGE.read_text(), re.M)]
    first, again = lines[0], [lines[1][0].removesuffix(", out of the store")]

    assert _run(here, OLD, "orders.py", "o-1").stdout.splitlines() == first
    assert _run(here, OLD, "orders.py", "o-1").stdout.splitlines() == again
    assert _run(here, f"{NEW} {OLD}", "orders.py", "o-1").stdout.splitlines() == again
    assert SECRET.encode() not in (here / "orders.sqlite").read_bytes()
    assert SECRET in again[0]


def test_script_charges_nothing_without_the_key(here: Path) -> None:
    """It ends with what is missing, and the next run with the key has the result."""
    _run(here, OLD, "orders.py", "o-1")
    refused = _run(here, NEW, "orders.py", "o-1")

    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "add that key to the end of idempotency_cipher" in refused.stderr
    assert SECRET in _run(here, OLD, "orders.py", "o-1").stdout


def test_command_shows_what_is_encrypted(here: Path) -> None:
    """It has the keys, by the app."""
    _run(here, OLD, "orders.py", "o-1")
    shown = _run(here, OLD, "-m", "celery", "-A", "orders", "idempotency", "show", "o-1", "--json")

    assert SECRET in shown.stdout, shown.stderr


def test_script_is_short() -> None:
    """A page to copy from."""
    assert len(SCRIPT.splitlines()) < 60
