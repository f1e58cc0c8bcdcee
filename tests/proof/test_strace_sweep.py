"""Real processes die by SIGKILL at every system call to the store, without a hook in anything."""

import os

import pytest

from lab.proof.crash_sweep import sweep, why_no_ptrace
from lab.proof.verdicts import PROMISES
from tests.support.stores import a_store

_REASON = why_no_ptrace()

# Where everything is in our hands, a sweep that does not run is a failure and not a footnote.
pytestmark = pytest.mark.skipif(_REASON is not None and os.environ.get("CI") != "true", reason=_REASON or "")


# Each holds death before the claim is sent, between its sending and its reply, and at the effect itself.
STRUCK = {
    "dynamodb": {*(f"sendto {number}" for number in range(1, 5)), "recvfrom 1", "recvfrom 2", "connect 1"},
    "redis": {"sendto 1", "sendto 2", "recvfrom 1", "recvfrom 2", "connect 1"},
    "postgres": {"sendto 1", "sendto 2", "recvfrom 1", "recvfrom 2", "connect 1"},
    "sqlite": {"pwrite64 1", "pwrite64 2", "fdatasync 1", "fdatasync 2", "fcntl 1"},
}


@pytest.mark.parametrize("name", STRUCK)
def test_promises_survive_death_at_every_system_call(name: str) -> None:
    """Wherever in the conversation with the store a process dies, every promise holds and nothing is stuck."""
    if _REASON:
        pytest.fail(_REASON)
    promises = tuple(PROMISES) if name == "dynamodb" else ("at most once",)  # the others: make prove
    with a_store(name) as site:
        found = sweep("system calls", target=name, url=site.url, promises=promises)

    assert set(found.points) >= {"write 1", "write 2", *STRUCK[name]}
    assert found.tally.problems == []
    assert [(each.effects_0, each.stuck, each.unexplained) for each in found.rows] == [(0, 0, 0)] * len(found.rows)
    # At most once: some deaths left nothing behind and the next delivery ran, some left a claim and it did not.
    (refused,) = [each for each in found.rows if each.promise == "at most once"]
    assert refused.unknown > 0
    assert refused.effects_1 > 0
