"""A small shop on Django and Celery, set up as Celery's documentation says."""

from tests.django.project.celery import app

__all__ = ["app"]
