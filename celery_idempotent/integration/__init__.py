"""The integration: the only part that knows Celery."""
