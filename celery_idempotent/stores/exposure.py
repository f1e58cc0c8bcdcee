"""Whether somebody on the way can read what goes over a connection to a store, or answer in the store's place."""

import os
import socket
import ssl
import warnings
from ipaddress import ip_address

from celery_idempotent.errors import IdempotencyWarning

UNENCRYPTED = "is not encrypted"
UNVERIFIED = "is encrypted, but the other end is not verified"


def leaves_machine(descriptor: int) -> bool:
    """Whether the other end of a socket is on another machine, as far as its address tells."""
    with socket.socket(fileno=os.dup(descriptor)) as twin:
        if twin.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        try:
            host = twin.getpeername()[0]
        except OSError:
            return False  # it is no longer connected
    return not ip_address(host.partition("%")[0]).is_loopback


def weakness_of(link: object) -> str:
    """What is weak about a socket of Python's; empty if nothing is."""
    if not isinstance(link, ssl.SSLSocket):
        return UNENCRYPTED
    return "" if link.context.verify_mode is ssl.CERT_REQUIRED else UNVERIFIED


def warn_if_exposed(store: str, weakness: str, remedy: str) -> None:
    """Warn of what is weak about a store's connections, unless ``weakness`` is empty."""
    if weakness:
        warnings.warn(
            IdempotencyWarning(
                f"idempotency_store={store}: the connection to another machine {weakness}, so others can read results "
                f"and the password, and invent outcomes; {remedy}",
                "idempotency_store",
            ),
            stacklevel=3,
        )
