"""Durations as authors give them: seconds, or a timedelta."""

from datetime import timedelta

Duration = float | timedelta
"""Seconds, or a timedelta."""


def in_words(duration: Duration) -> str:
    """A duration as people say it: in the largest unit that is whole."""
    seconds = milliseconds(duration) / 1000
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = round(seconds / length)
            return f"{count} {unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} s"


def milliseconds(duration: Duration) -> int:
    return round((duration.total_seconds() if isinstance(duration, timedelta) else duration) * 1000)


def is_duration(value: object) -> bool:
    """Whether ``value`` is a finite duration that is not negative."""
    if isinstance(value, timedelta):
        return value >= timedelta(0)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
