"""What a call returns that has still to run. Apart from event loops, which most processes never import."""

from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from contextlib import suppress
from typing import Any


def is_unfinished(value: Any) -> bool:
    """Whether it is a call that has still to run; it is closed, so that Python does not warn of it, too."""
    if type(value) in _FINISHED:
        return False  # asking an abstract class takes longer than all else here
    if isinstance(value, Coroutine | Generator):
        with suppress(Exception):
            value.close()
    return isinstance(value, Awaitable | Generator | AsyncGenerator)


_FINISHED = {type(None), bool, int, float, str, bytes, list, tuple, dict}
