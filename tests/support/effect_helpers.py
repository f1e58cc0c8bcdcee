"""A module that the tasks of ``effect_holes`` are helped by."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.effect_receiver import charge, charge_once


def charge_twice_removed(order: str) -> str:
    """A hole two calls below the body."""
    charge(order)  # hole: helper_module
    return order


@contextmanager
def charged_on_entry(order: str) -> Iterator[None]:
    """A hole before the block."""
    charge(order)  # hole: own_manager_entry
    yield


@contextmanager
def charged_on_exit(order: str) -> Iterator[None]:
    """A hole after the block."""
    try:
        yield
    finally:
        charge(order)  # hole: own_manager_exit


@contextmanager
def charged_with_key(order: str) -> Iterator[None]:
    """None: the receiver knows the key."""
    charge_once(order, order)
    yield
