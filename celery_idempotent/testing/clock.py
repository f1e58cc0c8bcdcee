"""A clock that moves only when a test moves it."""

from collections.abc import Callable


class FakeClock:
    """Milliseconds for a store and seconds for an attempt, from one hand; sleeping moves it at once.

    Args:
        start: Milliseconds since the epoch.
    """

    def __init__(self, start: int = 1_800_000_000_000) -> None:
        self.milliseconds = start
        #: Called with the seconds of every sleep, after the clock has moved: where a test lets things happen.
        self.on_sleep: Callable[[float], None] = lambda seconds: None

    def now(self) -> int:
        """Milliseconds since the epoch; give it to a store."""
        return self.milliseconds

    def monotonic(self) -> float:
        """The same in seconds; makes this a clock for attempts and guards."""
        return self.milliseconds / 1000

    def sleep(self, seconds: float, /) -> None:
        """Move on by ``seconds`` without waiting."""
        self.milliseconds += round(seconds * 1000)
        self.on_sleep(seconds)

    def advance(self, milliseconds: int) -> None:
        """Move by ``milliseconds``, which may be negative: real clocks are stepped back, too."""
        self.milliseconds += milliseconds
