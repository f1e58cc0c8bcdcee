"""A page on which people see every operation and give verdicts, as an ASGI app; needs the extra ``web``.

It needs neither a build step nor JavaScript, and keeps nothing itself: all that it shows stands in the store.
"""

from typing import TYPE_CHECKING

from celery import Celery

from celery_idempotent.errors import PolicyError
from celery_idempotent.troubleshooting import with_link

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SHORTEST_TOKEN = 16
"""Characters of a token; nothing counts how often somebody guesses."""


def create_app(app: Celery, *, token: str, write: bool = False) -> "ASGIApp":
    """The page of ``app``'s records, to be served alone or mounted under a prefix.

    The app's tasks are imported: their policies decide what a verdict means. One token is one right: give those who may
    only look an app of their own, with another token.

    Args:
        app: The Celery app.
        token: What people and programs must know to see anything; at least 16 characters.
        write: Whether they may give verdicts.

    Raises:
        PolicyError: The token is too short, or ``idempotency_store`` is not set.
        ImportError: The extra ``web`` is not installed.
    """
    if len(token) < SHORTEST_TOKEN:
        raise PolicyError(
            "token", "'...'", f"must have at least {SHORTEST_TOKEN} characters", see="web#the-token-is-too-short"
        )
    try:
        from celery_idempotent.contrib.web.pages import served
    except ModuleNotFoundError as error:
        raise ImportError(not_installed(error)) from error
    app.loader.import_default_modules()
    return served(app, token, write=write)


def not_installed(error: ModuleNotFoundError) -> str:
    """What to do about it."""
    return with_link(
        f'{error.name} is not installed; run: pip install "celery-idempotent[web]"',
        see="web#the-package-for-the-page-is-missing",
    )
