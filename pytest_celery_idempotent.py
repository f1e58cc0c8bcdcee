"""The pytest plugin of celery-idempotent: fixtures. A suite that uses none of them does not notice it.

pytest loads a plugin in every run of every suite of its environment. So this one stands outside of the package,
whose import brings Celery, and imports nothing before a test asks for it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_idempotent.testing import FakeStore

__all__ = ["idempotency_store"]


@pytest.fixture
def idempotency_store() -> "Iterator[FakeStore]":
    """A new, empty :class:`~celery_idempotent.testing.FakeStore` behind every app, for the length of the test."""
    from celery._state import _get_active_apps

    from celery_idempotent.testing import FakeStore
    from celery_idempotent.testing.stores import installed

    store = FakeStore()
    with installed(store, *_get_active_apps()):
        yield store
