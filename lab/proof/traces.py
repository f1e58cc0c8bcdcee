"""What the production code saw and wrote, and whether the specification allows it: Spin itself decides.

A trace is one operation under fire: every request of every actor, and the record it was answered. It is made small, to
numbers that the specification knows (:func:`numbers`), and given to the program that Spin makes of the same text; there
the actors do what the trace says, if they may.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from celery_idempotent.engine.claim import Claim
from celery_idempotent.protocol.operation import Operation, is_forgotten
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, from_plain
from lab.proof import recorder, recovery, soak, sweep
from lab.proof.campaign import opened
from lab.proof.course import OneDelivery, Task, at_random
from lab.proof.explorer import Explorer, World, Write
from lab.proof.mutants import MUTANTS, Mutant
from lab.proof.programs import OF_PUBLISHERS, Effect, Fault, Program
from lab.proof.recorder import NO_ANSWER, Line, note_requests, pair
from lab.proof.scripted import START
from lab.proof.specification import checker, defines, execute, found_in
from lab.proof.targets import start

_GRACE: int = Operation._field_defaults["grace"]
_ACTORS = 60
"""As many as a trace may have."""

READING = defines({"ACTORS": _ACTORS, "FAULTS": 255, "LIVENESS": 0, "BROKEN": "NONE", "TRACE": 1, "TRIES": 2_000_000})
"""As what the specification reads traces: so often it asks whether an actor of one may go on, and then rejects it."""

_BATCH = 3_000
"""Traces that are judged in one run of the checker."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything that was asked of one record, in order."""

    source: str
    policy: Policy
    effect: Effect
    lines: tuple[Line, ...]
    forgetful: bool = False


_KINDS = {Effect.REFUSED_STEP: 3, Effect.COMMIT: 4, Effect.TRANSACTION: 4, Effect.BARE: 1}
_STATUSES = {each: number for number, each in enumerate(Status, 1)}


def numbers(trace: Trace) -> tuple[int, ...]:
    """The trace as the specification reads it.

    Each claim of a delivery is an actor of its own, and so is each write without a claim. A revision is its author's
    number and which of its writes; tokens and fingerprints are their ranks; of times remains whether they are over.
    """
    authors = _authors(trace.lines)
    actors = list(dict.fromkeys(authors))
    if len(actors) > _ACTORS:
        raise ValueError(f"{len(actors)} actors")
    tokens = sorted({0, *(line.new.fencing_token for line in trace.lines)})
    prints = list(dict.fromkeys(line.new.fingerprint for line in trace.lines))
    revisions, owners = _revisions(trace.lines, authors, actors), {name: at for at, (name, _) in enumerate(actors, 1)}
    policy, told = trace.policy, []
    seen = {name for line in trace.lines for name in (line.expected, getattr(line.answer, "revision", None))}
    for at, author in enumerate(actors, 1):
        own = [(number, line) for number, line in enumerate(trace.lines) if authors[number] == author]
        told += [int(not author[1]), prints.index(own[0][1].new.fingerprint), len(own)]
        for number, line in own:
            new, answered = line.new, line.answer != NO_ANSWER
            earliest = number if line.earliest is None else line.earliest
            told += [earliest, at, revisions.get(line.expected, -1), revisions[new.revision], _STATUSES[new.status]]
            told += [owners.get(new.owner, 0 if not new.owner else -1), tokens.index(new.fencing_token)]
            told += [min(new.takeovers, 200), prints.index(new.fingerprint), _step(new), int(_lapses(new))]
            told += [int(answered), *(_answer(line, revisions) if answered else (int(new.revision in seen), 0))]
    most = 200 if policy.max_takeovers is None else policy.max_takeovers
    kind, refuse = _KINDS.get(trace.effect, 2), int(policy.on_takeover == "refuse")
    return (kind, refuse, most, int(trace.forgetful), len(actors), *told)


