"""The states of a record and the ways between them, found by trying everything that anybody can do, on a real store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

from celery_idempotent import LeaseLost, Policy
from celery_idempotent.engine import verdicts
from celery_idempotent.engine.claim import Claim, announce, claim
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, Run, is_forgotten
from celery_idempotent.protocol.publishing import Outgoing
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from lab.svg import MONO, WIDTH, arrow, box, picture, text

NOTHING = "nothing recorded"
"""There is no record, or its outcome no longer counts."""

Way = tuple[str, str]
"""From one state to another."""

_DEPTH = 3
"""Steps after which no new way appears."""

_RERUN = Policy(lease=60, retain=3600)
_REFUSE = Policy(lease=60, retain=3600, on_takeover="refuse")
_GRACE = 1000
_OVER = _RERUN.lease_ms + _GRACE


class _Watched(MemoryStore):
    """A store that notes each write that changed a record, and who made it."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock.now)
        self.who = ""
        self.seen: set[tuple[str, str, str]] = set()

    def state(self, record: Record | None) -> str:
        return NOTHING if record is None or is_forgotten(record, self.now()) else str(record.status)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        before = self.get(new.key)
        stored = super().swap(new, expected)
        if stored is new:
            self.seen.add((self.state(before), self.state(new), self.who))
        return stored


