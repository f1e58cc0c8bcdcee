"""Options of several commands: numbers, ages, and which records are meant."""

import math
import re
from collections.abc import Callable
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
else:
    _Whole = click.ParamType  # not generic before click 8.5

Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]


class Amount(click.FloatRange):
    """A number above 0, of seconds or days."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=1e9)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that ``value`` is; of what is none, click compares nothing."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


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


def seconds(name: str, default: float, text: str) -> Decorator:
    """The option of a command that waits."""
    return click.option(name, default=default, show_default=True, type=Amount(), metavar="SECONDS", help=text)


def limit(what: str) -> Decorator:
    """The option of a command that lists ``what``."""
    text = f"At most that many {what}."
    return click.option("--limit", default=100, show_default=True, type=click.IntRange(1), metavar="N", help=text)


of_task = click.option("--task", metavar="TASK", help="Only of this task.")

_FILTERS = (
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

    for option in reversed(_FILTERS):
        gathered = option(gathered)
    return gathered


def advise_on(wanted: Filter, app: Celery) -> None:
    """Where nothing was found, tell what may have been meant: another task, or all labels that begin so."""
    if wanted.label and wanted.whole_label:
        advise(f"a label counts as a whole; '{wanted.label.rstrip('/')}/*' stands for all that begin so")
    if wanted.task is not None and wanted.task not in app.tasks:
        known = ", ".join(sorted(each.name for each in idempotent_tasks(app)))
        advise(f"this app has no task {wanted.task}; its idempotent tasks: {known or 'none'}")
