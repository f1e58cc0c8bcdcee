"""Messages that go out: postponed, published once, by a schedule, from an outbox."""
