"""What stores around a store have in common."""

from typing import Any

from celery_idempotent.protocol.store import (
    CommittingStore,
    Outbox,
    PurgeableStore,
    Store,
    TransactionalStore,
    VerifiableStore,
)

_VERBS = [
    name
    for kind in (Store, VerifiableStore, PurgeableStore, CommittingStore, TransactionalStore, Outbox)
    for name in vars(kind)
    if not name.startswith("_")
]


class StoreAround:
    """Does what the store within does, and can do what that can."""

    def __init__(self, within: Store) -> None:
        self.within = within
        for name in _VERBS:
            # As attributes: a question for what a store can do sees no __getattr__, and most calls come here.
            if not hasattr(type(self), name) and hasattr(within, name):
                setattr(self, name, getattr(within, name))

    def __getattr__(self, name: str) -> Any:
        if name == "within":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.within, name)

    def __repr__(self) -> str:
        return repr(self.within)


def innermost(store: Any) -> Any:
    """The store within all those that are around it."""
    while isinstance(store, StoreAround):
        store = store.within
    return store
