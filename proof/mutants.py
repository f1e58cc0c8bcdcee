"""Broken variants of the production code, and who notices each; one that nobody notices fails the build.

Every mutant is a mistake that somebody made: most are in a published library, some were found in a model of
this protocol. Each is put into the running code by replacing one function.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from hypothesis import Phase

from celery_idempotent import attempt, guard, protected, protocol, steps
from celery_idempotent.attempt import Attempt
from celery_idempotent.errors import LeaseLost, StoreUnavailable
from celery_idempotent.guard import Guard
from celery_idempotent.policy import Policy
from celery_idempotent.protected import Protected
from celery_idempotent.protocol import Ending, Lost, Rebase, Request, Superseded, Written
from celery_idempotent.record import Record, Status
from celery_idempotent.steps import Call, Doubt, Step, Terms
from celery_idempotent.steps import Finished as StepFinished
from celery_idempotent.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract
from proof.explorer import ALONE, ANY, Declined, Effect, Program, Violation, explore
from proof.machine import run_machine

__all__ = ["MUTANTS", "NOT_ENOUGH", "PROGRAMS", "Mutant", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Args:
        name: What is broken.
        seen_in: Where this, or its like, was seen.
        replacements: By owner and attribute, what takes its place.
    """

    name: str
    seen_in: str
    replacements: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the production code has this mistake."""
        with ExitStack() as stack:
            for owner, attribute, replacement in self.replacements:
                stack.enter_context(mock.patch.object(owner, attribute, replacement))
            yield


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who noticed a mutant, and by what; nobody if ``by`` is empty."""

    mutant: Mutant
    by: str
    evidence: str


def _write_unconditionally(kinds: set[Status]) -> Callable[..., Any]:
    def swap(store: Store, new: Record, expected: str | None) -> Record | None:
        return _swap(store, new, ANY if new.status in kinds and expected is not None else expected)

    return swap


def _without_recognition(store: Store, new: Record, expected: str | None) -> Record | None:
    try:
        return store.swap(new, expected)
    except StoreUnavailable:
        stored = store.swap(new, expected)
        mine = stored is not None and stored.revision == new.revision
        return replace(stored, revision="unrecognised", owner="?") if mine and stored else stored


def _owner_is_task(operation: Any, on_takeover: Any) -> Request:
    return replace(_request(operation, on_takeover), owner="the task id")


def _always_release(error: BaseException, **policy: Any) -> Ending:
    return Ending.RELEASE


def _takeover_forgotten(seen: Record, request: Request, now: int) -> Record:
    return replace(_reclaimed(seen, request, now), takeovers=0)


def _takeovers_never_reset(seen: Record, request: Request, now: int) -> Record:
    again = _reclaimed(seen, request, now)
    return replace(again, takeovers=max(again.takeovers, seen.takeovers))


def _lease_as_expiry(record: Record, now: int) -> bool:
    return _is_forgotten(record, now) or (record.status is Status.IN_PROGRESS and record.lease_until <= now - 1_000)


def _token_reset(seen: Record, request: Request, now: int) -> Record:
    return replace(_reclaimed(seen, request, now), fencing_token=now)


def _early(record: Record | None, request: Request, now: int) -> Any:
    return _decide(record, replace(request, grace=request.grace - 1), now)


