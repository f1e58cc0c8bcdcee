"""What a driver's error means to the caller of a store: a table for each driver, and one way to read it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
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
