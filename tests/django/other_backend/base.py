"""The dummy of Django's, under another name."""

from django.db.backends.dummy.base import DatabaseWrapper as Dummy


class DatabaseWrapper(Dummy):
    """Says only what it is."""

    vendor = "other"
