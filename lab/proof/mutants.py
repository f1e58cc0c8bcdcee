"""Broken variants of the production code, and who notices each; one that nobody notices fails the build.

Every mutant is a mistake that somebody made: most are in a published library, some were found in a model of this
protocol. Each is put into the running code in place of one function, which it gets as its first argument.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

from hypothesis import Phase

from celery_idempotent.engine import attempt, claim, delivery
from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.errors import DeadlineExceeded, LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.operation import Ending, Rebase, Wait, Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Call, Doubt
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract
from lab.proof.explorer import Violation, explore
from lab.proof.machine import run_machine
from lab.proof.programs import PROGRAMS, Program
from lab.proof.scripted import ANY
from lab.proof.verdicts import OUTCOMES


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake, and where its like was seen; it takes an attribute's place, and its first argument was there."""

    name: str
    seen_in: str
    owner: Any
    attribute: str
    mistake: Callable[..., Any]

    @contextmanager
    def applied(self) -> Iterator[list[str]]:
        """Within the block the production code has this mistake; gives a list that grows with every call of it."""
        calls: list[str] = []
        right = vars(self.owner).get(self.attribute)
        if right is None:
            raise LookupError(f"{self.name}: {self.owner.__name__}.{self.attribute} is not there to be replaced")

        @wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            calls.append(self.attribute)
            return self.mistake(right, *args, **kwargs)

        with mock.patch.object(self.owner, self.attribute, wrong):
            yield calls


MUTANTS: list[Mutant] = []

Mistake = Callable[..., Any]


def _mutant(name: str, seen_in: str, owner: Any, attribute: str) -> Callable[[Mistake], Mistake]:
    def register(mistake: Mistake) -> Mistake:
        MUTANTS.append(Mutant(name, seen_in, owner, attribute, mistake))
        return mistake

    return register


def _unconditional(name: str, seen_in: str, *kinds: Status) -> None:
    @_mutant(name, seen_in, claim, "_twice")
    def _(right: Mistake, swap: Any, new: Record, expected: str | None) -> Any:
        return right(swap, new, ANY if new.status in kinds and expected is not None else expected)


_unconditional("completion without a condition", "AWS Powertools _update_record", *OUTCOMES)
_unconditional(
    "release without a condition", "AWS Powertools _delete_record, celery-once, celery-singleton", Status.RELEASED
)
_unconditional("renewal without a condition", "celery-redbeat 127", Status.IN_PROGRESS)
_mutant("owner is the task id", "celery-heimdall", claim, "decide")(
    lambda right, *args, **nonces: right(*args, **{**nonces, "owner": "the task id"})
)
_mutant("release on an error under refuse", "AWS Powertools", delivery, "ending")(
    lambda right, error, **policy: Ending.RELEASE
)
_mutant("takeover forgotten", "a model of this protocol", protocol, "_reclaimed")(
    lambda right, seen, claimed: replace(right(seen, claimed), takeovers=0)
)
_mutant("fencing token reset on a claim", "Redisson's fenced lock", protocol, "_reclaimed")(
    lambda right, seen, claimed: replace(right(seen, claimed), fencing_token=claimed.created_at)
)
_mutant("expiry on a live record", "AWS Powertools", protocol, "_claimed")(
    lambda right, operation, now, owner, revision: replace(
        right(operation, now, owner, revision), expires_at=(now + operation.policy.lease_ms) // 1000
    )
)
_mutant("fingerprint ignored", "every peer but Powertools", claim, "decide")(
    lambda right, record, operation, now, **nonces: right(
        record, operation._replace(identity=operation.identity._replace(fingerprint=None)), now, **nonces
    )
)
_mutant("refuse treated as rerun", "forgotten case", claim, "decide")(
    lambda right, record, operation, now, **nonces: right(
        record, operation._replace(policy=replace(operation.policy, on_takeover="rerun")), now, **nonces
    )
)
_mutant("every write believed", "AWS Powertools", claim, "settle")(lambda right, write, stored: Written())
_mutant("refused step begins without a record", "forgotten write", ProtectedAttempt, "_begun")(
    lambda right, self, step, call: self._finished(step, call(step))
)
_mutant("effect key of the attempt, not of the operation", "task ids as idempotency keys", Attempt, "effect_key")(
    lambda right, self, name: claim.effect_key(f"{self.key}{self.number}", name)
)
_mutant("replays answer with None", "celery-heimdall, AWS Powertools 8090", delivery, "outcome_of")(
    lambda right, *args: None
)
_mutant("vanished record written without a condition", "AWS Powertools _update_record", claim, "_twice")(
    lambda right, swap, new, expected: right(
        swap, new, ANY if expected is None and new.status is not Status.IN_PROGRESS else expected
    )
)
_mutant("result of other arguments taken for one's own", "an earlier version", claim, "settle")(
    lambda right, write, stored: right(replace(write, fingerprint=stored.fingerprint) if stored else write, stored)
)
_mutant("declined card keeps its key", "an earlier version", protocol, "is_reused")(
    lambda right, record, identity: protocol.is_of_others(record, identity.fingerprint)
)
_mutant("poison one takeover early", "off by one", protocol, "_is_poison")(
    lambda right, record, policy: right(replace(record, takeovers=record.takeovers + 1), policy)
)
_mutant("struck write given up", "an earlier version", Claim, "uninterrupted")(
    lambda right, self, act, *args: act(*args)
)
_mutant("every try of a completion is another write", "lost nonce", Claim, "_ended")(
    lambda right, self, status, revision, *kept: lambda record: right(self, status, claim.new_nonce(), *kept)(record)
)
_mutant("lease ended without a condition", "huey's flush", delivery, "end_lease")(
    lambda right, store, record, clock: store.swap(protocol.abandoned(record, store.now(), claim.new_nonce()), ANY)
)
_mutant("claim born expired", "an earlier version", Claim, "renew_if_half_over")(lambda right, self: None)


