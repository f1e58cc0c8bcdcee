"""What a driver's error means to the caller of a store, and who can read what goes over its connection."""

import os
import re
import socket
import ssl
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import ip_address

from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.store import RecordTooLarge


class Meaning(Enum):
    """What follows from an error. One without a rule is UNAVAILABLE."""

    UNAVAILABLE = auto()
    """No certain answer: the write may have happened."""
    MISCONFIGURED = auto()
    """It stays so until somebody changes something."""
    READ_ONLY = auto()
    """The server takes no writes: an outage in the middle of work, where it may be a fail-over; else MISCONFIGURED."""
    TOO_LARGE = auto()
    """Refused for its size, and certainly not written."""
    UNDONE = auto()
    """The database has undone a statement for the sake of another, as in a deadlock: it may be sent again."""
    DUPLICATE = auto()
    """A row with this key exists already."""
    ALREADY_THERE = auto()
    """A table, column or index with this name exists already."""
    UNREADABLE = auto()
    """The driver cannot decode what is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of error: how it is recognised, by any one sign, what it means, and what to do about it."""

    meaning: Meaning = Meaning.MISCONFIGURED
    codes: frozenset[str] = frozenset()
    errors: tuple[type[BaseException], ...] = ()
    #: A pattern in the text of an error that has neither code nor class of its own.
    text: str = r"(?!)"
    remedy: str = ""

    def fits(self, error: BaseException, code: str, text: str) -> bool:
        """Whether ``error`` is of this kind."""
        return code in self.codes or isinstance(error, self.errors) or re.search(self.text, text) is not None


NO_RULE = Rule(meaning=Meaning.UNAVAILABLE)

_AT_LEISURE = {"verify", "provision"}


def rule_of(rules: Iterable[Rule], error: BaseException, code: str, text: str) -> Rule:
    """The first rule that fits, or else :data:`NO_RULE`."""
    return next((each for each in rules if each.fits(error, code, text)), NO_RULE)


def failure(rule: Rule, store: str, operation: str, reason: str, **details: str) -> StoreUnavailable | RecordTooLarge:
    """What a store raises for an error of this kind. ``reason`` is the driver's; ``details`` fill the rule's remedy."""
    if rule.meaning is Meaning.TOO_LARGE:
        return RecordTooLarge(reason)
    told = f"{rule.remedy.format(**details)} ({reason})" if rule.remedy else reason
    permanent = rule.meaning is Meaning.MISCONFIGURED or (
        rule.meaning is Meaning.READ_ONLY and operation in _AT_LEISURE
    )
    return (StoreMisconfigured if permanent else StoreUnavailable)(store, operation, told)


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


def warn(store: str, reason: str) -> None:
    """Warn of what the check of a store has found."""
    warnings.warn(IdempotencyWarning(f"idempotency_store={store}: {reason}", "idempotency_store"), stacklevel=4)


def warn_of_losses(store: str, losses: str) -> None:
    """Warn of settings under which a server forgets what it has acknowledged, unless ``losses`` is empty."""
    if losses:
        forgets = "the server can forget what it has acknowledged"
        warn(store, f"{forgets}, and an effect whose record is forgotten can happen again: {losses}")


def warn_if_exposed(store: str, weakness: str, remedy: str) -> None:
    """Warn of what is weak about a store's connections, unless ``weakness`` is empty."""
    if weakness:
        others = "others can read results and the password, and invent outcomes"
        warn(store, f"the connection to another machine {weakness}, so {others}; {remedy}")
