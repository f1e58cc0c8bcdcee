"""The history of the record's table."""
