"""Faults between worker and store, request by request; the same harness sees a broken library."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from botocore.config import Config

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import HttpReply
from celery_idempotent.stores.dynamodb.direct import Wire as DirectWire
from celery_idempotent.testing.contract import a_record
from lab.proof.course import Operation
from lab.proof.fault_campaign import SINGLES, Fault, Result, campaign, plans
from lab.proof.fleet import CREDENTIALS
from lab.proof.wire import ORDER, Wire

SEED = 7


@pytest.fixture(scope="module")
def singles() -> Result:
    """Every operation with every fault, some of them for so and so many tries."""
    return campaign(SINGLES, SEED, every=3)


def test_every_operation_met_every_fault(singles: Result) -> None:
    """No cell of operation x fault is empty: zero violations say something about each."""
    assert set(singles.reached) == {
        f"{fault} at {operation}" for operation, fault in itertools.product(Operation, Fault)
    }


def test_no_single_fault_breaks_a_promise(singles: Result) -> None:
    """Whatever becomes of a request, effects, records and what callers are told stay within the promise."""
    assert singles.tally.problems == []
    assert all(each.healed for each in singles.rows)


def test_no_pair_and_no_random_plan_breaks_a_promise() -> None:
    """Several faults, several deliveries at once and leases that end at any step: the promises hold."""
    found = campaign(SINGLES + 150, SEED, skip=SINGLES)

    assert found.tally.problems == []
    assert sum(each.tasks for each in found.rows) == 150
    assert sum(each.takeovers for each in found.rows) > 0


def test_lease_that_is_ended_for_a_living_owner_is_taken_over() -> None:
    """Otherwise the zeros say nothing of it: the next delivery runs, and what the owner writes then is refused."""
    struck = [each.strikes[0].operation for each in plans(SINGLES, SEED)]
    first = struck.index(Operation.LEASE_END)

    found = campaign(first + 4, SEED, skip=first)

    assert found.tally.problems == []
    assert sum(each.takeovers + each.unknown for each in found.rows) > 0


def test_announcement_is_what_the_first_delivery_finds() -> None:
    """A publisher's record is in the store when the operation is claimed, or the strike at it met nothing."""
    struck = [each.strikes[0].operation for each in plans(SINGLES, SEED)]
    first = struck.index(Operation.ANNOUNCEMENT)

    found = campaign(first + 4, SEED, skip=first)

    assert found.tally.problems == []
    assert [key for key in found.reached if key.endswith(Operation.ANNOUNCEMENT)]


def test_same_seed_gives_the_same_plans() -> None:
    """A campaign is reproduced by its seed."""
    tasks = SINGLES + 50

    once, again, other = (list(plans(tasks, seed))[SINGLES:] for seed in (SEED, SEED, SEED + 1))

    assert once == again != other


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flaw", "rule"),
    [
        ("completes unconditionally", "a final state was changed"),
        ("forgets its own writes", "a fault that a resend outlives left a trace"),
        ("drops completions", "clean deliveries were told"),
        ("takes over at once", "without a cause"),
    ],
)
def test_broken_variant_is_seen(flaw: str, rule: str) -> None:
    """The same campaign over a library with one rule undone reports the rule that it breaks."""
    found = campaign(SINGLES + 250, SEED, skip=SINGLES, flaw=flaw)

    assert any(rule in problem for each in found.tally.problems for problem in each.problems)


@pytest.fixture
def wire(dynamodb_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with Wire(dynamodb_endpoint.removeprefix("http://")) as wire:
        yield wire


def test_request_that_times_out_and_lands_later_changes_nothing(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that gave up by its clock has sent again and won; its first request, landing at last, is refused."""
    store = DynamoDBStore("times-out", endpoint_url=f"http://127.0.0.1:{wire.port}", config=Config(read_timeout=0.5))
    store.provision()
    orders = iter(["stalled first"])
    exchange = DirectWire.exchange

    def ordered(wire: DirectWire, headers: Mapping[str, str], body: bytes) -> HttpReply:
        return exchange(wire, {**headers, ORDER: next(orders, "pass")}, body)

    monkeypatch.setattr(DirectWire, "exchange", ordered)
    claimed = a_record()
    assert store.swap(claimed, None) == claimed
    renewed = replace(claimed, revision=new_nonce(), lease_until=claimed.lease_until + 1)
    assert store.swap(renewed, claimed.revision) == renewed
    orders = iter(["land first"])
    store.swap(a_record(), None)

    assert store.get(claimed.key) == renewed
    store.close()
