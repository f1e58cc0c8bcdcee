"""What attacks the library and measures it; no part of what is installed."""
