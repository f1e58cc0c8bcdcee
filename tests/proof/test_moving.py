"""Workers of different configuration while operations move between two stores: every order of their requests, and every
crash between two of them, on the production code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from celery_idempotent import Policy
from celery_idempotent.engine import claim as claim_module
from celery_idempotent.engine.claim import claim
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.moves import is_mark, mark_of
from celery_idempotent.protocol.operation import Operation, Run, ended
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.dual import DualStore
from celery_idempotent.stores.memory import MemoryStore

START = 1_800_000_000_000
LATER = START + 10_000_000
"""Long after every lease."""

KEY = "orders.charge:1:a"
OPERATION = Operation(
    identity=Identity(KEY, "f" * 64), policy=Policy(), task="orders.charge", task_id="t", worker="celery@example"
)


class Suspended(BaseException):
    """An actor stands before its next request."""


@dataclass(frozen=True)
class World:
    """All that there is.

    Args:
        old: What the old store has under the key.
        new: The same of the new one.
        effects: How often the effect happened.
        told: By actor, what its requests so far were answered.
        gone: Actors that died.
        now: The clock of both stores.
    """

    old: Record | None
    new: Record | None
    effects: int
    told: tuple[tuple[Any, ...], ...]
    gone: frozenset[int] = frozenset()
    now: int = START

    def __hash__(self) -> int:
        return hash((self.old and self.old.revision, self.new and self.new.revision, self.effects, len(self.gone)))


class _Scripted:
    """Answers an actor's requests by what was answered before, and carries out the one that comes next."""

    def __init__(self, world: World, actor: int, *, acts: bool) -> None:
        self.world = world
        self._actor = actor
        self._answers = iter(world.told[actor])
        self._acts = acts
        self.nonces = (f"{actor}-{number}" for number in range(1000))

    def ask(self, place: str, act: Callable[[MemoryStore], Any]) -> Any:
        try:
            return next(self._answers)
        except StopIteration:
            if not self._acts:
                raise Suspended from None
        self._acts = False
        world = self.world
        if place == "effect":
            self.world = self._after(True, effects=world.effects + 1)
            return True
        stored = getattr(world, place)
        register = MemoryStore(lambda: world.now)
        if stored is not None:
            register.swap(stored, None)
        answer = act(register)
        self.world = self._after(answer, **{place: register.get(KEY)})
        return answer

    def _after(self, answer: Any, **changes: Any) -> World:
        told = list(self.world.told)
        told[self._actor] = (*told[self._actor], answer)
        return World(**{**vars(self.world), "told": tuple(told), **changes})


class _Register:
    """A store with one record, every request to which is a step."""

    def __init__(self, script: _Scripted, place: str) -> None:
        self._script = script
        self._place = place

    def swap(self, new: Record, expected: str | None) -> Record | None:
        found: Record | None = self._script.ask(self._place, lambda store: store.swap(new, expected))
        return found

    def get(self, key: str) -> Record | None:
        found: Record | None = self._script.ask(self._place, lambda store: store.get(key))
        return found

    def scan(self) -> Iterator[Record]:
        found: list[Record] = self._script.ask(self._place, lambda store: list(store.scan()))
        return iter(found)

    def now(self) -> int:
        return self._script.world.now


Actor = Callable[[_Scripted], Any]


def _stores(script: _Scripted) -> tuple[Any, Any, Any]:
    old, new = _Register(script, "old"), _Register(script, "new")
    return old, new, DualStore(old, new)  # type: ignore[arg-type]


def _works(script: _Scripted, store: Any) -> str:
    """A delivery: claim, effect, completion."""
    with mock.patch.object(claim_module, "new_nonce", side_effect=script.nonces):
        answer = claim(store, OPERATION)
    if not isinstance(answer, Run):
        return type(answer).__name__
    if "charge" not in answer.record.steps:
        script.ask("effect", lambda _: None)
    return _completes(script, store, answer.record)


