"""What runs once: tasks, functions, and all else that passes a gate."""