def _authors(lines: Sequence[Line]) -> list[tuple[object, bool]]:
    """By line, who wrote it, and whether that is a delivery: the nonce of its claim, or the line alone."""
    claimed: dict[object, str] = {}
    found: list[tuple[object, bool]] = []
    for line in lines:
        owner, is_running = line.new.owner, line.new.status is Status.IN_PROGRESS
        if is_running and owner and owner not in claimed.values():
            claimed[line.actor] = owner
        is_mine = claimed.get(line.actor) == owner or (line.actor in claimed and line.new.status is Status.UNKNOWN)
        found.append((claimed[line.actor], True) if is_mine else (line.new.revision, False))
    return found


def _revisions(lines: Sequence[Line], authors: list[Any], actors: list[Any]) -> dict[str | None, int]:
    found: dict[str | None, int] = {None: 0}
    written = dict.fromkeys(actors, 0)
    for line, author in zip(lines, authors, strict=True):
        if line.new.revision not in found:
            written[author] += 1
            at = actors.index(author) + 1
            found[line.new.revision] = at * 100 + written[author] if author[1] else at
    return found


def _step(record: Record) -> int:
    states = [from_plain(each) for each in record.steps.values()]
    return 0 if not states else 1 if any(isinstance(each, Begun) for each in states) else 2


def _lapses(record: Record) -> bool:
    return record.status is Status.IN_PROGRESS and not record.lease_until


def _answer(line: Line, revisions: Mapping[str | None, int]) -> tuple[int, int]:
    """What is stored, by its revision, and whether its time is over."""
    if not isinstance(line.answer, Record):
        return 0, 0
    record = line.answer
    is_running = record.status is Status.IN_PROGRESS
    is_over = record.lease_until + _GRACE <= line.now if is_running else is_forgotten(record, line.now)
    return revisions.get(record.revision, -1), int(is_over)


@dataclass(frozen=True, slots=True)
class Judgement:
    """How many traces and lines of a source were judged, how many differ, and what was not allowed, in words."""

    source: str
    mistake: str
    traces: int
    lines: int
    different: int
    rejected: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "rejected": len(self.rejected)}


@dataclass(frozen=True, slots=True)
class Judge:
    """The specification, made into a program that reads traces, in ``folder``."""

    folder: Path

    def judge(self, source: str, traces: Iterable[Trace], mistake: str = "") -> Judgement:
        """What the specification says of each; equal ones are judged once."""
        known: set[int] = set()
        batch: dict[tuple[int, ...], Trace] = {}
        rejected: list[str] = []
        count = lines = 0
        for trace in traces:
            count, lines, small = count + 1, lines + len(trace.lines), numbers(trace)
            if hash(small) not in known:
                known.add(hash(small))
                batch[small] = trace
            if len(batch) == _BATCH:
                rejected += self._rejected(batch)
                batch.clear()
        rejected += self._rejected(batch)
        return Judgement(source, mistake, count, lines, len(known), tuple(rejected))

    def _rejected(self, batch: Mapping[tuple[int, ...], Trace]) -> Iterator[str]:
        if not batch:
            return
        room = sum(len(each.lines) + _ACTORS for each in batch.values())
        given = "\n".join([f"{room} {len(batch)}", *(" ".join(map(str, each)) for each in batch)])
        command = ("./pan", "-n", "-E", "-m1000000", "-w24")
        told = execute(*command, folder=self.folder, given=given)
        if f"judged {len(batch)}\n" not in told or found_in(r"errors: (\d+)", told) != "0":
            raise RuntimeError(f"the checker did not judge {len(batch)} traces: {told[-2000:]}")
        traces = list(batch.values())
        for which, after, promise in re.findall(r"rejected (\d+) after (\d+): ?(.*)", told):
            yield _words(traces[int(which)], int(after), promise)


