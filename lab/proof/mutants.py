"""Broken variants of the production code, and who notices each; one that nobody notices fails the build.

Every mutant is a mistake that somebody made: most are in a published library, some were found in a model of
this protocol. Each is put into the running code by replacing one function.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

from hypothesis import Phase

from celery_idempotent.engine import attempt, claim, delivery
from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.engine.events import EventName
from celery_idempotent.errors import DeadlineExceeded, LeaseLost, OutcomeUnknown, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration import headers
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol import steps
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Ending, Lost, Operation, Rebase, Superseded, Vanished, Wait, Written
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Call, Doubt, Step, Terms
from celery_idempotent.protocol.steps import Finished as StepFinished
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract
from lab.proof.explorer import Violation, explore
from lab.proof.machine import run_machine
from lab.proof.programs import PROGRAMS, Program
from lab.proof.scripted import ANY

__all__ = ["MUTANTS", "Mutant", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Args:
        name: What is broken.
        seen_in: Where this, or its like, was seen.
        replacements: By owner and attribute, the function that takes its place.
    """

    name: str
    seen_in: str
    replacements: tuple[tuple[Any, str, Any], ...]

    @contextmanager
    def applied(self) -> Iterator[Counter[str]]:
        """Within the block the production code has this mistake.

        Returns:
            By attribute, how often its replacement was called.

        Raises:
            LookupError: An owner has no such attribute, or it is the replacement itself: nothing would be broken.
        """
        calls = Counter[str]()
        with ExitStack() as stack:
            for owner, attribute, replacement in self.replacements:
                if vars(owner).get(attribute, replacement) is replacement:
                    raise LookupError(f"{self.name}: {owner.__name__}.{attribute} is not there to be replaced")
                stack.enter_context(mock.patch.object(owner, attribute, _counting(replacement, attribute, calls)))
            yield calls

    @property
    def attributes(self) -> set[str]:
        """What it replaces."""
        return {attribute for _, attribute, _ in self.replacements}


def _counting(replacement: Callable[..., Any], attribute: str, calls: Counter[str]) -> Callable[..., Any]:
    @wraps(replacement)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[attribute] += 1
        return replacement(*args, **kwargs)

    return counted


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


def _owner_is_task(*args: Any, owner: str, revision: str) -> Any:
    return _decide(*args, owner="the task id", revision=revision)


def _always_release(error: BaseException, **policy: Any) -> Ending:
    return Ending.RELEASE


def _takeover_forgotten(seen: Record, claimed: Record) -> Record:
    return replace(_reclaimed(seen, claimed), takeovers=0)


def _takeovers_never_reset(seen: Record, claimed: Record) -> Record:
    again = _reclaimed(seen, claimed)
    return replace(again, takeovers=max(again.takeovers, seen.takeovers))


def _lease_as_expiry(record: Record, now: int) -> bool:
    return _is_forgotten(record, now) or (record.status is Status.IN_PROGRESS and record.lease_until <= now - 1_000)


def _token_reset(seen: Record, claimed: Record) -> Record:
    return replace(_reclaimed(seen, claimed), fencing_token=claimed.created_at)