def _completes(script: _Scripted, store: Any, claimed: Record) -> str:
    done = Encoded('"ch_1"', "application/json")
    end = ended(claimed, Status.COMPLETED, store.now(), 86_400_000, next(script.nonces), done)
    stored = store.swap(end, claimed.revision)
    return "done" if stored is not None and stored.revision == end.revision else "lost"


def by_old(script: _Scripted) -> str:
    """A worker that knows the old store alone."""
    return _works(script, _stores(script)[0])


def by_both(script: _Scripted) -> str:
    """A worker on the dual store."""
    return _works(script, _stores(script)[2])


def by_new(script: _Scripted) -> str:
    """A worker that knows the new store alone."""
    return _works(script, _stores(script)[1])


def owner_by_old(script: _Scripted) -> str:
    """A worker that knows the old store alone, in the middle of its body; the effect has happened."""
    return _completes(script, _stores(script)[0], BEFORE["running"])  # type: ignore[arg-type]


def copies(script: _Scripted) -> str:
    """The copy."""
    dual = _stores(script)[2]
    for each, can_move in dual.left():
        if can_move:
            dual.move(each)
    return "copied"


def _record(**values: Any) -> Record:
    return Record(
        **{
            "key": KEY,
            "status": Status.IN_PROGRESS,
            "revision": "r",
            "owner": "o",
            "fencing_token": START - 5_000,
            "lease_until": START - 4_000,
            "fingerprint": "f" * 64,
            "attempts": 1,
            "created_at": START - 5_000,
            "updated_at": START - 5_000,
            "task": "orders.charge",
            "task_id": "t",
            "worker": "celery@example",
            **values,
        }
    )


