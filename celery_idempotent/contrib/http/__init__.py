"""HTTP requests with an ``Idempotency-Key``: their effect happens once, and who repeats one gets the same answer.

The rules are those of draft-ietf-httpapi-idempotency-key-header, once and for all frameworks. Nothing here imports one:
take :mod:`celery_idempotent.contrib.http.asgi` (Starlette, FastAPI), :mod:`celery_idempotent.contrib.http.django` or
:mod:`celery_idempotent.contrib.http.flask`.
"""

from celery_idempotent.contrib.http.semantics import answer

__all__ = ["answer"]