@_mutant("lost replies are not recognised", "redis-py Lock", claim, "_twice")
def _(right: Mistake, swap: Any, new: Record, expected: str | None) -> Any:
    try:
        return swap(new, expected)
    except StoreUnavailable:
        stored = swap(new, expected)
        mine = stored is not None and stored.revision == new.revision
        return replace(stored, revision="unrecognised", owner="?") if mine else stored


@_mutant("stale claim after a vanished record", "UpdateItem's upsert", MemoryStore, "swap")
def _(right: Mistake, self: Any, new: Record, expected: str | None) -> Any:
    stored = self.get(new.key)
    if stored is not None and stored.revision != expected:
        return stored
    self._records[new.key] = new
    return new


@_mutant("check, then act", "huey, moto", MemoryStore, "swap")
def _(right: Mistake, self: Any, new: Record, expected: str | None) -> Any:
    stored = self.get(new.key)
    if (stored.revision if stored else None) != expected:
        return stored
    time.sleep(0.0005)  # what a network round trip between the read and the write does
    self._records[new.key] = new
    return new


@_mutant("final state left by its old owner", "a model of this protocol", claim, "settle")
def _(right: Mistake, write: Record, stored: Record | None) -> Any:
    is_older = stored is not None and stored.owner == write.owner and stored.revision != write.revision
    return Rebase(stored) if is_older and stored else right(write, stored)


@_mutant("own result in place of the winner's", "AWS Powertools", Delivery, "_settled")
def _(right: Mistake, self: Any, claimed: Any, write: Any, event: Any, reason: str) -> Any:
    write()


@_mutant("lost lease reported as success", "AWS Powertools", Delivery, "_settled")
def _(right: Mistake, *args: Any) -> Any:
    try:
        return right(*args)
    except LeaseLost:
        return None


@_mutant("body runs without a claim in an outage", "idempotency-kit", Delivery, "run")
def _(right: Mistake, self: Any, body: Any) -> Any:
    self._policy = replace(self._policy, on_outage="run")
    return right(self, body)


@_mutant("step in doubt is called again", "forgotten case", attempt, "decide_step")
def _(right: Mistake, name: str, seen: Any, **more: Any) -> Any:
    decision = right(name, seen, **more)
    return Call() if isinstance(decision, Doubt) else decision


@_mutant("commit without the record's condition", "AWS Powertools", Claim, "commit")
def _(right: Mistake, self: Any, store: Any, kept: Any, writes: Any) -> Any:
    careless = mock.Mock(swap_with=lambda new, expected, writes: store.swap_with(new, ANY, writes))
    return right(self, careless, kept, writes)


@_mutant("UNKNOWN left by who was not its owner", "forgotten case", claim, "settle")
def _(right: Mistake, write: Record, stored: Record | None) -> Any:
    if stored is not None and stored.status is Status.UNKNOWN and write.status in OUTCOMES:
        return Rebase(stored)
    return right(write, stored)


@_mutant("unreadable answer taken for an outage", "an earlier version", Breaker, "ask")
def _(right: Mistake, self: Any, key: str, asked: Any) -> Any:
    try:
        return right(self, key, asked)
    except StoreMisconfigured as error:
        raise StoreUnavailable("world", "claim", str(error)) from error


@_mutant("every process taken for gone", "a pid that was given again", Delivery, "_decision")
def _(right: Mistake, self: Any, operation: Any) -> Any:
    while isinstance(decision := right(self, operation), Wait) and decision.record.process:
        claim.end_lease(self._store, decision.record, self._clock)
    return decision


@_mutant("late outcome thrown away", "forgotten case", Claim, "complete")
def _(right: Mistake, self: Any, *outcome: Any) -> Any:
    if self.is_late():
        raise DeadlineExceeded(self.key, self.fencing_token)
    return right(self, *outcome)


def judge(mutant: Mutant) -> tuple[str, str]:
    """Who notices it, of explorer, store contract and property machine, and by what; both are empty if nobody does."""
    for by, look in _LOOKS:
        with mutant.applied() as calls:
            evidence = look()
        if evidence and not calls:
            raise LookupError(f"{mutant.name}: {by} tells {evidence}, and never called {mutant.attribute}")
        if evidence:
            return by, evidence
    return "", ""


def judge_by_number(number: int) -> dict[str, str]:
    """The same in words: what a mutant replaces cannot be sent to another process."""
    mutant = MUTANTS[number]
    by, evidence = judge(mutant)
    return {"name": mutant.name, "seen in": mutant.seen_in, "by": by, "evidence": evidence}


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


def _properties() -> str:
    try:
        run_machine(MemoryStore, examples=300, phases=[Phase.generate])
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - whatever the mistake leads to
        return f"{type(error).__name__} against the oracle"
    return ""


_LOOKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("explorer", lambda: _explored((each, 0) for each in PROGRAMS if each.few_faults or not each.ordinary_faults)),
    ("contract", _contract),
    ("explorer", lambda: _explored((each, each.few_faults) for each in PROGRAMS if each.few_faults > 1)),
    ("properties", _properties),
    ("explorer", lambda: _explored((each, each.few_faults) for each in PROGRAMS if each.few_faults == 0)),
    ("explorer", lambda: _explored((each, each.few_faults) for each in PROGRAMS if each.few_faults == 1)),
)