class _World:
    """One operation, its store and clock, and the attempts that were made."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = _Watched(self.clock)
        self.claims: list[Claim] = []

    @property
    def looks(self) -> tuple[Record | None, int, int]:
        """What the next act depends on."""
        return self.store.get("k"), self.clock.milliseconds, len(self.claims)

    def deliver(self, policy: Policy) -> None:
        decision = claim(self.store, _operation(policy))
        if isinstance(decision, Run):
            self.claims.append(
                Claim(
                    self.store,
                    decision.record,
                    lease=policy.lease_ms,
                    retain=policy.retain_ms,
                    claimed_at=self.clock.monotonic(),
                    clock=self.clock,
                )
            )

    def attempt(self, act: Callable[[Claim], object], which: int) -> None:
        for each in self.claims[which:][:1]:
            act(each)

    def wait(self, milliseconds: int) -> None:
        before = self.store.state(self.store.get("k"))
        self.clock.advance(milliseconds)
        after = self.store.state(self.store.get("k"))
        if before != after:
            self.store.seen.add((before, after, "time"))


def _operation(policy: Policy) -> Operation:
    return Operation(identity=Identity("k", None), policy=policy, task="t", task_id="i", worker="w")


def _publish(world: _World) -> None:
    announce(world.store, Outgoing(operation=_operation(Policy(publish="once")), queued_for=1000))


def _deliver_late(world: _World) -> None:
    """When lease and grace of an attempt are over, which must not be repeated."""
    world.wait(_OVER)
    world.deliver(_REFUSE)


_NULL = Encoded("null", "application/json")


def _judge(world: _World, *, action: Action) -> None:
    seen = verdicts.recorded(world.store, "k")
    verdicts.judge(world.store, seen, action, grace=_GRACE, retain=_RERUN.retain_ms, result=_NULL)


_Act = Callable[[_World], object]


def _acts() -> Mapping[str, list[_Act]]:
    """By who acts: what they can do."""
    attempts: list[Callable[[Claim], object]] = [
        lambda each: each.renew(),
        lambda each: each.complete(None),
        lambda each: each.fail(None, "why"),
        lambda each: each.release(),
        lambda each: each.abandon(),
        lambda each: each.give_up("why"),
    ]
    return {
        "worker": [
            lambda world: world.deliver(_RERUN),
            _deliver_late,
            *(partial(_World.attempt, act=act, which=which) for act in attempts for which in (0, -1)),
        ],
        "person": [partial(_judge, action=action) for action in Action],
        "publisher": [_publish],
        "time": [
            lambda world: world.wait(_OVER),
            lambda world: world.wait(_RERUN.retain_ms + 1000),
        ],
    }


@cache
def ways(depth: int = _DEPTH) -> dict[Way, frozenset[str]]:
    """Every way between two states, and who can go it; from all that can be done in ``depth`` steps, one after another.

    A renewal and a takeover lead from a state to itself. What a store loses is nobody's act.
    """
    acts = [(who, act) for who, each in _acts().items() for act in each]
    seen: set[tuple[str, str, str]] = set()
    paths: list[tuple[tuple[str, _Act], ...]] = [()]
    for _ in range(depth):
        # What changed nothing need not be followed: the path without it is.
        paths = [path for before in paths for act in acts if _changes(path := (*before, act), seen)]
    return {
        way: frozenset(who for *each, who in seen if tuple(each) == way)
        for way in sorted({(start, end) for start, end, _ in seen})
        if way != (NOTHING, NOTHING)
    }


def _changes(path: tuple[tuple[str, _Act], ...], seen: set[tuple[str, str, str]]) -> bool:
    """Play the path in a new world, note the ways that were gone, and say whether its last act changed anything."""
    world = _World()
    before = after = world.looks
    for who, act in path:
        before, world.store.who = after, who
        with suppress(LeaseLost, PolicyError):
            act(world)
        after = world.looks
    seen |= world.store.seen
    return before != after


# -- drawn

_COLOURS = {"worker": "blue", "person": "purple", "publisher": "teal", "time": "grey"}
_WIDE, _HIGH = 126, 34
_AT = {
    Status.RELEASED: (71, 190),
    Status.IN_PROGRESS: (240, 190),
    Status.UNKNOWN: (409, 190),
    Status.FAILED: (71, 350),
    Status.COMPLETED: (240, 350),
}
"""The middle of each box. What is not recorded is a bar above all, and one below."""
_TOP, _BOTTOM = 34.0, 484.0


@dataclass(frozen=True, slots=True)
class _Line:
    """How a way is drawn.

    Args:
        points: From box to box.
        labels: Who goes it, in which words, and where these stand.
    """

    points: list[tuple[float, float]]
    labels: list[tuple[str, str, float, float]]


_LINES: Mapping[Way, _Line] = {
    (NOTHING, "IN_PROGRESS"): _Line([(240, 51), (240, 173)], [("worker", "claim", 240, 79)]),
    (NOTHING, "RELEASED"): _Line([(42, 51), (42, 173)], [("publisher", "announce", 46, 79)]),
    ("RELEASED", NOTHING): _Line([(100, 173), (100, 51)], [("person", "forget", 100, 113)]),
    ("RELEASED", "RELEASED"): _Line([(20, 207), (20, 236), (60, 236), (60, 207)], [("publisher", "announce", 46, 256)]),
    ("IN_PROGRESS", "RELEASED"): _Line(
        [(177, 183), (134, 183)], [("worker", "raise", 156, 157), ("person", "release", 156, 174)]
    ),
    ("RELEASED", "IN_PROGRESS"): _Line([(134, 198), (177, 198)], [("worker", "claim", 156, 217)]),
    ("IN_PROGRESS", "IN_PROGRESS"): _Line(
        [(254, 207), (254, 236), (290, 236), (290, 207)], [("worker", "renew, take over", 296, 256)]
    ),
    ("IN_PROGRESS", "UNKNOWN"): _Line([(303, 190), (346, 190)], [("worker", "doubt", 325, 178)]),
    ("UNKNOWN", "RELEASED"): _Line([(390, 173), (390, 130), (124, 130), (124, 173)], [("person", "rerun", 330, 125)]),
    ("IN_PROGRESS", "COMPLETED"): _Line([(226, 207), (226, 333)], [("worker", "return", 216, 300)]),
    ("IN_PROGRESS", "FAILED"): _Line([(196, 207), (100, 333)], [("worker", "fail", 128, 300)]),
    ("UNKNOWN", "COMPLETED"): _Line(
        [(396, 207), (396, 344), (303, 344)], [("person", "completed", 346, 316), ("worker", "late return", 346, 334)]
    ),
    ("UNKNOWN", "FAILED"): _Line(
        [(440, 207), (440, 400), (90, 400), (90, 367)], [("worker", "late failure", 392, 419)]
    ),
    ("COMPLETED", NOTHING): _Line(
        [(240, 367), (240, 467)], [("time", "retain is over", 300, 427), ("person", "forget", 300, 445)]
    ),
    ("FAILED", NOTHING): _Line(
        [(50, 367), (50, 467)], [("time", "retain is over", 110, 427), ("person", "forget", 110, 445)]
    ),
}


def draw() -> str:
    """The picture.

    Raises:
        ValueError: A way was found that it would not show, or the other way round.
    """
    shown = {way: frozenset(who for who, *_ in line.labels) for way, line in _LINES.items()}
    if shown != ways():
        raise ValueError(f"the picture and the code differ in {dict(shown.items() ^ ways().items())}")
    drawn = [each for line in _LINES.values() for each in _drawn(line)]
    for y in (_TOP, _BOTTOM):
        drawn += [box(8, y - 17, WIDTH - 16, _HIGH, "grey"), text(NOTHING, WIDTH / 2, y + 5, "middle")]
    for status, (x, y) in _AT.items():
        drawn += [box(x - _WIDE / 2, y - 17, _WIDE, _HIGH), text(str(status), x, y + 5, "middle", "bold", MONO)]
    said = "; ".join(f"{start} to {end}: {_told(line)}" for (start, end), line in _LINES.items())
    at = 8.0
    for who, colour in _COLOURS.items():
        drawn += [box(at, 516, 12, 12, colour, fill=colour), text(who, at + 18, 527)]
        at += 40 + 9 * len(who)
    return picture("The states of a record, and who moves it from one to another", f"{said}.", drawn, 540)


def _drawn(line: _Line) -> list[str]:
    colour = _COLOURS[line.labels[0][0]]
    words = [text(said, x, y, "middle", "halo", "small", _COLOURS[who]) for who, said, x, y in line.labels]
    return [arrow(line.points, colour), *words]


def _told(line: _Line) -> str:
    return ", ".join(f"{words} ({who})" for who, words, *_ in line.labels)
