"""Real stores by name, for tests that are about any of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.proof.targets import Site, start, why_not


@contextmanager
def a_store(name: str) -> Iterator[Site]:
    """A new store of one of :data:`lab.proof.targets.ALL`; without its server the test is skipped, or fails in CI."""
    if reason := why_not(name):
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"{name}: {reason}")
    with start(name) as site:
        yield site
