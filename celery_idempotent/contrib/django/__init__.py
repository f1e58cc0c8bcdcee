"""A Django app: the record's table as a migration, a store on Django's own connections, and an admin page.

``INSTALLED_APPS += ["celery_idempotent.contrib.django"]``, ``CELERY_IDEMPOTENCY_STORE = "django://default"``.
"""
