"""What several pages need of the process that they share."""

import logging
from collections.abc import Iterator

import pytest
from celery import _state


@pytest.fixture
def unchanged_celery() -> Iterator[None]:
    """Documents make apps and tasks as a reader does: each app becomes the thread's, each task every app's."""
    app, finalizers = _state._tls.current_app, set(_state._on_app_finalizers)
    yield
    _state._tls.current_app = app
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers |= finalizers


@pytest.fixture(autouse=True)
def _unchanged_logger() -> Iterator[None]:
    """Documents configure the log as a reader does; the next test must not write through their handlers."""
    logger = logging.getLogger("celery_idempotent")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