def _words(trace: Trace, after: int, promise: str) -> str:
    said = [f"{trace.source}: the specification does not allow line {after + 1}{f' ({promise})' if promise else ''}"]
    for number, line in enumerate(trace.lines[: after + 1], 1):
        new, stored = line.new, line.answer
        shown = f"{stored.status} {stored.revision[:8]}" if isinstance(stored, Record) else stored or "nothing"
        has = f"token {new.fencing_token}, takeovers {new.takeovers}, {len(new.steps)} steps"
        asked = f"{line.actor} writes {new.status} {new.revision[:8]} of {new.owner[:8]} ({has})"
        said.append(f"  {number}. {asked} over {(line.expected or 'nothing')[:8]}: {shown}")
    return "\n".join(said)


class _Walk(Explorer):
    """Goes through worlds at random, one after another, and keeps what deliveries were answered."""

    def __init__(self, program: Program, deliveries: int, faults: int, rng: random.Random) -> None:
        super().__init__(program, deliveries, faults)
        self._rng = rng
        self._ways: dict[World, list[tuple[World, Any]]] = {}
        self._last: Any = None

    def walk(self, world: World) -> Iterator[Line]:
        while ways := self._ways_from(world):
            following, heard = self._rng.choice(ways)
            yield from self._lines(world, following, heard)
            world = following

    def _ways_from(self, world: World) -> list[tuple[World, Any]]:
        if world not in self._ways:
            ways = self._ways[world] = []
            self._last = None
            for _, following in self._steps(world):
                ways.append((following, self._last))
                self._last = None
        return self._ways[world]

    def _answered(self, world: World, number: int, history: int, answer: Any) -> World:
        self._last = answer
        return super()._answered(world, number, history, answer)

    def _lines(self, world: World, following: World, answer: Any) -> Iterator[Line]:
        """What was asked by the delivery that moved, if one did and it was a write."""
        for moved, history in enumerate(world.deliveries):
            if history == following.deliveries[moved] or not isinstance(history, int):
                continue
            request = self._request(moved, history)
            if not isinstance(request, Write):
                continue
            stored: Any = self._records[answer] if isinstance(answer, int) else NO_ANSWER
            new = self._records[request.record]
            assert new is not None
            if request.commits and self.program.effect is Effect.TRANSACTION and stored != new:
                stored = NO_ANSWER  # its row was locked, and nobody was told by what
            now = START + world.now + moved * self._deliveries.apart
            yield Line(f"delivery {moved}", new, request.expected, stored, now)


def can_be_followed(program: Program) -> bool:
    """Whether a program's requests are all that a trace needs, and say what the specification speaks of."""
    looks = program.effect is Effect.TRANSACTION and Fault.FORGOTTEN in program.besides
    is_open = program.effect is Effect.WINDOWED_STEP or program.policy.on_outage == "run"
    # With a deadline the explorer's deliveries begin when their first request is answered, which has left before.
    return not (looks or is_open or program.policy.deadline or OF_PUBLISHERS.intersection(program.besides))


def walk(number: int, seed: int, scopes: Iterable[tuple[Program, int, int]]) -> Iterator[Trace]:
    """So many random walks of the explorer's deliveries within each scope: a program, its deliveries and faults."""
    for program, deliveries, faults in scopes:
        if not can_be_followed(program):
            continue
        explorer = _Walk(program, deliveries, faults, random.Random(f"{seed} {program.name}"))
        with explorer.numbered():
            for _ in range(number):
                lines = tuple(explorer.walk(explorer.start()))
                yield Trace(program.name, program.policy, program.effect, lines, Fault.FORGOTTEN in program.besides)


def attack(number: int, seed: int, target: str) -> Iterator[Trace]:
    """So many operations of the faults campaign, on a real store."""
    with start(target) as url:
        store = next(opened(target, url))
        for each in range(number):
            plan, notes = at_random(target, seed, each), list[Line]()
            with mock.patch.object(OneDelivery, "swap", note_requests(OneDelivery.swap, notes.append)):
                Task(store, plan).attack()
            source = f"{target}, plan {each} of seed {seed}"
            yield Trace(source, plan.promise.policy, Effect.BARE, pair(notes))


