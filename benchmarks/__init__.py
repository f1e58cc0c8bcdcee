"""What idempotency costs, measured: `python -m benchmarks`."""
