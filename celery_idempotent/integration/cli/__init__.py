"""``celery -A your_app idempotency ...``: set up the store, look into it, and give a verdict.

The commands read the store itself, so they work with every broker; Celery's remote control does not reach
workers on SQS.
"""

from celery_idempotent.integration.cli import check, records, store  # noqa: F401
from celery_idempotent.integration.cli.base import idempotency

__all__ = ["idempotency"]
