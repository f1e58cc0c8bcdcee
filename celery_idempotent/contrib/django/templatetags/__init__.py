"""For the pages of this app."""
