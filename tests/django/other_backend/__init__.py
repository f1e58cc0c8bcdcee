"""A database backend of a kind that nobody has tried."""
