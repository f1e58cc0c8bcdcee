"""What idempotency costs, measured: `python -m lab.benchmarks`."""
