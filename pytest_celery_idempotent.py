"""The pytest plugin of celery-idempotent: fixtures. A suite that uses none of them does not notice it.

pytest loads a plugin in every run of every suite of its environment. So this one stands outside of the package,
whose import brings Celery, and imports nothing before a test asks for it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.testing import FakeStore

__all__ = ["idempotency_app", "idempotency_store"]


@pytest.fixture
def idempotency_app(request: pytest.FixtureRequest) -> "Celery":
    """The app behind which ``idempotency_store`` puts its store; override it if this is the wrong one.

    The one of Celery's own fixture ``celery_app`` or ``celery_session_app`` if the test uses that, or else the current
    app, which is the last that was made in this thread.
    """
    for name in ("celery_app", "celery_session_app"):
        if name in request.fixturenames:
            app: Celery = request.getfixturevalue(name)
            return app
    from celery import _state, current_app

    current: Celery = current_app._get_current_object()
    if current is _state.default_app:
        pytest.fail(
            "idempotency_store: there is no Celery app yet. Import the module that makes yours, or define a fixture "
            "idempotency_app that returns it",
            pytrace=False,
        )
    return current


@pytest.fixture
def idempotency_store(idempotency_app: "Celery") -> "Iterator[FakeStore]":
    """A new, empty :class:`~celery_idempotent.testing.FakeStore` behind the app, for the length of the test."""
    from celery_idempotent.testing import FakeStore
    from celery_idempotent.testing.stores import installed

    store = FakeStore()
    with installed(idempotency_app, store):
        yield store