def _expiring(request: Request, now: int, token_after: int = 0) -> Record:
    return replace(_claimed(request, now, token_after), expires_at=(now + request.lease) // 1000)


def _fingerprint_ignored(record: Record | None, request: Request, now: int) -> Any:
    return _decide(record, replace(request, fingerprint=None), now)


def _upserting(self: MemoryStore, new: Record, expected: str | None) -> Record | None:
    stored = self.get(new.key)
    if stored is not None and stored.revision != expected:
        return stored
    self._records[new.key] = new
    return new


def _check_then_act(self: MemoryStore, new: Record, expected: str | None) -> Record | None:
    import time

    stored = self.get(new.key)
    if (stored.revision if stored else None) != expected:
        return stored
    time.sleep(0.0005)  # what a network round trip between the read and the write does
    self._records[new.key] = new
    return new


def _reviving(write: Record, stored: Record | None) -> Any:
    if stored is not None and stored.owner == write.owner and stored.revision != write.revision:
        return Rebase(stored)
    return _settle(write, stored)


def _own_result_anyway(self: Guard, operation: Any, attempt: Attempt, write: Any, event: Any, reason: str) -> None:
    write()


def _loss_ignored(self: Guard, operation: Any, attempt: Attempt, write: Any, event: Any, reason: str) -> Any:
    try:
        return _settled(self, operation, attempt, write, event, reason)
    except LeaseLost:
        return None


def _outage_ignored(self: Guard, operation: Any, attempt: Attempt, write: Any, event: Any, reason: str) -> Any:
    try:
        return _settled(self, operation, attempt, write, event, reason)
    except StoreUnavailable:
        return None


def _rerun_all_the_same(record: Record | None, request: Request, now: int) -> Any:
    return _decide(record, replace(request, on_takeover="rerun"), now)


def _same_revision(record: Record, now: int, lease: int, revision: str) -> Record:
    return _renewed(record, now, lease, record.revision)


def _run_through_an_outage(self: Guard, operation: Any, body: Any) -> Any:
    return _run(self, replace(operation, policy=replace(operation.policy, on_outage="run")), body)


def _any_completion_is_lost(write: Record, stored: Record | None) -> Any:
    settlement = _settle(write, stored)
    return Lost() if isinstance(settlement, Superseded) else settlement


def _renewal_wins_always(write: Record, stored: Record | None) -> Any:
    return Written()


def _replayed_without_looking(self: Guard, record: Record) -> Any:
    return None


def _called_at_once(self: Protected, step: Step, call: Any) -> Any:
    return self._finished(step, call(step))


def _doubt_waved_through(name: str, seen: Any, *, terms: Terms, now: int) -> Any:
    decision = _decide_step(name, seen, terms=terms, now=now)
    return Call() if isinstance(decision, Doubt) else decision


def _finished_forgotten(name: str, seen: Any, *, terms: Terms, now: int) -> Any:
    return _decide_step(name, None if isinstance(seen, StepFinished) else seen, terms=terms, now=now)


def _doubt_released(error: BaseException, **policy: Any) -> Ending:
    return _ending(error, **{**policy, "in_doubt": False})


def _key_of_the_attempt(self: Attempt, name: str) -> str:
    return attempt.effect_key(f"{self.key}{self.number}", name)


def _commit_unconditionally(self: Attempt, store: Any, kept: Any, writes: Any) -> None:
    class Careless:
        def swap_with(self, new: Record, expected: str | None, writes: Any) -> Record | None:
            stored: Record | None = store.swap_with(new, ANY, writes)
            return stored

    _commit(self, Careless(), kept, writes)


def _believed(self: Attempt, revision: str) -> bool:
    return True


_swap = attempt._swap
_commit = Attempt.commit
_ending = protocol.ending
_decide_step = steps.decide_step
_request = guard._request
_settled = Guard._settled
_run = Guard.run
_decide = protocol.decide
_settle = protocol.settle
_claimed = protocol._claimed
_reclaimed = protocol._reclaimed
_renewed = protocol.renewed
_is_forgotten = protocol.is_forgotten

_OUTCOMES = {Status.COMPLETED, Status.FAILED}

MUTANTS = (
    Mutant(
        "completion without a condition",
        "AWS Powertools _update_record",
        ((attempt, "_swap", _write_unconditionally(_OUTCOMES)),),
    ),
    Mutant(
        "release without a condition",
        "AWS Powertools _delete_record, celery-once, celery-singleton",
        ((attempt, "_swap", _write_unconditionally({Status.RELEASED})),),
    ),
    Mutant(
        "renewal without a condition",
        "celery-redbeat 127",
        ((attempt, "_swap", _write_unconditionally({Status.IN_PROGRESS})),),
    ),
    Mutant("owner is the task id", "celery-heimdall", ((guard, "_request", _owner_is_task),)),
    Mutant("lost replies are not recognised", "redis-py Lock", ((attempt, "_swap", _without_recognition),)),
    Mutant("release on an error under refuse", "AWS Powertools", ((protocol, "ending", _always_release),)),
    Mutant("takeover forgotten", "a model of this protocol", ((protocol, "_reclaimed", _takeover_forgotten),)),
    Mutant("takeovers never reset", "forgotten case", ((protocol, "_reclaimed", _takeovers_never_reset),)),
    Mutant(
        "lease as the record's expiry", "redis-py Lock, celery-once", ((protocol, "is_forgotten", _lease_as_expiry),)
    ),
    Mutant("fencing token reset on a claim", "Redisson's fenced lock", ((protocol, "_reclaimed", _token_reset),)),
    Mutant("takeover one millisecond early", "off by one", ((attempt, "decide", _early),)),
    Mutant("expiry on a live record", "AWS Powertools", ((protocol, "_claimed", _expiring),)),
    Mutant("fingerprint ignored", "every peer but Powertools", ((attempt, "decide", _fingerprint_ignored),)),
    Mutant("stale claim after a vanished record", "UpdateItem's upsert", ((MemoryStore, "swap", _upserting),)),
    Mutant("check, then act", "huey, moto", ((MemoryStore, "swap", _check_then_act),)),
    Mutant("final state left by its old owner", "a model of this protocol", ((attempt, "settle", _reviving),)),
    Mutant("own result in place of the winner's", "AWS Powertools", ((Guard, "_settled", _own_result_anyway),)),
    Mutant("lost lease reported as success", "AWS Powertools", ((Guard, "_settled", _loss_ignored),)),
    Mutant("unrecorded result reported as success", "idempotency-kit", ((Guard, "_settled", _outage_ignored),)),
    Mutant("refuse treated as rerun", "forgotten case", ((attempt, "decide", _rerun_all_the_same),)),
    Mutant("revision reused by a renewal", "forgotten nonce", ((attempt, "renewed", _same_revision),)),
    Mutant("body runs without a claim in an outage", "idempotency-kit", ((Guard, "run", _run_through_an_outage),)),
    Mutant("winner's result thrown away", "forgotten case", ((attempt, "settle", _any_completion_is_lost),)),
    Mutant("every write believed", "AWS Powertools", ((attempt, "settle", _renewal_wins_always),)),
    Mutant("refused step begins without a record", "forgotten write", ((Protected, "_begun", _called_at_once),)),
    Mutant("step in doubt is called again", "forgotten case", ((protected, "decide_step", _doubt_waved_through),)),
    Mutant("finished step is called again", "forgotten case", ((protected, "decide_step", _finished_forgotten),)),
    Mutant("step in doubt is released", "forgotten case", ((protocol, "ending", _doubt_released),)),
    Mutant(
        "effect key of the attempt, not of the operation",
        "task ids as idempotency keys",
        ((Attempt, "effect_key", _key_of_the_attempt),),
    ),
    Mutant("commit without the record's condition", "AWS Powertools", ((Attempt, "commit", _commit_unconditionally),)),
    Mutant("commit without an answer believed", "forgotten case", ((Attempt, "_was_committed", _believed),)),
    Mutant(
        "replays answer with None",
        "celery-heimdall, AWS Powertools 8090",
        ((Guard, "_result", _replayed_without_looking),),
    ),
)


def judge(mutant: Mutant) -> Verdict:
    """Show ``mutant`` to the explorer, the store contract and the property machine, cheapest first."""
    for by, look in _LOOKS:
        with mutant.applied():
            evidence = look()
        if evidence:
            return Verdict(mutant, by, evidence)
    return Verdict(mutant, "", "")


class _MemoryContract(StoreContract):
    shared_by_processes = False


def _contract() -> str:
    for name, test in inspect.getmembers(_MemoryContract(), inspect.ismethod):
        if name.startswith("test_"):
            try:
                test(MemoryStore())
            except AssertionError:
                return name
    return ""


def _explorer(programs: Sequence[Program]) -> str:
    for program in programs:
        try:
            explore(program, deliveries=2, faults=program.few_faults)
        except Violation as violation:
            return f"{program.name}: {violation.rule} ({len(violation.trace)} steps)"
    return ""


def _simple() -> str:
    return _explorer([each for each in PROGRAMS if each.few_faults > 1])


def _elaborate() -> str:
    return _explorer([each for each in PROGRAMS if each.few_faults == 1])


def _properties() -> str:
    try:
        run_machine(MemoryStore, examples=300, phases=[Phase.generate])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__} against the oracle"
    return ""


_LOOKS = (
    ("contract", _contract),
    ("explorer", _simple),
    ("properties", _properties),
    ("explorer", _elaborate),
)

PROGRAMS = (
    Program(Policy(on_takeover="refuse")),
    Program(Policy(on_takeover="refuse"), raises=Declined),
    Program(Policy(on_takeover="rerun")),
    Program(Policy(on_takeover="rerun"), raises=Declined),
    Program(Policy(on_takeover="rerun", remember=(Declined,)), raises=Declined),
    Program(Policy(on_takeover="rerun"), renews=True),
    Program(Policy(on_takeover="refuse"), renews=True),
    *(Program(Policy(), effect=effect) for effect in Effect if effect not in {Effect.BARE, *ALONE}),
    Program(Policy(), effect=Effect.STEP, raises=Declined),
    Program(Policy(), effect=Effect.REFUSED_STEP, raises=Declined),
)
"""What the explorer runs: both promises, with and without renewals, with results and with failures, and every way
to have an effect."""

NOT_ENOUGH = tuple(Program(Policy(), effect=effect, claims_once=True) for effect in ALONE)
"""What is often taken for enough: the explorer shows how it is not."""
