"""For whoever runs workers: checks at the start, work done now and then, verdicts and how records are shown."""
