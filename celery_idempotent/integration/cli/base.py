"""What every command has in common: the group, the app and its store, JSON, and what goes wrong as sentences."""

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, update_wrapper
from typing import Any, TypeAlias

import click
from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_idempotent.engine.events import EventName
from celery_idempotent.errors import IdempotencyError, IdempotencyWarning
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import one_line

_WEB = "celery_idempotent.contrib.web:web"


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except IdempotencyError as error:  # one line on the terminal
            raise click.ClickException(str(error)) from error

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*self.commands, "web"])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        # That of an optional part is imported when it is asked for.
        found: click.Command | None = symbol_by_name(_WEB) if name == "web" else super().get_command(context, name)
        return found


@click.group(name="idempotency", cls=_Commands)
@click.pass_context
def idempotency(context: click.Context) -> None:
    """Set up, check and inspect the idempotency store."""
    context.with_resource(_as_sentences(context.meta.setdefault(_WARNED, [])))


_WARNED = "celery_idempotent.warned"

Option: TypeAlias = Callable[[Any], Any]


class Invocation:
    """What a command is called with: the app, and whether a program reads the answer."""

    def __init__(self, context: click.Context, as_json: bool) -> None:
        self.context = context
        self.as_json = as_json
        self.warned: list[str] = context.meta[_WARNED]  # that were printed so far

    @cached_property
    def app(self) -> Celery:
        """The app, with all its modules imported."""
        self.context.obj.app.loader.import_default_modules()
        return self.context.obj.app

    @cached_property
    def runtime(self) -> Runtime:
        return runtime_of(self.app)

    def answer(self, value: Any, *lines: str, indent: int | None = 2) -> None:
        """Print ``value`` as JSON in ASCII, with nothing in it that a terminal obeys, or to a person the ``lines``."""
        for line in [json.dumps(value, indent=indent, default=_plain)] if self.as_json else lines:
            click.echo(line)


def _plain(value: Any) -> Any:
    """What JSON has no form for; of a function or a type its name."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.total_seconds() if isinstance(value, timedelta) else getattr(value, "__qualname__", str(value))


def command(name: str, *options: Option) -> Callable[[Callable[..., None]], click.Command]:
    """Make of a function a command with these options and --json; it is given its :class:`Invocation` first."""

    def add(function: Callable[..., None]) -> click.Command:
        def invoke(context: click.Context, as_json: bool, **arguments: Any) -> None:
            function(Invocation(context, as_json), **arguments)

        decorated: Any = click.pass_context(update_wrapper(invoke, function))
        for option in reversed([*options, _AS_JSON]):
            decorated = option(decorated)
        return idempotency.command(name)(decorated)

    return add


_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs; times are ISO 8601 in UTC.")


class _Amount(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):  # which click compares with nothing
            self.fail(f"{value!r} is no number", param, ctx)
        return number


AMOUNT = _Amount(min=0, min_open=True, max=1e9)
"""Of seconds or days."""


def number(name: str, default: float | None, kind: click.FloatRange | click.IntRange, unit: str, text: str) -> Option:
    """An option that counts or measures."""
    return click.option(name, default=default, show_default=True, type=kind, metavar=unit, help=text)


def advise(sentence: str) -> None:
    """Tell what may be a slip and is no error."""
    click.echo(f"Advice: {one_line(sentence)}", err=True)


class _Sentences(logging.Handler):
    """What is logged where nobody has configured logging; a person at a terminal is told of verdicts otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        line = one_line(record.getMessage())
        is_verdict = EventName.VERDICT_GIVEN in line.partition(" ")[0]
        if not (is_verdict and screen.is_terminal(err=True)):
            click.echo(line if is_verdict else f"Warning: {line}", err=True)


@contextmanager
def _as_sentences(warned: list[str]) -> Iterator[None]:
    """Print logs, and this library's warnings without the line of code that gave them: they are about settings."""
    before, logging.lastResort = logging.lastResort, _Sentences(logging.WARNING)
    try:
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
                if not issubclass(category, IdempotencyWarning):
                    shown(message, category, *place, **keywords)
                elif (sentence := one_line(message)) not in warned:  # Celery binds a task twice
                    warned.append(sentence)
                    click.echo(f"Warning: {sentence}", err=True)

            warnings.showwarning = show
            yield
    finally:
        logging.lastResort = before