_OUTCOME = {
    "status": Status.COMPLETED,
    "result": b"\xff",
    "content_type": "x/y",
    "expires_at": START // 1000 + 9_999_999,
}
BEFORE: Mapping[str, Record | None] = {
    "nothing": None,
    "running": _record(lease_until=START + 60_000),
    "abandoned": _record(lease_until=START - 100_000),
    "released": _record(status=Status.RELEASED, steps={"charge": {"result": "ch_1", "content_type": "x/y"}}),
    "in doubt": _record(status=Status.UNKNOWN, error="why"),
    "completed": _record(**_OUTCOME),
    "failed": _record(**{**_OUTCOME, "status": Status.FAILED}),
    "forgotten": _record(**{**_OUTCOME, "expires_at": START // 1000 - 1}),
    "half moved": mark_of(_record(status=Status.RELEASED)),
}


def _step(world: World, actors: tuple[Actor, ...], number: int) -> World:
    """The world after the next request of an actor."""
    script = _Scripted(world, number, acts=True)
    with suppress(Suspended):
        actors[number](script)
    return script.world


def _ended(world: World, actors: tuple[Actor, ...], number: int) -> Any:
    try:
        return actors[number](_Scripted(world, number, acts=False))
    except Suspended:
        return None


def _ends(begin: World, actors: tuple[Actor, ...], *, deaths: int) -> set[World]:
    """Every world in which nobody goes on, by whatever order of requests and whatever deaths between them."""
    seen, ends, open_ = {begin}, set(), [begin]
    while open_:
        world = open_.pop()
        running = [
            each for each in range(len(actors)) if each not in world.gone and _ended(world, actors, each) is None
        ]
        after = [_step(world, actors, each) for each in running]
        if len(world.gone) < deaths:
            after += [World(**{**vars(world), "gone": world.gone | {each}}) for each in running]
        if not running:
            ends.add(world)
        open_ += {each for each in after if each not in seen}
        seen.update(after)
    assert ends
    return ends


def _run_to_end(world: World, actor: Actor) -> tuple[World, Any]:
    """One more actor, alone."""
    world = World(**{**vars(world), "told": (*world.told, ())})
    actors = tuple(actor for _ in world.told)
    while (how := _ended(world, actors, len(world.told) - 1)) is None:
        world = _step(world, actors, len(world.told) - 1)
    return world, how


HAS_OUTCOME = {"completed", "failed", "in doubt"}

TOGETHER: Mapping[str, tuple[Actor, ...]] = {
    "one after the other gets both": (by_old, by_both),
    "all have both": (by_both, by_both),
    "copy beside both": (by_both, copies),
    "copy begun too early": (by_old, copies),
    "two copies": (copies, copies),
    "an attempt by the old store": (owner_by_old, by_both),
    "an attempt by the old store, and a copy": (owner_by_old, copies),
    "a body on each, and a copy": (by_old, by_both, copies),
}


CASES = [
    pytest.param(before, actors, id=f"{together}: {before}")
    for together, actors in TOGETHER.items()
    for before in BEFORE
    if (owner_by_old in actors) == (before == "running")
]


@pytest.mark.parametrize(("before", "actors"), CASES)
def test_operation_happens_once_wherever_its_record_is(before: str, actors: tuple[Actor, ...]) -> None:
    """Nobody dies and no lease ends: one effect at most, and what was recorded is what everybody hears."""
    had = int(owner_by_old in actors)
    for end in _ends(World(BEFORE[before], None, had, ((),) * len(actors)), actors, deaths=0):
        hows = [_ended(end, actors, each) for each in range(len(actors))]
        assert "lost" not in hows
        may_run = before not in {*HAS_OUTCOME, "running", "released"}
        # Who knows the old store alone waits for what has moved: there is always somebody on both.
        assert end.effects in ({had} if not may_run else {1} if by_both in actors else {0, 1}), hows
        _recovers(end, before)


@pytest.mark.parametrize(("before", "actors"), [each for each in CASES if len(each.values[1]) == 2])  # type: ignore[arg-type]
def test_death_between_any_two_requests_loses_nothing_and_repeats_no_more_than_ever(
    before: str, actors: tuple[Actor, ...]
) -> None:
    """An effect happens again only where the attempt that had it died before it could say so."""
    had = int(owner_by_old in actors)
    for end in _ends(World(BEFORE[before], None, had, ((),) * len(actors)), actors, deaths=1):
        unsaid = sum(1 for each in end.gone if True in end.told[each]) + (had if 0 in end.gone else 0)
        assert end.effects <= 1 + unsaid
        _recovers(end, before, already=unsaid)


@pytest.mark.parametrize("before", sorted(BEFORE.keys() - {"running"}))
def test_workers_on_the_new_store_begin_where_the_copy_has_ended(before: str) -> None:
    """Beside workers that still have both."""
    copied, _ = _run_to_end(World(BEFORE[before], None, 0, ()), copies)
    begin = World(copied.old, copied.new, 0, ((), ()))
    for deaths in (0, 1):
        for end in _ends(begin, (by_both, by_new), deaths=deaths):
            unsaid = sum(1 for each in end.gone if True in end.told[each])
            assert end.effects <= 1 + unsaid
            _recovers(end, before, already=unsaid)


def _recovers(end: World, before: str, *, already: int = 0) -> None:
    """Once leases are over: a worker on both, the copy and a worker on the new store find the one outcome."""
    later = World(**{**vars(end), "now": LATER})
    later, how = _run_to_end(later, by_both)
    later, _ = _run_to_end(later, copies)
    assert later.old is None or is_mark(later.old), later.old
    last, again = _run_to_end(later, by_new)
    assert last.effects == later.effects
    assert last.effects <= 1 + already
    if before in HAS_OUTCOME:
        assert (how, again) in {("Replay", "Replay"), ("ReplayFailure", "ReplayFailure"), ("Unknown", "Unknown")}
        assert last.effects == 0
        assert last.new == BEFORE[before]
    else:
        assert again == "Replay"
        assert last.effects >= (0 if before == "released" else 1)


def test_without_a_mark_an_operation_would_happen_twice() -> None:
    """The search finds what it looks for: a dual store that leaves no mark lets a worker on the old one begin, too."""

    def careless(script: _Scripted) -> str:
        old, new, _ = _stores(script)
        seen = old.get(KEY)
        return "seen" if seen is not None else _works(script, new)

    ends = _ends(World(None, None, 0, ((), ())), (by_old, careless), deaths=0)
    assert 2 in {each.effects for each in ends}
