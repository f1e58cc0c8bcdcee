"""The specification keeps its promises in every order, and finds each mistake that is put into it."""

import pytest

from lab.proof import specification
from lab.proof.specification import MISTAKES, Bounds, check
from tests.support.packages import program


@pytest.fixture(autouse=True)
def spin() -> None:
    for each in ("spin", "gcc"):
        program(each)


@pytest.mark.parametrize("bounds", specification.QUICK, ids=str)
def test_every_order_keeps_every_promise(bounds: Bounds) -> None:
    """Of two actors, without faults of requests; the longer form has more of both."""
    found = check(bounds)
    assert found.way == ()
    assert found.states > 10_000


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, id=each.mistake, marks=[pytest.mark.nightly] * (each.actors > 2)) for each in MISTAKES],
)
def test_mistake_breaks_a_promise(mistake: Bounds) -> None:
    """And the way there is told in words."""
    found = check(mistake)
    assert found.promise in found.way[-1] or mistake.liveness
    assert "1 claims" in found.way
