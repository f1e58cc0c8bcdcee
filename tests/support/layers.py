"""The rooms of the package and the floors of its integration, as ``.importlinter`` has them; and who imports whom."""

import re
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import grimp

import celery_idempotent

__all__ = ["CONTRACTS", "FLOORS", "MAY_USE", "MODULES", "PACKAGE", "imports"]

PACKAGE = Path(celery_idempotent.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
CONTRACTS = ConfigParser()
CONTRACTS.read(PACKAGE.parent / ".importlinter")


def _layers(contract: str) -> list[list[str]]:
    """From the ground up."""
    lines = CONTRACTS[f"importlinter:contract:{contract}"]["layers"].strip().splitlines()
    return [re.split(" [|:] ", line) for line in reversed(lines)]


_ROOMS = [[each for each in layer if (PACKAGE / each).is_dir()] for layer in _layers("rooms")]

MAY_USE = {
    room: {each for below in _ROOMS[:level] for each in below} for level, row in enumerate(_ROOMS) for room in row
}
"""The rooms from the ground up, and the rooms that each may import from."""

FLOORS = [floor for (floor, *others) in _layers("floors") if not others]
"""Those of the integration, from the ground up."""


@cache
def imports() -> grimp.ImportGraph:
    """All imports of the package, also of others."""
    return grimp.build_graph("celery_idempotent", include_external_packages=True, cache_dir=None)
