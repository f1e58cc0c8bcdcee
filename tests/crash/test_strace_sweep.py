"""Real processes die by SIGKILL at every system call to the store, without a hook in anything."""

import os

import pytest

from proof.crash_sweep import Result, sweep, why_no_ptrace

_REASON = why_no_ptrace()

# Where everything is in our hands, a sweep that does not run is a failure and not a footnote.
pytestmark = pytest.mark.skipif(_REASON is not None and os.environ.get("CI") != "true", reason=_REASON or "")


@pytest.fixture(scope="module")
def swept(dynamodb_endpoint: str) -> Result:
    if _REASON:
        pytest.fail(_REASON)
    server = dynamodb_endpoint.removeprefix("http://")
    return sweep("system calls", url=f"dynamodb://test:test@{server}/strace-sweep?region=us-east-1")


def test_every_call_to_the_store_was_died_at(swept: Result) -> None:
    """Head and body of the claim and of the completion, both replies, the connection, and the effect itself."""
    sent = {f"sendto {number}" for number in range(1, 5)}
    received = {"recvfrom 1", "recvfrom 2"}

    assert set(swept.points) >= {"connect 1", "write 1", "write 2", *sent, *received}


def test_promises_survive_death_at_every_system_call(swept: Result) -> None:
    """Wherever in the conversation with the store a process dies, every promise holds and nothing is stuck."""
    assert swept.tally.problems == []
    assert [(each.effects_0, each.stuck, each.unexplained) for each in swept.rows] == [(0, 0, 0)] * len(swept.rows)


def test_death_struck_on_both_sides_of_the_claim(swept: Result) -> None:
    """At most once: some deaths left nothing behind and the next delivery ran, some left a claim and it did not."""
    (found,) = [each for each in swept.rows if each.promise == "at most once"]

    assert found.unknown > 0
    assert found.effects_1 > 0
