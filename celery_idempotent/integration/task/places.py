"""Where operations that no task makes are recorded, and how: an app's store and settings, or a store alone."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from celery import Celery, current_app

from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.settings import Runtime, StoreHandle, runtime_of
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store


@dataclass(frozen=True)
class StoreAlone:
    """A store without an app: results are JSON, and nothing else is read."""

    store: str | Store = field(repr=False)  # a URL can hold a password

    @cached_property
    def opened(self) -> StoreHandle:
        """The store, and its circuit breaker; one for each URL in a process."""
        return _opened(self.store)

    @property
    def default_policy(self) -> Policy:
        """The policy where none is declared."""
        return Policy()

    def codec_of(self, policy: Policy) -> Codec:
        """How results are kept under ``policy``."""
        return _JSON.under(policy)

    def scope_of(self, policy: Policy, task: str) -> str:
        """What stands before the hash in every key."""
        return policy.scope_of(task)


Place = Runtime | StoreAlone
"""What a guard asks."""


def place_of(store: str | Store | None, app: Celery | None) -> Callable[[], Place]:
    """Tells the place that an author named by ``store`` or ``app``; by neither, it is the current app, when asked.

    Raises:
        PolicyError: Both are given, or something that is no app.
    """
    if app is not None and not isinstance(app, Celery):
        raise PolicyError("app", repr(app), "must be a Celery app")
    if store is None:
        return lambda: runtime_of(app or current_app)
    if app is not None:
        raise PolicyError("store", "beside an app", "an app has a store, by idempotency_store; give one of the two")
    alone = StoreAlone(store)
    return lambda: alone


_JSON = Codec("json", frozenset({"application/json"}))

_opening = threading.Lock()
_by_url: dict[str, StoreHandle] = {}


def _opened(store: str | Store) -> StoreHandle:
    if not isinstance(store, str):
        return _with_breaker(open_store(store))
    with _opening:
        found = _by_url.get(store)
        if found is None:
            found = _by_url[store] = _with_breaker(open_store(store))
        return found


def _with_breaker(store: Store) -> StoreHandle:
    return StoreHandle(store, store, Breaker(repr(store)))
