"""Tests of what other packages do with this one."""

import os
from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test on a laptop without the packages; in CI it fails."""
    absent = [each for each in packages if find_spec(each) is None]
    is_optional = os.environ.get("CI") != "true"
    return pytest.mark.skipif(bool(absent) and is_optional, reason=f"not installed: {', '.join(absent)}")
