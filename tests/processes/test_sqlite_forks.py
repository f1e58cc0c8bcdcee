"""SQLite in WAL mode and forks: what a child has committed is there, whatever its parent does meanwhile.

SQLite keeps its locks by process, and notes in memory which of them its process has. A fork copies the notes and
not the locks: a connection that a child opens then relies on locks that only its parent has, and when the parent
closes its own connection it believes to be the last one, and deletes the log that the child goes on writing to.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_record


@pytest.mark.parametrize("make", [str, create_engine], ids=["url", "engine"])
def test_child_loses_nothing_when_its_parent_closes(make: Callable[[str], Any], tmp_path: Path) -> None:
    """A pool process completes after its parent, which checked the store at start, has closed its connection."""
    given = make(f"sqlite:///{tmp_path / 'records.sqlite3'}")
    parent, unused = SQLStore(given), SQLStore(f"sqlite:///{tmp_path / 'unused.sqlite3'}")
    parent.provision()
    claimed = a_record()
    completed = replace(claimed, revision=new_nonce(), status=Status.COMPLETED)
    told, tell = os.pipe()
    go, let_go = os.pipe()

    child = os.fork()
    if child == 0:
        try:
            assert parent.swap(claimed, None) == claimed
            os.write(tell, b"claimed")
            os.read(go, 1)
            assert parent.swap(completed, claimed.revision) == completed
        finally:
            os._exit(0)
    os.read(told, 7)
    parent.close()
    if isinstance(given, Engine):
        given.dispose()
    os.write(let_go, b"!")
    os.waitpid(child, 0)

    assert parent.get(claimed.key) == completed
    assert not (tmp_path / "unused.sqlite3").exists(), f"{unused} was not to be opened by a fork"
    parent.close()
    if isinstance(given, Engine):
        given.dispose()
