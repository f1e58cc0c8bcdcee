"""Options of several commands: numbers, ages, and which records are meant."""

import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from celery import Celery

from celery_idempotent.engine.search import FORGOTTEN, Filter
from celery_idempotent.integration.binding import idempotent_tasks
from celery_idempotent.integration.cli.base import advise
from celery_idempotent.protocol.record import Status

if TYPE_CHECKING:
    _Whole: TypeAlias = click.ParamType[int]
    _Real: TypeAlias = click.ParamType[float]
else:
    _Whole = _Real = click.ParamType  # not generic before click 8.5


class WholeNumber(_Whole):
    """A whole number from 1 on."""

    name = "count"

    def __init__(self, most: int | None = None) -> None:
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number that ``value`` is."""
        try:
            number = int(value)
        except ValueError:
            number = 0
        if not 1 <= number <= (self._most or number):
            upto = f" to {self._most}" if self._most else " on"
            self.fail(f"must be a whole number from 1{upto}, and is {str(value)!r}", param, ctx)
        return number


class Amount(_Real):
    """A number above 0 of some ``unit``."""

    name = "amount"

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that ``value`` is."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"must be {self._unit}, a number above 0, and is {str(value)!r}", param, ctx)
        return number


def every(seconds: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option of a command that looks again and again: the pause between two looks, ``seconds`` by default."""
    return click.option(
        "--every",
        default=seconds,
        show_default=True,
        type=Amount("seconds"),
        metavar="SECONDS",
        help="Pause between two looks.",
    )


class Age(_Whole):
    """An age such as ``2d``, in milliseconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The milliseconds that ``value`` is."""
        written = _AGE.fullmatch(str(value))
        if written is None:
            self.fail(f"must be an age such as 30m, 1h or 2d (s, m, h, d, w), and is {str(value)!r}", param, ctx)
        return round(float(written[1]) * _UNITS[written[2].lower()])


_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])", re.IGNORECASE)
_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def advise_on(wanted: Filter, app: Celery) -> None:
    """Where nothing was found, tell what may have been meant: another task, or all labels that begin so."""
    if wanted.label and wanted.whole_label:
        advise(f"a label counts as a whole; '{wanted.label.rstrip('/')}/*' stands for all that begin so")
    if wanted.task is None or wanted.task in app.tasks:
        return
    known = sorted(each.name for each in idempotent_tasks(app))
    nearest = get_close_matches(wanted.task, known, n=1)
    advise(
        f"this app has no task {wanted.task}{f'; did you mean {nearest[0]}?' if nearest else ''}; "
        f"its idempotent tasks: {', '.join(known) or 'none'}"
    )


of_task = click.option("--task", metavar="TASK", help="Only of this task.")

_OPTIONS = (
    click.option(
        "--status",
        type=click.Choice([*map(str, Status), FORGOTTEN], case_sensitive=False),
        metavar="STATUS",
        help=f"Only in this status: {', '.join([*Status, FORGOTTEN])}; upper or lower case.",
    ),
    of_task,
    click.option("--label", metavar="LABEL", help="Only with this label; 'acme/*' stands for all that begin so."),
    click.option("--worker", metavar="NAME", help="Only those whose last attempt ran there."),
    click.option("--older-than", type=Age(), metavar="AGE", help="Only those last written so long ago: 30m, 1h, 2d."),
)


def filters(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say which records are meant, as one argument: ``wanted``."""

    @wraps(command)
    def gathered(**kwargs: Any) -> None:
        wanted = Filter(**{name: kwargs.pop(name) for name in ("status", "task", "label", "worker", "older_than")})
        command(**kwargs, wanted=wanted)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered
