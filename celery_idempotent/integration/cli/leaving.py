"""A command for those who come from another library."""

from dataclasses import asdict

import click

from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency
from celery_idempotent.integration.predecessors import Translation, settings_of, translations
from celery_idempotent.printable import one_line


@idempotency.command("coming-from")
@as_json
@click.pass_context
def coming_from(context: click.Context, as_json: bool) -> None:
    """Print what to write for tasks of other libraries.

    For each task of celery-once or celery-singleton: as a diff, and below it what has no counterpart. Changes nothing
    and needs no store.
    """
    app = app_of(context)
    found = translations(app)
    gone, lines = settings_of(app, {each.library for each in found})
    if as_json:
        echo_json({"tasks": [asdict(each) for each in found], "settings": {"before": gone, "after": lines}})
    elif not found:
        click.echo("No task has a base of celery-once or celery-singleton.")
    else:
        for each in found:
            _tell(each)
        click.echo("settings")
        _tell_lines([*(f"-  {name}" for name in gone), *(f"+  {line}" for line in lines)])


def _tell(each: Translation) -> None:
    click.echo(one_line(f"{each.task}  ({each.place}; {each.library})"))
    after = [f"+  {each.after}"] if each.after else []
    _tell_lines([f"-  {each.before}", *after, *(f"   ! {note}" for note in each.notes)])
    click.echo()


def _tell_lines(lines: list[str]) -> None:
    for line in lines:
        click.echo(one_line(line))
