"""The complete app of docs/how-to/set-up.md, started as it says: on a real Redis, with a real worker."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.embedded import EmbeddedRedis
from tests.support.documents import DOCS, code

PAGE = DOCS / "how-to" / "set-up.md"
SERVER = "redis://localhost:6379/"
BIN = Path(sys.executable).parent


def _block(language: str, words: str) -> str:
    (found,) = (text for _, text in code(PAGE, language) if words in text)
    return found


def _command(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    return [str(BIN / program), *arguments]


@pytest.fixture
def shop(tmp_path: Path, redis_server: EmbeddedRedis) -> Path:
    """The folder of a reader who has pasted the block; databases 10 and 11 are used by nobody else."""
    text = _block("python", f'backend="{SERVER}')
    assert text.count(SERVER) == 3
    (tmp_path / "shop.py").write_text(text.replace(SERVER, f"redis://127.0.0.1:{redis_server.port}/1"))
    return tmp_path


@pytest.fixture
def log(shop: Path) -> Iterator[Path]:
    """What the worker of that shop prints."""
    log = shop / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            _command(_block("sh", "celery -A shop worker")), cwd=shop, stdout=output, stderr=output
        ) as worker,
    ):
        try:
            yield log
        finally:
            worker.terminate()


def test_complete_app_charges_once(shop: Path, log: Path) -> None:
    """Two messages, one result, one line of the worker; and one record."""
    ordered = subprocess.run(
        [sys.executable, "-c", _block("py", "from shop import charge")],
        cwd=shop,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ordered.returncode == 0, ordered.stderr + log.read_text()
    first, second = ordered.stdout.split()
    assert first == second

    assert log.read_text().count("charging 500 for o-1") == 1
    listed = subprocess.run(
        _command("celery -A shop idempotency list"), cwd=shop, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["STATUS", "COMPLETED"]