def trace_processes(
    start: Callable[[], object], read_terms: Callable[[Record], tuple[Policy, Effect]], mistake: str = ""
) -> Iterator[Trace]:
    """What processes ask of each record that ``start`` starts and waits for; a record tells how its task is run."""
    with recorder.record(mistake) as folder:
        start()
        for lines in recorder.read(folder):
            yield Trace(lines[0].new.key, *read_terms(lines[0].new), lines)


Source = tuple[str, Iterable[Trace], str]
"""Its name, its traces, and its mistake if any."""


def processes(seed: int, *, quick: bool) -> Iterator[Source]:
    """Crash sweeps, soaks and recovery runs, and the sweep with mistakes."""
    yield from map(_sweep, ("sqlite",) if quick else ("sqlite", "dynamodb", "redis"))
    yield _soak(0.25 if quick else 1, seed, "redis", "redis")
    if not quick:
        yield _soak(1, seed, "dynamodb", "sqs")
        parts = [replace(each, rounds=4) for each in recovery.plan()[:3]]
        start = partial(recovery.run, seed, print, parts)
        yield "recovery", trace_processes(start, lambda record: (recovery.POLICY, Effect.BARE)), ""
    yield from (_sweep("sqlite", each) for each in ("takeover forgotten", "refuse treated as rerun"))


def _sweep(store: str, mistake: str = "") -> Source:
    kinds = {*sweep.BARE, *sweep.kinds_of(store)} - {sweep.Kind.TRANSACTION, sweep.Kind.TOKEN_ALONE}

    def read_terms(record: Record) -> tuple[Policy, Effect]:
        kind = sweep.Kind(record.key.partition(":")[0])
        return kind.promise.policy, Effect.BARE if kind.is_bare else Effect[kind.name]

    start = partial(sweep.sweep, "brief", sorted(kinds), target=store)
    return f"sweep, {store}", trace_processes(start, read_terms, mistake), mistake


def _soak(minutes: float, seed: int, store: str, broker: str) -> Source:
    start = partial(soak.run, minutes, seed, print, store=store, broker=broker)
    return f"soak, {store}", trace_processes(start, lambda record: (soak.POLICIES[record.task], Effect.BARE)), ""


def _given_back(right: Any, claimed: Claim, transition: Any) -> Any:
    return claimed.uninterrupted(claimed._end, transition)


UNSEEN = Mutant("a lost claim is given back", "no rule of the explorer", Claim, "_give_back", _given_back)
"""As it once was, and only traces showed it: where a store has forgotten the successor's record, that one loses."""

_SEEN = ("owner is the task id", "takeover forgotten", "fencing token reset on a claim", "refuse treated as rerun")
CONTROLS = (UNSEEN, *(each for each in MUTANTS if each.name in _SEEN))
"""Of whose traces some must be rejected."""


def run(
    scopes: Sequence[tuple[Program, int, int]],
    seed: int,
    walks: int,
    stores: Mapping[str, int],
    processes: Iterable[Source],
) -> Iterator[Judgement]:
    """Judge the explorer's walks, operations under faults and what processes do, and then those of each control."""
    refused = [(each, 2, 1) for each, *_ in scopes if each.effect is Effect.REFUSED_STEP and not each.besides]
    with checker(READING, ["-O1", "-DSAFETY", "-DNOREDUCE", "-DCOLLAPSE", "-DVECTORSZ=8192"]) as folder:
        judge = Judge(folder)
        yield judge.judge("explorer", walk(walks, seed, scopes))
        for store, number in stores.items():
            yield judge.judge(f"faults, {store}", attack(number, seed, store))
        for each in processes:
            yield judge.judge(*each)
        for mutant in CONTROLS:
            with mutant.applied():
                traces = walk(50, seed, refused) if mutant is UNSEEN else attack(150, seed, "memory")
                yield judge.judge("explorer" if mutant is UNSEEN else "faults, memory", traces, mutant.name)
