"""From a call to its idempotency key: pure, and the same for every way of writing the same call.

A key is ``scope:1:SHA-256``, where 1 is the generation of this form. The hash covers the canonical form of what the
policy selects.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from celery_idempotent.errors import IdempotencyError, PolicyError
from celery_idempotent.protocol.canonical import NotCanonical, text_form
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, bounded, keepable
from celery_idempotent.protocol.selector import Selector


class ArgumentNotCanonical(PolicyError):
    """The option is an argument of a call, which cannot be compared with that of another call."""

    see = IdempotencyError.see  # by the class: no entry is about an author's arguments


@dataclass(frozen=True, slots=True)
class Identity:
    """Which effect a call asks for, and with which arguments.

    Args:
        key: The idempotency key.
        fingerprint: Hash of the declared arguments, or None if none are declared.
        label: What the policy's ``label`` says of the call, for people; empty where it says nothing. Two calls of
            different labels may be one operation.
    """

    key: str
    fingerprint: str | None
    label: str = ""


def identify(
    scope: str,
    bound: inspect.BoundArguments,
    *,
    task: str,
    key: Selector,
    fingerprint: Selector | None,
    label: Selector | None = None,
    explicit: str | None = None,
    tick: str | None = None,
    occurrence: str | None = None,
) -> Identity:
    """The identity of one call.

    Args:
        scope: What the key begins with.
        bound: The call's arguments by name.
        task: Task name, for messages.
        key: What selects the key.
        fingerprint: What selects the fingerprint, if there is one.
        label: What selects the label, if there is one.
        explicit: The key that the publisher gave; it takes the place of what ``key`` selects.
        tick: Which tick of a schedule the call is; equal calls of one tick are one operation, whoever sent them.
        occurrence: Tells apart calls that are equal but meant to happen each time, such as ticks that have no name.

    Raises:
        KeyMissing: The call has no key.
        PolicyError: An argument has no canonical form, or an expression does not fit it. A label raises nothing.
    """
    try:
        selected = None if explicit is not None else key.canonical(bound, task)
        if explicit is not None:
            material = f"explicit:{str.__str__(explicit)}"
        elif tick is not None:
            material = f"tick:{text_form(tick)}{selected}"
        elif occurrence is not None:
            material = f"occurrence:{text_form(occurrence)}{selected}"
        else:
            material = f"selected:{selected}"
        if fingerprint is None:
            declared = None
        elif selected is not None and fingerprint.spec == key.spec:
            declared = selected
        else:
            declared = fingerprint.canonical(bound, task)
    except NotCanonical as error:
        raise ArgumentNotCanonical(
            error.path,
            f"<{error.type_name}>",
            f"{task}: this argument has no canonical form, so equal calls cannot be recognised; pass a plain value, "
            "or leave it out with Policy(key=..., fingerprint=...)",
        ) from error
    named = label_of(label, lambda: bound)
    return Identity(f"{scope}:{_digest(material)}", None if declared is None else _digest(declared), named)


def label_of(label: Selector | None, bind: Callable[[], inspect.BoundArguments]) -> str:
    """What ``label`` says of the call whose arguments ``bind`` gives; it raises nothing, whatever ``bind`` does."""
    if label is None:
        return ""
    text = keepable(label.text(bind))
    # What looks encrypted would keep its operation from running.
    return bounded(f"({text}" if text.startswith(ENCRYPTED_TEXT) else text)


def _digest(text: str) -> str:
    # surrogatepass: a lone surrogate is legal in a JSON string, and must not make a call fail.
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
