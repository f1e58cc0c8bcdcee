"""Only a publisher: publish orders to the worker of `python -m lab.demo.worker`, show the results.

With --duplicates every order is published twice. Both publications are tasks of their own, with their own
task ids, and both get the result of the one body that ran.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from celery.exceptions import TimeoutError as NoResult
from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from rich.console import Console
from rich.table import Table

from lab.demo import effects, orders, tasks
from lab.demo.app import app, settings


@click.command(help=__doc__)
@click.option("--orders", "count", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--duplicates", is_flag=True, help="Publish every order twice.")
@click.option("--series", help="Name of the orders. Repeat an earlier one to be served from its outcomes.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for the results.")
def main(count: int, duplicates: bool, series: str | None, timeout: float) -> None:
    """Publish, wait, show."""
    load = orders.make(count, series or f"order-{int(time.time()):x}")
    try:
        published = [[_publish(order) for _ in range(1 + duplicates)] for order in load]
    except OperationalError as error:
        raise click.ClickException(
            f"no broker at {app.connection().as_uri()}; is `python -m lab.demo.worker` running? ({error})"
        ) from error
    if not settings.results_url:
        click.echo(f"published {len(load)} orders; there is no result backend to ask for the outcome")
        return
    try:
        _show(load, [[_results(copy, timeout) for copy in copies] for copies in published])
    except NoResult as error:
        raise click.ClickException(f"no result within {timeout:g} s; is a worker running?") from error


def _publish(order: orders.Order) -> list[AsyncResult]:
    return [getattr(tasks, task).apply_async(kwargs=arguments) for task, arguments in order.messages()]


def _results(copy: Sequence[AsyncResult], timeout: float) -> list[str]:
    charge, *others = [result.get(timeout=timeout) for result in copy]
    return [charge["charge"], *others]


def _show(load: Sequence[orders.Order], results: Sequence[Sequence[Sequence[str]]]) -> None:
    table = Table("order", "#", "charge", "stock", "receipt to")
    for order, copies in zip(load, results, strict=True):
        for number, copy in enumerate(copies, 1):
            table.add_row(order.id, str(number), *copy)
        table.add_section()
    console = Console()
    console.print(table)
    _show_bank(console, load)
    same = sum(all(copy == copies[0] for copy in copies) for copies in results)
    console.print(f"{same} of {len(load)} orders have one outcome, however often they were published.")


def _show_bank(console: Console, load: Sequence[orders.Order]) -> None:
    """What counts in the end; to be seen where publisher and worker share a folder."""
    wanted = {order.id for order in load}
    charges = [row.order for row in effects.bank.rows() if row.what == "effect" and row.order in wanted]
    if charges:
        console.print(f"The bank's books show {len(charges)} charges for {len(set(charges))} orders.")


if __name__ == "__main__":
    main()
