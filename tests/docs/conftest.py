"""What several pages need of the process that they share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unchanged_logger() -> Iterator[None]:
    """Documents configure the log as a reader does; the next test must not write through their handlers."""
    logger = logging.getLogger("celery_idempotent")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
