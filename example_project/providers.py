"""Stand-ins for a bank, a warehouse and a mail server: each prints what it does and returns a number of its own.

A number is new each time, so two messages with equal results had one effect.
"""

from __future__ import annotations

import uuid


def charge_card(order_id: str, cents: int, *, idempotency_key: str) -> str:
    """A real bank would look the key up, and make no second charge under it."""
    return _done("ch", f"bank       charged {cents / 100:.2f} for {order_id}, key {idempotency_key[:8]}...")


def reserve(order_id: str, sku: str, quantity: int) -> str:
    """Reserve articles."""
    return _done("rs", f"warehouse  reserved {quantity} x {sku} for {order_id}")


def send_mail(order_id: str, email: str) -> str:
    """Send a mail."""
    return _done("ml", f"mail       sent the receipt of {order_id} to {email}")


def _done(prefix: str, what: str) -> str:
    reference = f"{prefix}_{uuid.uuid4().hex[:8]}"
    print(f"  {what}: {reference}", flush=True)
    return reference
