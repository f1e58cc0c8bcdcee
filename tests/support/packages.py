"""What a test needs besides the package: it is skipped on a laptop that lacks it, and fails in CI."""

import os
import shutil
from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Mark a test that imports these packages."""
    absent = [each for each in packages if find_spec(each) is None]
    is_optional = os.environ.get("CI") != "true"
    return pytest.mark.skipif(bool(absent) and is_optional, reason=f"not installed: {', '.join(absent)}")


def program(name: str, package: str = "") -> str:
    """Where a program is that apt installs with ``package``, by default of its own name."""
    place, absent = shutil.which(name), f"not installed: {name}; run: apt-get install {package or name}"
    if place is None and os.environ.get("CI") == "true":
        pytest.fail(absent)
    return place or pytest.skip(absent)
