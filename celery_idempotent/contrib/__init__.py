"""Optional parts that tie the library to other frameworks; nothing here is imported unless asked for."""
