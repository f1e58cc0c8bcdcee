"""Orders, payments and killed workers: the same load on plain Celery and on `IdempotentTask`, by `make demo`."""
