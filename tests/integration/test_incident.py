"""The incident of the docs, played again on a real worker, store, provider and Prometheus."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_VARIES = re.compile(r"[0-9a-f]{64}|:\d{4,5}(?=/)")
"""Keys and ports."""


_TOLD = ("$ ", "PAGE ", "judged ", "200 {", "404 ", "The provider's", "200 orders charged")


def _told(text: str) -> list[str]:
    """What was typed and what was decided, without what is another each time."""
    return [_VARIES.sub("...", line) for line in text.splitlines() if line.startswith(_TOLD)]


@pytest.mark.timeout(300)
def test_the_incident_goes_as_the_page_says() -> None:
    """200 operations in doubt, an alert, two verdicts by label, each order charged once, every verdict on record."""
    if shutil.which("prometheus") is None:
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict("not installed: prometheus; run: apt-get install prometheus")
    played = subprocess.run(
        [sys.executable, "-m", "lab.incident"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    page = (ROOT / "docs/how-to/incident.md").read_text()

    assert played.returncode == 0, played.stdout + played.stderr
    assert _told(played.stdout) == _told(page)
    assert "completed by ann, on UNKNOWN after attempt 1, because: INC-42" in played.stdout
