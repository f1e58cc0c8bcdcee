"""``python -m lab.pictures``: draw all pictures into ``docs/pictures``.

With ``record``, first run what they are taken of: the demo, and the incident for the screenshots of the page.
That takes minutes, and needs Chromium and Prometheus.
"""

from __future__ import annotations

import subprocess
import sys

import click

from lab.pictures import demo
from lab.pictures.every import FOLDER, PICTURES


@click.command(help=__doc__)
@click.argument("what", default="all", type=click.Choice(["all", "record"]))
def main(what: str) -> None:
    """Write the files."""
    if what == "record":
        demo.record()
        subprocess.run([sys.executable, "-m", "lab.incident", "--pictures", str(FOLDER)], check=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
