"""What the shop does."""
