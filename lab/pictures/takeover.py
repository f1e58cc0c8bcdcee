"""A takeover in time: two deliveries of one message, on a real engine and store, with a clock moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from celery_idempotent import Policy
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, ControlFlow, Delivery
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from lab.svg import LINE, WIDTH, line, picture, text

POLICY = Policy(key="order_id")
"""All its times are the defaults."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker saw.

    Args:
        at: Seconds since the first claim.
        worker: Which of the two.
        kind: What it was.
        record: What the store held afterwards.
    """

    at: float
    worker: str
    kind: str
    record: Record | None = None

    @property
    def token(self) -> int:
        """The fencing token that the store held, as it is."""
        return self.record.fencing_token if self.record else 0


class _Noted(MemoryStore):
    """A store that notes who wrote what, and who was refused."""

    def __init__(self, run: _Run) -> None:
        super().__init__(run.clock.now)
        self._run = run

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = super().swap(new, expected)
        assert stored is not None
        if stored is not new:
            self._run.note("refused", stored)
        elif new.status is Status.COMPLETED:
            self._run.note("completed", stored)
        elif expected is None or new.owner != self._run.owner:
            self._run.note("claimed", stored)
            self._run.owner = new.owner
        else:
            self._run.note("renewed", stored)
        return stored


class _NoHeartbeat(Heartbeat):
    """Threads would follow a clock of their own: who beats is part of the story."""

    def start(self, attempt: Claim) -> None: ...

    def stop(self, attempt: Claim) -> None: ...


class _Run:
    """The story: what happens, and when."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.events: list[Event] = []
        self.owner = ""
        self._began = self.clock.milliseconds
        self._worker = ""
        self._store = _Noted(self)

    def note(self, kind: str, record: Record | None = None) -> None:
        self.events.append(Event((self.clock.milliseconds - self._began) / 1000, self._worker, kind, record))

    def play(self) -> None:
        """A stalls after its first renewal; its message comes again too early, and once more; A wakes."""
        self.note_outcome("A", self._stalls)

    def _stalls(self, claimed: Claim | None) -> str:
        assert claimed is not None
        self._at(20)
        claimed.renew()
        self._at(30)
        self.note("stalls")
        self._at(45)
        self.note_outcome("B", self._works)
        self._at(85)
        self.note_outcome("B", self._works)
        self._at(110)
        self.note("wakes")
        return "by A"

    def _works(self, claimed: Claim | None) -> str:
        self._at(100)
        return "by B"

    def note_outcome(self, worker: str, body: Callable[[Claim | None], Any]) -> None:
        with self._as(worker):
            delivery = Delivery(
                Operation(identity=Identity("k", None), policy=POLICY, task="t", task_id="i", worker=worker),
                self._store,
                Codec("json", frozenset({"application/json"})),
                _NoHeartbeat(),
                ControlFlow(),
                lambda event: None,
                self.clock,
            )
            outcome = delivery.run(body)
            self.note("postponed" if isinstance(outcome, Conflict) else f"reports {outcome.value}")

    def _at(self, second: float) -> None:
        self.clock.milliseconds = self._began + round(second * 1000)

    @contextmanager
    def _as(self, worker: str) -> Iterator[None]:
        before, self._worker = self._worker, worker
        yield
        self._worker = before


def events() -> list[Event]:
    """What happened, in the order of time."""
    run = _Run()
    run.play()
    return run.events


# -- drawn

_TOP, _SCALE = 64, 4.0
_LANES = {"A": (64, "blue"), "B": (276, "orange")}
_LETTERS = 24


def draw() -> str:
    """The picture: time goes down, a lane for each worker, and beside it the lease that it has."""
    told = list(_told(events()))
    drawn = [text("time", 8, 28, "small", "grey")]
    for worker, (x, colour) in _LANES.items():
        drawn.append(text(f"worker {worker}", x, 28, "title", colour))
    for name, begin, end in _leases(events()):
        x, colour = _LANES[name]
        drawn.append(_bar(x, begin, end, colour))
    for index, (at, worker, words) in enumerate(told):
        x, colour = _LANES[worker]
        y = _y(at)
        if at not in {each[0] for each in told[:index]}:
            drawn += [text(f"{at:.0f} s", 44, y + 5, "end", "small", "grey"), line("grid", 50, y, WIDTH - 8, y)]
        drawn.append(f'<circle cx="{x + 4}" cy="{y:.1f}" r="5" style="fill: var(--{colour})"/>')
        rows = [row for each in words for row in wrap(each, _LETTERS)]
        drawn += [text(row, x + 18, y + 5 + each * LINE, "small", "halo") for each, row in enumerate(rows)]
    last = max(at for at, *_ in told)
    drawn += [
        f'<rect x="64" y="{_y(last) + 88:.1f}" width="8" height="16" style="fill: var(--blue); opacity: 0.45"/>',
        text("the worker's lease", 82, _y(last) + 101, "small", "grey"),
    ]
    said = "; ".join(f"{at:.0f} s, worker {worker}: {', '.join(words)}" for at, worker, words in told)
    return picture(
        "A takeover: a worker stalls, another takes over, the first one's write is refused",
        f"{said}.",
        drawn,
        _y(last) + 120,
    )


def _y(at: float) -> float:
    return _TOP + at * _SCALE


def _bar(x: float, begin: float, end: float, colour: str) -> str:
    style = f"fill: var(--{colour}); opacity: 0.45"
    return f'<rect x="{x}" y="{_y(begin):.1f}" width="8" height="{_y(end) - _y(begin):.1f}" style="{style}"/>'


def _leases(seen: list[Event]) -> Iterator[tuple[str, float, float]]:
    """By worker: from its claim until the lease that it had last is over, or its outcome is recorded."""
    for worker in _LANES:
        held = [each for each in seen if each.worker == worker and each.kind in ("claimed", "renewed", "completed")]
        yield worker, held[0].at, held[-1].at if held[-1].kind == "completed" else _lease_over(seen, held[-1])


def _lease_over(seen: list[Event], event: Event) -> float:
    """In seconds since the first claim, whose token is its time."""
    assert event.record is not None
    return (event.record.lease_until - seen[0].token) / 1000


def _told(seen: list[Event]) -> Iterator[tuple[float, str, list[str]]]:
    """What is to be read, in the order of time: what happened at one time to one worker stands together."""
    found: dict[tuple[float, str], list[str]] = {}
    for each in seen:
        words = _words(seen, each)
        if words:
            found.setdefault((each.at, each.worker), []).extend(words)
    renewal = next(each for each in seen if each.kind == "renewed")
    found[_lease_over(seen, renewal), renewal.worker] = ["its lease is over"]
    yield from ((at, worker, found[at, worker]) for at, worker in sorted(found))


def _words(seen: list[Event], event: Event) -> list[str]:
    token = f"token …{event.token % 1_000_000:06}"
    match event.kind:
        case "claimed" if event is seen[0]:
            return ["claims the key", token, f"lease until {_lease_over(seen, event):.0f} s"]
        case "claimed":
            return ["takes over", f"{token}, larger", f"lease until {_lease_over(seen, event):.0f} s"]
        case "renewed":
            return [f"renews: until {_lease_over(seen, event):.0f} s"]
        case "stalls":
            return ["stalls in its body"]
        case "postponed":
            return ["gets the message again: the lease runs, so it is postponed"]
        case "completed":
            return ["its result is recorded"]
        case "wakes":
            return ["wakes, its body returns"]
        case "refused" if event.worker == "A":
            return ["its write is refused: the record is B's"]
        case kind if kind == "reports by B" and event.worker == "A":
            return ["reports B's result"]
        case _:
            return []
