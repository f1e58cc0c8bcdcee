"""A soft time limit, or whatever else a signal raises, strikes at lines of the library, in every kind of call."""

import pytest

from lab.proof.strikes import KINDS, UNENDED, attack


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(300)
def test_whatever_is_struck_the_next_call_is_protected(kind: str) -> None:
    """No renewal is left, no strike vanishes, and effects are as many as promised."""
    found = list(attack(kind, every=7))
    assert [each for each in found if each.problems] == []
    assert len(found) > 40


def test_liveness_that_an_exit_must_switch_off_is_noticed() -> None:
    """The control: with a flag in the place of the lock, a struck exit leaves later calls unprotected."""
    with UNENDED.applied():
        assert any("ran unprotected" in problem for found in attack("function") for problem in found.problems)
