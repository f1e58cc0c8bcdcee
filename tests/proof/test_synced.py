"""What a store acknowledges is on disk: seen from its system calls, as a kill cannot show it."""

import os
from contextlib import closing

import pytest

from celery_idempotent import open_store
from lab.proof.crash_sweep import why_no_ptrace
from lab.proof.durability import CONTROLS
from lab.proof.synced import is_synced_first, is_synced_first_by_its_writer
from lab.proof.targets import DURABLE
from tests.support.stores import a_store

_REASON = why_no_ptrace()

pytestmark = pytest.mark.skipif(_REASON is not None and os.environ.get("CI") != "true", reason=_REASON or "")


@pytest.mark.parametrize("name", DURABLE)
def test_server_syncs_before_it_answers(name: str) -> None:
    """Between the request to write a record and its answer the server waits for the disk."""
    with a_store(name) as site:
        _provisioned(site.url)
        assert is_synced_first(site)


def test_sqlite_syncs_before_a_swap_is_over() -> None:
    """A record is on disk when the swap that wrote it returns."""
    with a_store("sqlite") as site:
        _provisioned(site.url)
        assert is_synced_first_by_its_writer(site)


@pytest.mark.filterwarnings("ignore::celery_idempotent.errors.IdempotencyWarning")
@pytest.mark.parametrize("name", CONTROLS)
def test_forgetful_server_answers_first(name: str) -> None:
    """The same look at a server that may forget sees no sync: the tests above can fail."""
    with a_store(name), CONTROLS[name].start() as site:
        _provisioned(site.url)
        assert not is_synced_first(site)


def _provisioned(url: str) -> None:
    with closing(open_store(url)) as store:
        store.provision()
