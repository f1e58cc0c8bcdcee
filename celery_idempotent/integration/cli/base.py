"""What every command has in common: the group, the app and its store, JSON, and what goes wrong as sentences."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from celery import Celery
from celery.utils.imports import symbol_by_name

from celery_idempotent.engine.events import EventName
from celery_idempotent.errors import IdempotencyError, IdempotencyWarning
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.operating.verdicts import json_of
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.store import Store

COMMANDS: Mapping[str, str] = {"web": "celery_idempotent.contrib.web:web"}
"""Commands of optional parts, by where they are; imported when they are asked for."""


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*self.commands, *COMMANDS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found: click.Command | None = symbol_by_name(COMMANDS[name]) if name in COMMANDS else self.commands.get(name)
        return found


@click.group(name="idempotency", cls=_Commands)
@click.pass_context
def idempotency(context: click.Context) -> None:
    """Set up, check and inspect the idempotency store."""
    context.with_resource(_warnings_as_sentences(context.meta.setdefault(_WARNED, [])))
    context.with_resource(_log_as_sentences())


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs; times are ISO 8601 in UTC.")

_WARNED = "celery_idempotent.warned"


def warned_in(context: click.Context) -> list[str]:
    """The warnings that this command has printed so far."""
    warned: list[str] = context.meta[_WARNED]
    return warned


def echo_json(value: Any, *, indent: int | None = 2) -> None:
    """Print ``value`` as JSON in ASCII, with nothing in it that a terminal obeys."""
    click.echo(json.dumps(value, indent=indent))


def advise(sentence: str) -> None:
    """Tell what may be a slip and is no error."""
    click.echo(f"Advice: {one_line(sentence)}", err=True)


@contextmanager
def _warnings_as_sentences(warned: list[str]) -> Iterator[None]:
    """Print this library's warnings without the line of code that gave them: they are about settings of the app."""
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


class _Sentences(logging.Handler):
    """What is logged where nobody has configured logging; a person at a terminal is told of verdicts otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        line = one_line(record.getMessage())
        is_verdict = EventName.VERDICT_GIVEN in line.partition(" ")[0]
        if not (is_verdict and screen.is_terminal(err=True)):
            click.echo(line if is_verdict else f"Warning: {line}", err=True)


@contextmanager
def _log_as_sentences() -> Iterator[None]:
    before, logging.lastResort = logging.lastResort, _Sentences(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = before


def json_value(option: str, text: str, wanted: type = object) -> Any:
    """The value that an option's text is, as JSON."""
    try:
        value = json_of(text)
    except ValueError as error:
        reason = f"{text!r} is not JSON: {error}; a text has quotes of its own: '\"ch_1\"'"
        raise click.BadParameter(reason, param_hint=option) from error
    if not isinstance(value, wanted):
        raise click.BadParameter(f"{text!r} is not a JSON {wanted.__name__}", param_hint=option)
    return value


def app_of(context: click.Context) -> Celery:
    """The app, with all its modules imported."""
    with readable_errors():
        context.obj.app.loader.import_default_modules()
    return context.obj.app


def store_of(context: click.Context) -> Store:
    """The store of the app."""
    with readable_errors():
        return runtime_of(app_of(context)).store


@contextmanager
def readable_errors() -> Iterator[None]:
    """Within the block, what this library raises is one line on the terminal."""
    try:
        yield
    except IdempotencyError as error:
        raise click.ClickException(str(error)) from error
