"""Orders, payments and killed workers: the same load on plain Celery and on `IdempotentTask`.

Start reading at `tasks.py`; run it with `python -m lab.demo`.
"""
