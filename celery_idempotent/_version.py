"""The one place that states the version; setup.cfg reads it from here."""

__version__ = "0.1.0"
