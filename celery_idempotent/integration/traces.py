"""Which trace a delivery belongs to, as far as somebody in this process knows; without telemetry nobody does."""

from collections.abc import Callable

_read: Callable[[], str] = str


def ask(read: Callable[[], str] | None) -> None:
    """Have ``read`` tell the trace context (a W3C ``traceparent``) from now on; None: there is none."""
    global _read
    _read = read or str


def current_trace() -> str:
    """That of what runs now; empty if there is none."""
    return _read()
