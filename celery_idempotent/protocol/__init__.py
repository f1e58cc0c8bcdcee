"""The protocol: pure decisions and values, without a clock, I/O or Celery."""
