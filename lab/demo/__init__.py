"""Orders, payments and killed workers: the same load on plain Celery and on `IdempotentTask`.

Run it with `make demo` or `python -m lab.demo`; the tasks are in `plain.py` and `tasks.py`.
"""
