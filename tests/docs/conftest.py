"""What several pages need of the process that they share."""

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
