"""A small shop whose effects happen once: run `python -m example_project.run`, then read `tasks.py`."""
