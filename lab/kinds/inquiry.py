"""Prepare the receivers, or ask them, configured by the environment as a worker is; prints JSON."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

import click

from celery_idempotent import Status, open_store
from lab.kinds import receivers, tasks


@click.command()
@click.argument("what", type=click.Choice(["prepare", "counts", "unknown"]))
@click.argument("orders", nargs=-1)
def main(what: str, orders: tuple[str, ...]) -> None:
    """WHAT: make the tables, count the effects by task and order, or say which of ORDERS ended UNKNOWN, by task."""
    match what:
        case "prepare":
            receivers.prepare()
        case "counts":
            click.echo(json.dumps(receivers.counts()))
        case _:
            click.echo(json.dumps({task.name.rpartition(".")[2]: _unknown(task, orders) for task in tasks.ALL}))


def _unknown(task: Any, orders: tuple[str, ...]) -> list[str]:
    store = open_store(task.app.conf.idempotency_store)
    keys = {record.key for record in store.scan(status=Status.UNKNOWN, task=task.name)}
    others = dict.fromkeys({"cents", "units"} & set(signature(task.run).parameters), 0)  # they are not in the key
    return [order for order in orders if task.idempotency_key_for(order, **others) in keys]


if __name__ == "__main__":
    main()
