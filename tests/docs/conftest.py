"""What several pages need of the process that they share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unchanged_loggers() -> Iterator[None]:
    """A page configures the log as a reader does, which may disable all other loggers and set the least level."""
    ours = ["celery_idempotent", *(each for each in logging.root.manager.loggerDict if "celery_idempotent." in each)]
    before = {
        each: (each.disabled, each.propagate, each.level, [*each.handlers]) for each in map(logging.getLogger, ours)
    }
    least = logging.root.manager.disable
    yield
    for logger, (disabled, propagate, level, handlers) in before.items():
        logger.disabled, logger.propagate, logger.handlers = disabled, propagate, handlers
        logger.setLevel(level)
    logging.disable(least)
