"""The evidence: how this library was attacked, and what came of it."""
