"""Every kind of effect, each with the tool that keeps it to one: `tasks.py` is the file to read first."""
