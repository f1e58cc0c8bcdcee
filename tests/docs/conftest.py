"""What several pages need of the process that they share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unchanged_loggers() -> Iterator[None]:
    """Documents configure the log as a reader does, and the next test reads the library's.

    A configuration changes more than the logger that it names: it may disable all others, and set the least level.
    """
    names = [each for each in logging.root.manager.loggerDict if each.startswith("celery_idempotent")]
    before = {each: vars(logging.getLogger(each)).copy() for each in {"celery_idempotent", *names}}
    handlers, least = list(logging.getLogger("celery_idempotent").handlers), logging.root.manager.disable
    yield
    for name, was in before.items():
        logger = logging.getLogger(name)
        logger.disabled, logger.propagate = was["disabled"], was["propagate"]
        logger.setLevel(was["level"])
    logging.getLogger("celery_idempotent").handlers[:] = handlers
    logging.disable(least)