def _early(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    in_progress = record is not None and record.status is Status.IN_PROGRESS
    return _decide(record, operation, now + in_progress, **nonces)


def _expiring(operation: Operation, now: int, owner: str, revision: str) -> Record:
    return replace(_claimed(operation, now, owner, revision), expires_at=(now + operation.policy.lease_ms) // 1000)


def _fingerprint_ignored(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    return _decide(record, replace(operation, identity=replace(operation.identity, fingerprint=None)), now, **nonces)


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


def _own_result_anyway(self: Delivery, claimed: Claim, write: Any, event: Any, reason: str) -> None:
    write()


def _loss_ignored(self: Delivery, claimed: Claim, write: Any, event: Any, reason: str) -> Any:
    try:
        return _settled(self, claimed, write, event, reason)
    except LeaseLost:
        return None


def _outage_ignored(self: Delivery, claimed: Claim, write: Any, event: Any, reason: str) -> Any:
    try:
        return _settled(self, claimed, write, event, reason)
    except StoreUnavailable:
        return None


def _rerun_all_the_same(record: Record | None, operation: Operation, now: int, **nonces: str) -> Any:
    return _decide(record, replace(operation, policy=replace(operation.policy, on_takeover="rerun")), now, **nonces)


def _same_revision(record: Record, now: int, lease: int, revision: str) -> Record:
    return _renewed(record, now, lease, record.revision)


def _run_through_an_outage(self: Delivery, body: Any) -> Any:
    self._policy = replace(self._policy, on_outage="run")
    return _run(self, body)


def _any_completion_is_lost(write: Record, stored: Record | None) -> Any:
    settlement = _settle(write, stored)
    return Lost() if isinstance(settlement, Superseded) else settlement


def _renewal_wins_always(write: Record, stored: Record | None) -> Any:
    return Written()


def _replayed_without_looking(codec: Any, policy: Policy, record: Record, **steering: Any) -> Any:
    return None


def _called_at_once(self: ProtectedAttempt, step: Step, call: Any) -> Any:
    return self._finished(step, call(step))


def _doubt_waved_through(name: str, seen: Any, *, terms: Terms, now: int) -> Any:
    decision = _decide_step(name, seen, terms=terms, now=now)
    return Call() if isinstance(decision, Doubt) else decision


def _finished_forgotten(name: str, seen: Any, *, terms: Terms, now: int) -> Any:
    return _decide_step(name, None if isinstance(seen, StepFinished) else seen, terms=terms, now=now)


def _doubt_released(error: BaseException, **policy: Any) -> Ending:
    return _ending(error, **{**policy, "in_doubt": False})


def _doubt_read_off_the_exception(error: BaseException, **policy: Any) -> Ending:
    return _ending(error, **{**policy, "in_doubt": isinstance(error, OutcomeUnknown)})


def _key_of_the_attempt(self: Attempt, name: str) -> str:
    return claim.effect_key(f"{self.key}{self.number}", name)


def _commit_unconditionally(self: Claim, store: Any, kept: Any, writes: Any) -> None:
    class Careless:
        def swap_with(self, new: Record, expected: str | None, writes: Any) -> Record | None:
            stored: Record | None = store.swap_with(new, ANY, writes)
            return stored

    _commit(self, Careless(), kept, writes)


def _believed(self: Claim, revision: str) -> bool:
    return True


def _derived_anew(headers: Any, scope: str, task_id: str) -> None:
    return None


def _rewritten_unconditionally(store: Store, new: Record, expected: str | None) -> Record | None:
    return _swap(store, new, ANY if expected is None and new.status is not Status.IN_PROGRESS else expected)


def _any_outcome_is_ours(write: Record, stored: Record | None) -> Any:
    return _settle(replace(write, fingerprint=stored.fingerprint) if stored else write, stored)


def _bound_by_every_claim(record: Record, identity: Identity) -> bool:
    return protocol.is_of_others(record, identity.fingerprint)


def _bound_by_outcomes_alone(record: Record, identity: Identity) -> bool:
    return _is_reused(replace(record, steps={}), identity)


def _bound_by_nothing_unfinished(record: Record, identity: Identity) -> bool:
    return record.status in _OUTCOMES and _is_reused(record, identity)


def _vanished_given_up(write: Record, stored: Record | None) -> Any:
    settlement = _settle(write, stored)
    return Lost() if isinstance(settlement, Vanished) else settlement


def _unknown_left_by_anybody(write: Record, stored: Record | None) -> Any:
    if stored is not None and stored.status is Status.UNKNOWN and write.status in _OUTCOMES:
        return Rebase(stored)
    return _settle(write, stored)


def _unknown_left_by_any_write(write: Status, stored: Status) -> bool:
    return stored in (Status.IN_PROGRESS, Status.UNKNOWN)


def _unknown_never_left(write: Status, stored: Status) -> bool:
    return stored is Status.IN_PROGRESS


def _never_poison(record: Record, policy: Policy) -> bool:
    return False


def _poison_early(record: Record, policy: Policy) -> bool:
    return _is_poison(replace(record, takeovers=record.takeovers + 1), policy)


def _poison_late(record: Record, policy: Policy) -> bool:
    return _is_poison(replace(record, takeovers=record.takeovers - 1), policy)


def _given_up_when_struck(self: Claim, act: Callable[[], Any]) -> Any:
    return act()


def _ended_anew(self: Claim, status: Status, revision: str, *kept: Any) -> Callable[[Record], Record]:
    return lambda record: _ended(self, status, claim.new_nonce(), *kept)(record)


def _failed_with_steps(record: Record, status: Status, *outcome: Any) -> Record:
    written = _with_outcome(record, status, *outcome)
    return replace(written, steps=record.steps) if status is Status.FAILED else written


def _any_error_excused(self: Delivery, claimed: Claim, error: BaseException) -> Any:
    if claimed.raised_before_effects is not None:
        claimed.raised_before_effects = error
    return _end(self, claimed, error)


@contextmanager
def _excused_after_effects(self: ProtectedAttempt) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        self._claim.raised_before_effects = error
        raise


def _unreadable_is_an_outage(self: Delivery, operation: Operation) -> Any:
    try:
        return _claimed_by(self, operation)
    except StoreMisconfigured as error:
        raise StoreUnavailable("world", "claim", str(error)) from error


def _time_taken_for_granted(self: Claim) -> None:
    pass


def _never_waiting(self: Delivery, operation: Operation) -> Any:
    while isinstance(decision := claim.claim(self._store, operation), Wait) and decision.record.process:
        claim.end_lease(self._store, decision.record, self._clock)
    return decision, self._clock.monotonic()


def _released_for_it(record: Record, now: int, revision: str) -> Record:
    return protocol.released(record, now, revision)


def _ended_anyway(store: Store, record: Record, clock: Any) -> None:
    store.swap(protocol.abandoned(record, store.now(), claim.new_nonce()), ANY)


def _released_when_late(self: Delivery, claimed: Claim, error: BaseException) -> Any:
    if isinstance(error, DeadlineExceeded):
        return self._without_outcome(claimed, error, claimed.release, EventName.RELEASED, "late")
    return _end(self, claimed, error)


def _released(self: Claim) -> Any:
    return self.release()


def _late_outcome_refused(self: Claim, *outcome: Any) -> Any:
    if self.is_late():
        raise DeadlineExceeded(self.key, self.fencing_token)
    return _complete(self, *outcome)


_swap = claim._swap
_complete = Claim.complete
_commit = Claim.commit
_ending = protocol.ending
_decide_step = steps.decide_step
_settled = Delivery._settled
_run = Delivery.run
_decide = protocol.decide
_settle = protocol.settle
_claimed = protocol._claimed
_reclaimed = protocol._reclaimed
_renewed = protocol.renewed
_is_forgotten = protocol.is_forgotten
_is_reused = protocol.is_reused
_is_poison = protocol._is_poison
_with_outcome = protocol.ended
_ended = Claim._ended
_end = Delivery._end
_claimed_by = Delivery._claimed

_OUTCOMES = {Status.COMPLETED, Status.FAILED}

MUTANTS = (
    Mutant(
        "completion without a condition",
        "AWS Powertools _update_record",
        ((claim, "_swap", _write_unconditionally(_OUTCOMES)),),
    ),
    Mutant(
        "release without a condition",
        "AWS Powertools _delete_record, celery-once, celery-singleton",
        ((claim, "_swap", _write_unconditionally({Status.RELEASED})),),
    ),
    Mutant(
        "renewal without a condition",
        "celery-redbeat 127",
        ((claim, "_swap", _write_unconditionally({Status.IN_PROGRESS})),),
    ),
    Mutant("owner is the task id", "celery-heimdall", ((claim, "decide", _owner_is_task),)),
    Mutant("lost replies are not recognised", "redis-py Lock", ((claim, "_swap", _without_recognition),)),
    Mutant("release on an error under refuse", "AWS Powertools", ((delivery, "ending", _always_release),)),
    Mutant("takeover forgotten", "a model of this protocol", ((protocol, "_reclaimed", _takeover_forgotten),)),
    Mutant("takeovers never reset", "forgotten case", ((protocol, "_reclaimed", _takeovers_never_reset),)),
    Mutant(
        "lease as the record's expiry", "redis-py Lock, celery-once", ((protocol, "is_forgotten", _lease_as_expiry),)
    ),
    Mutant("fencing token reset on a claim", "Redisson's fenced lock", ((protocol, "_reclaimed", _token_reset),)),
    Mutant("takeover one millisecond early", "off by one", ((claim, "decide", _early),)),
    Mutant("expiry on a live record", "AWS Powertools", ((protocol, "_claimed", _expiring),)),
    Mutant("fingerprint ignored", "every peer but Powertools", ((claim, "decide", _fingerprint_ignored),)),
    Mutant("stale claim after a vanished record", "UpdateItem's upsert", ((MemoryStore, "swap", _upserting),)),
    Mutant("check, then act", "huey, moto", ((MemoryStore, "swap", _check_then_act),)),
    Mutant("final state left by its old owner", "a model of this protocol", ((claim, "settle", _reviving),)),
    Mutant("own result in place of the winner's", "AWS Powertools", ((Delivery, "_settled", _own_result_anyway),)),
    Mutant("lost lease reported as success", "AWS Powertools", ((Delivery, "_settled", _loss_ignored),)),
    Mutant("unrecorded result reported as success", "idempotency-kit", ((Delivery, "_settled", _outage_ignored),)),
    Mutant("refuse treated as rerun", "forgotten case", ((claim, "decide", _rerun_all_the_same),)),
    Mutant("revision reused by a renewal", "forgotten nonce", ((claim, "renewed", _same_revision),)),
    Mutant("body runs without a claim in an outage", "idempotency-kit", ((Delivery, "run", _run_through_an_outage),)),
    Mutant("winner's result thrown away", "forgotten case", ((claim, "settle", _any_completion_is_lost),)),
    Mutant("every write believed", "AWS Powertools", ((claim, "settle", _renewal_wins_always),)),
    Mutant("refused step begins without a record", "forgotten write", ((ProtectedAttempt, "_begun", _called_at_once),)),
    Mutant("step in doubt is called again", "forgotten case", ((attempt, "decide_step", _doubt_waved_through),)),
    Mutant("finished step is called again", "forgotten case", ((attempt, "decide_step", _finished_forgotten),)),
    Mutant("step in doubt is released", "forgotten case", ((delivery, "ending", _doubt_released),)),
    Mutant(
        "doubt read off the exception", "an earlier version", ((delivery, "ending", _doubt_read_off_the_exception),)
    ),
    Mutant(
        "effect key of the attempt, not of the operation",
        "task ids as idempotency keys",
        ((Attempt, "effect_key", _key_of_the_attempt),),
    ),
    Mutant("commit without the record's condition", "AWS Powertools", ((Claim, "commit", _commit_unconditionally),)),
    Mutant("commit without an answer believed", "forgotten case", ((Claim, "_was_committed", _believed),)),
    Mutant(
        "replays answer with None",
        "celery-heimdall, AWS Powertools 8090",
        ((delivery, "outcome_of", _replayed_without_looking),),
    ),
    Mutant(
        "identity derived anew on a retry",
        "an earlier version",
        ((headers, "identity_in", _derived_anew),),
    ),
    Mutant(
        "vanished record written without a condition",
        "AWS Powertools _update_record",
        ((claim, "_swap", _rewritten_unconditionally),),
    ),
    Mutant("vanished record given up", "an earlier version", ((claim, "settle", _vanished_given_up),)),
    Mutant(
        "result of other arguments taken for one's own",
        "an earlier version",
        ((claim, "settle", _any_outcome_is_ours),),
    ),
    Mutant("declined card keeps its key", "an earlier version", ((protocol, "is_reused", _bound_by_every_claim),)),
    Mutant("steps handed to other arguments", "forgotten case", ((protocol, "is_reused", _bound_by_outcomes_alone),)),
    Mutant(
        "claim taken over with other arguments",
        "forgotten case",
        ((protocol, "is_reused", _bound_by_nothing_unfinished),),
    ),
    Mutant("UNKNOWN left by who was not its owner", "forgotten case", ((claim, "settle", _unknown_left_by_anybody),)),
    Mutant("UNKNOWN left by a renewal", "forgotten case", ((protocol, "_may_follow", _unknown_left_by_any_write),)),
    Mutant("owner's late outcome thrown away", "an earlier version", ((protocol, "_may_follow", _unknown_never_left),)),
    Mutant("poison for ever", "an earlier version", ((protocol, "_is_poison", _never_poison),)),
    Mutant("poison one takeover early", "off by one", ((protocol, "_is_poison", _poison_early),)),
    Mutant("poison one takeover late", "off by one", ((protocol, "_is_poison", _poison_late),)),
    Mutant("struck write given up", "an earlier version", ((Claim, "uninterrupted", _given_up_when_struck),)),
    Mutant("every try of a completion is another write", "lost nonce", ((Claim, "_ended", _ended_anew),)),
    Mutant("steps kept in a failure", "an earlier version", ((claim, "ended", _failed_with_steps),)),
    Mutant("any error excused by before_effects()", "forgotten case", ((Delivery, "_end", _any_error_excused),)),
    Mutant(
        "before_effects() after an effect",
        "forgotten case",
        ((ProtectedAttempt, "before_effects", _excused_after_effects),),
    ),
    Mutant(
        "unreadable answer taken for an outage",
        "an earlier version",
        ((Delivery, "_claimed", _unreadable_is_an_outage),),
    ),
    Mutant("every process taken for gone", "a pid that was given again", ((Delivery, "_asked", _never_waiting),)),
    Mutant("claim of a dead process released", "forgotten case", ((claim, "abandoned", _released_for_it),)),
    Mutant("lease ended without a condition", "huey's flush", ((delivery, "end_lease", _ended_anyway),)),
    Mutant("late body gives its claim back", "forgotten case", ((Delivery, "_end", _released_when_late),)),
    Mutant("late body does not count as a takeover", "forgotten case", ((Claim, "abandon", _released),)),
    Mutant("late outcome thrown away", "forgotten case", ((Claim, "complete", _late_outcome_refused),)),
    Mutant("claim born expired", "an earlier version", ((Claim, "renew_if_half_over", _time_taken_for_granted),)),
)


def judge(mutant: Mutant) -> Verdict:
    """Show ``mutant`` to the explorer, the store contract and the property machine, cheapest first.

    Raises:
        LookupError: Something was noticed that is not of the mutant's making, as its code never ran.
    """
    for by, look in _LOOKS:
        with mutant.applied() as calls:
            evidence = look()
        if evidence and not mutant.attributes <= set(calls):
            raise LookupError(f"{mutant.name}: {by} tells {evidence}, and never called {mutant.attributes}")
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


def _explored(scopes: Iterable[tuple[Program, int]]) -> str:
    for program, faults in scopes:
        try:
            explore(program, deliveries=program.deliveries, faults=faults)
        except Violation as violation:
            return f"{program.name}: {violation.rule} ({len(violation.trace)} steps)"
    return ""


def _shallow() -> str:
    return _explored((each, 0) for each in PROGRAMS if each.few_faults or not each.ordinary_faults)


def _simple() -> str:
    return _explored((each, each.few_faults) for each in PROGRAMS if each.few_faults > 1)


def _elaborate() -> str:
    rest = (each for each in PROGRAMS if each.few_faults < 2)
    return _explored((each, each.few_faults) for each in sorted(rest, key=lambda each: each.few_faults))


def _properties() -> str:
    try:
        run_machine(MemoryStore, examples=300, phases=[Phase.generate])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__} against the oracle"
    return ""


_LOOKS = (
    ("explorer", _shallow),
    ("contract", _contract),
    ("explorer", _simple),
    ("properties", _properties),
    ("explorer", _elaborate),
)
