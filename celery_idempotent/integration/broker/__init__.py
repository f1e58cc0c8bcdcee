"""What the broker does with messages: holding them, taking them back, and what its settings cost."""
