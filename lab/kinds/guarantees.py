"""What the example's tasks promise, in words: `task.guarantee()` of each."""

from __future__ import annotations

import click

from lab.kinds import tasks


def main() -> None:
    """Print them."""
    for task in tasks.ALL:
        click.echo(f"{task.guarantee()}\n")


if __name__ == "__main__":
    main()
