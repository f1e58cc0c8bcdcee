"""Leases: what is left of one when the body begins, and who renews it."""

import pytest

from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.errors import LeaseLost, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from tests.support.scene import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_claim_born_expired_is_renewed_before_the_body(scene: Scene) -> None:
    """A clock that had fallen behind wrote the claim; the reply showed it, and nobody may take over from a new body."""
    slow_by = 3_600_000
    scene.clock.advance(slow_by)
    now, behind = scene.store.now, [True]
    scene.store.now = lambda: now() - (slow_by if behind[0] else 0)  # type: ignore[method-assign]
    scene.store.before_swap = lambda record: behind.__setitem__(0, False)  # the reply tells the time

    def body(attempt: Claim | None) -> int:
        return scene.record.lease_until - now()

    assert scene.run(body).value == 60_000


@pytest.mark.parametrize(("behind", "left"), [(0, 60_000), (29_000, 31_000), (31_000, 60_000)])
def test_claim_whose_lease_is_half_over_is_renewed_before_the_body(scene: Scene, behind: int, left: int) -> None:
    """The heartbeat comes after a third; what is left must last until then, with room for a try that fails."""
    scene.reply_takes(behind)

    assert scene.run(lambda attempt: scene.record.lease_until - scene.store.now()).value == left


def test_lease_counts_from_the_claim_and_not_from_its_reply(scene: Scene) -> None:
    """By the local clock, too: an attempt that believes in 20 s more than it has would go on beside its successor."""

    def body(attempt: Claim | None) -> None:
        assert attempt is not None
        scene.steal(after=41_000)
        with pytest.raises(LeaseLost):
            attempt.ensure_owned()

    scene.reply_takes(20_000)

    assert scene.run(body) == Outcome("theirs")


def test_renewed_lease_counts_from_the_renewal_and_not_from_its_reply(scene: Scene) -> None:
    """However often it is renewed."""

    def body(attempt: Claim | None) -> None:
        assert attempt is not None
        scene.clock.advance(60_000)
        scene.reply_takes(20_000)
        attempt.ensure_owned()
        scene.steal(after=41_000)
        with pytest.raises(LeaseLost):
            attempt.ensure_owned()

    assert scene.run(body) == Outcome("theirs")


def test_claim_that_was_lost_before_its_body_asks_who_took_over(scene: Scene) -> None:
    """A worker that stalls between its claim and its body runs nothing, and gets its successor's outcome."""
    stolen: list[bool] = []

    def stall(record: Record) -> None:
        if record.status is Status.IN_PROGRESS and not stolen:
            stolen.append(True)
            swap = scene.store.swap

            def then_stall(new: Record, expected: str | None) -> Record | None:
                scene.store.swap = swap  # type: ignore[method-assign]
                scene.store.before_swap = lambda record: None
                stored = swap(new, expected)
                scene.steal()
                return stored

            scene.store.swap = then_stall  # type: ignore[method-assign]
            raise StoreUnavailable("s", "swap", "lost")

    scene.store.before_swap = stall

    assert scene.run(lambda attempt: "ours") == Outcome("theirs")
    assert scene.runs == 0


@pytest.mark.parametrize("on_outage", ["retry", "run"])
def test_heartbeat_that_cannot_start_is_an_outage(
    scene: Scene, on_outage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would renew the lease, so the claim is given back at once and the policy for outages decides."""

    def refuse(attempt: Claim) -> None:
        raise StoreUnavailable("memory", "heartbeat", "can't start new thread")

    monkeypatch.setattr(scene.heartbeat, "start", refuse)
    seen: list[Claim | None] = []

    def body(attempt: Claim | None) -> str:
        seen.append(attempt)
        return "unprotected"

    if on_outage == "retry":
        with pytest.raises(StoreUnavailable, match="can't start new thread"):
            scene.run(body, on_outage=on_outage)
        assert seen == []
    else:
        assert scene.run(body, on_outage=on_outage) == Outcome("unprotected")
        assert seen == [None]
    assert scene.record.status is Status.RELEASED
    assert scene.names == ["store_unavailable"]


class TestProcessThatEnds:
    """At a moment that is known: nobody should have to wait for it afterwards."""

    def test_extends_no_lease_beyond_its_end(self, scene: Scene) -> None:
        """Neither by a renewal nor by a step; before that, it renews as ever."""
        scene.until = scene.clock.monotonic() + 90
        left: list[int] = []

        def body(attempt: Claim | None) -> None:
            assert attempt is not None
            for passed in (20, 20, 45):
                scene.clock.advance(passed * 1000)
                attempt.renew()
                left.append(scene.record.lease_until - scene.store.now())
            attempt.begin_step("sms")
            left.append(scene.record.lease_until - scene.store.now())

        scene.run(body, lease=60)

        assert left == [60_000, 50_000, 5_000, 5_000]

    def test_shortens_no_lease(self, scene: Scene) -> None:
        """What a claim was granted for may be longer."""
        scene.until = scene.clock.monotonic() + 10

        def body(attempt: Claim | None) -> int:
            assert attempt is not None
            attempt.renew()
            return scene.record.lease_until - scene.store.now()

        assert scene.run(body, lease=60).value == 60_000

    def test_knows_when_it_may_not_go_on(self, scene: Scene) -> None:
        """By the local clock, too, the lease ends then, and the store is asked."""
        scene.until = scene.clock.monotonic() + 70

        def body(attempt: Claim | None) -> None:
            assert attempt is not None
            scene.clock.advance(20_000)
            attempt.renew()
            scene.steal(after=52_000)
            with pytest.raises(LeaseLost):
                attempt.ensure_owned()

        assert scene.run(body, lease=60) == Outcome("theirs")

    def test_tries_a_last_write_no_longer(self, scene: Scene) -> None:
        """Others of its batch have to be answered."""
        began = scene.clock.monotonic()
        scene.until = began + 30

        def body(attempt: Claim | None) -> None:
            scene.store.before_swap = unavailable

        def unavailable(record: Record) -> None:
            raise StoreUnavailable("store", "swap", "away")

        with pytest.raises(StoreUnavailable):
            scene.run(body)
        assert 30 <= scene.clock.monotonic() - began < 33
