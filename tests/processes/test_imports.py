"""What a fresh interpreter has, that has imported one module of the package and nothing else."""

import subprocess
import sys

from celery_idempotent.stores.sql.schema import OUTBOX, TABLE


def test_module_that_alembic_is_given_has_every_table() -> None:
    """Importing it alone is enough: what is not in its metadata, autogenerate would not create, or even drop."""
    program = "from celery_idempotent.stores.sql.schema import metadata; print(*sorted(metadata.tables))"

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert printed.split() == [OUTBOX, TABLE]
