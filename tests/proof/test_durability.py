"""A store whose server is killed and started again has kept what it has acknowledged; one that may forget is seen."""

import pytest

from celery_idempotent import open_store
from celery_idempotent.errors import IdempotencyWarning
from lab.proof import durability
from lab.proof.targets import DURABLE, TARGETS
from lab.proof.verdicts import PROMISES
from tests.support.stores import a_store


@pytest.mark.parametrize("name", DURABLE)
def test_nothing_acknowledged_is_forgotten(name: str) -> None:
    """Tasks go on while the server dies and comes back: no effect is repeated, and every answer stands."""
    told: list[str] = []
    with a_store(name) as site:
        rows = durability.attack(
            TARGETS[name].label, site, list(PROMISES.values()), seconds=3, seed=1, progress=told.append
        )

    assert [line for line in told if line.startswith("BROKEN")] == []
    for row in rows:
        assert row.faults[durability.CAMPAIGN] >= 2
        assert row.tasks
        assert (row.violations, row.stuck, row.unexplained, row.effects_0 + row.effects_2) == (0, 0, 0, 0)


def test_forgetful_server_is_seen_and_warned_of() -> None:
    """The same campaign over a Redis that writes nothing to disk reports effects that happened twice."""
    row = durability.control("redis", seconds=2, seed=1, progress=lambda news: None)
    assert row.violations
    assert row.effects_2
    assert row.system.startswith("negative control")

    with durability.CONTROLS["redis"].start() as site, pytest.warns(IdempotencyWarning, match="forget"):
        open_store(site.url).provision()
