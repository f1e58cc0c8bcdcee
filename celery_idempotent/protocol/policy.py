"""The policy: the one option of an idempotent task, checked where it is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from inspect import isclass
from math import inf, log2
from typing import Literal, get_args

from celery_idempotent.errors import LeaseLost, PolicyError, SafeToRetry, StoreUnavailable
from celery_idempotent.protocol.effects import (
    Duration,
    Effect,
    OnTakeover,
    check_effects,
    in_words,
    is_duration,
    milliseconds,
    promise,
)
from celery_idempotent.protocol.keys import WHOLE_CALL, Selector, Selectors, Spec

OnConflict = Literal["retry", "raise", "skip"]
OnOutage = Literal["retry", "run"]
Publish = Literal["always", "once"]
Mode = Literal["enforce", "observe", "off"]

MAX_KEY_BYTES = 2048
"""DynamoDB's limit for a partition key value (Developer Guide, "Quotas": 2048 bytes)."""

_KEY_GENERATION = 1
"""Of the form of keys: another form has another number, so that no old key is taken for a new one."""

MIN_LEASE = 0.5
"""Seconds. A shorter lease is over before a heartbeat at a third of it can be answered."""

_MIN_DELAY_MS = 50
"""A store that refuses at once must not be asked in a hot loop."""

_MAX_DELAY_MS = 60_000
"""Between two tries of a delivery, unless ``backoff`` is longer: somebody waits for what has ended or come back."""


def _in_ms(option: str) -> "cached_property[int]":
    """The duration ``option`` of a policy, in milliseconds."""
    return cached_property(lambda policy: milliseconds(getattr(policy, option)))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one task is made idempotent; a value that cannot work is refused where it is written.

    Durations are seconds or :class:`datetime.timedelta`.

    Args:
        key: What identifies the intended effect: an argument's name (``"order_id"``), a path into one (``"order.id"``),
            a tuple of these, or a function with the task's own signature. If it, or a part of it, is missing or null,
            the call raises :exc:`~celery_idempotent.errors.KeyMissing` and nothing runs. Default: all arguments, so two
            equal calls within ``retain`` are one operation. With this default each tick of beat is an operation of its
            own. (Celery's own beat marks its ticks since 5.7; before, use :mod:`celery_idempotent.beat`.)
        scope: Namespace of the key. Set it to rename the task later, to share keys between tasks, or, as in
            ``"charge:2"``, to make every operation new. Default: the task's name.
        fingerprint: What must be equal under one key, in the same forms as ``key``; None compares nothing. Null is a
            value like any other. Default: all arguments, so after you add a parameter, duplicates of older calls raise
            :exc:`~celery_idempotent.errors.KeyReused`.
        label: A name for people, such as the order number, in the same forms as ``key``; parts are joined by a slash.
            The first call's label is kept, logged and shown **in clear**, cut at 255 characters, and can be searched
            for. It identifies nothing: a call without one runs. Default: none, so records show only a hash.
        lease: How long a claim lasts unless it is renewed, in seconds. A heartbeat renews it every third of a lease, so
            the lease bounds how long recovery takes, not how long a task may run.
        deadline: The longest that a body may run, in seconds from its claim. After it the lease is no longer renewed,
            so another delivery may take over; the signal ``deadline_exceeded`` is sent; and ``attempt.ensure_owned()``
            and every new step raise :exc:`~celery_idempotent.errors.DeadlineExceeded`. A body that calls none of these
            is not stopped. If it ends late and nobody has taken over, it still completes. Default: no limit.
        retain: How long an outcome is replayed, in seconds from its recording. Make it longer than any redelivery can
            take: a duplicate that comes later runs again. 0 goes with ``publish="once"``: one message until the body
            has ended, and then another.
        on_conflict: What to do while another delivery runs the operation: ``"retry"`` later, which does not count
            against ``max_retries``; ``"raise"`` :exc:`~celery_idempotent.errors.InFlight`; or ``"skip"`` (Celery's
            ``Ignore``). A redelivery of the running message itself always retries, as dropping it would lose the task
            if its first worker dies; so does what something follows, such as a member of a chord or chain.
        backoff: The shortest delay after a conflict, in seconds. Delays grow with the time that the other body has
            been running, so a delivery asks about once per doubling of it. After an outage ``backoff`` bounds the
            first delay, and the bound doubles each time. No delay is longer than 60 s, or ``backoff`` where that is
            longer. All are random within their bounds
            (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
        on_takeover: What to do if an attempt never ended: ``"rerun"`` (at least once), or ``"refuse"`` (at most once:
            the operation ends UNKNOWN, and a person resolves it). Under ``"refuse"`` every exception of the body is a
            final outcome, except :exc:`~celery_idempotent.errors.SafeToRetry` and Celery's ``Retry``, which
            ``autoretry_for`` raises, too.
        remember: Exception types that are a final outcome: recorded and replayed. Every other exception releases the
            claim, and the next delivery runs. Types that steer a delivery are refused here: Celery's ``Retry``,
            ``Ignore`` and ``Reject``, ``SafeToRetry``, ``LeaseLost``, ``StoreUnavailable``, and those that end a
            process.
        max_takeovers: How many takeovers in a row may happen before the operation is UNKNOWN and a person resolves it,
            so that a body which kills its worker does not loop. None: no limit.
        on_outage: What to do if the store does not answer a claim: ``"retry"`` later and run nothing, or ``"run"``
            unprotected. If the answer cannot be read, such as a record of a newer version, the body never runs.
        publish: ``"always"``, or ``"once"``: a call whose operation is queued, running or finished is not published
            again. Its caller gets the first call's result, at once if there is an outcome. It costs two more requests
            for a call that is sent, one for any other, and one for its claim. In doubt the message is sent.
        mode: ``"enforce"``; ``"observe"`` runs everything and reports what it would have suppressed; ``"off"`` does
            nothing.
        private: Record and log neither the result nor the text of an exception, such as one with a card number: only
            its type. Every replay returns None, also to a chain or chord that goes on from a duplicate, or raises
            :exc:`~celery_idempotent.errors.ReplayedFailure` with the type and no message. Whoever waits for the first
            delivery gets its value; Celery still logs and stores what that has raised. Results of steps are always
            kept.
        effects: What the body does, by name: :class:`~celery_idempotent.Keyed` and its like. If any are declared, a
            step of another name is an error, so that ``guarantee()`` tells all of it.

    Raises:
        PolicyError: A value cannot work; the message says which and what to write instead.
    """

    key: Spec = field(default=WHOLE_CALL, kw_only=False)
    scope: str | None = None
    fingerprint: Spec | None = WHOLE_CALL
    label: Spec | None = None
    lease: Duration = 60
    deadline: Duration | None = None
    retain: Duration = timedelta(days=7)
    on_conflict: OnConflict = "retry"
    backoff: Duration = 1
    on_takeover: OnTakeover = "rerun"
    remember: tuple[type[Exception], ...] = ()
    on_outage: OnOutage = "retry"
    max_takeovers: int | None = 5
    publish: Publish = "always"
    mode: Mode = "enforce"
    private: bool = False
    effects: Mapping[str, Effect] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, literal in (
            ("on_conflict", OnConflict),
            ("on_takeover", OnTakeover),
            ("on_outage", OnOutage),
            ("publish", Publish),
            ("mode", Mode),
        ):
            self._require(option, getattr(self, option) in get_args(literal), f"must be one of {get_args(literal)}")
        for option in ("lease", "retain", "backoff"):
            self._require(option, is_duration(getattr(self, option)), "must be seconds or a timedelta, not negative")
        self._require("lease", self.lease_ms >= MIN_LEASE * 1000, f"must be at least {MIN_LEASE} s")
        self._require(
            "deadline",
            self.deadline is None or (is_duration(self.deadline) and self.deadline_ms >= self.lease_ms),
            "must be None, or a duration from the lease, before whose end nobody can take over; for less, set a "
            "shorter lease",
        )
        self._require(
            "retain",
            self.retain_ms > self.lease_ms
            or (not self.retain_ms and self.publish == "once" and self.on_takeover == "rerun"),
            "must be longer than the lease, or 0 with publish='once' and on_takeover='rerun'",
        )
        self._require("backoff", self.backoff_ms > 0, "must be more than 0 s")
        limit = self.max_takeovers
        is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
        self._require("max_takeovers", limit is None or is_count, "must be None or from 1")
        self._require(
            "remember",
            isinstance(self.remember, tuple)
            and all(isclass(each) and issubclass(each, BaseException) for each in self.remember),
            "must be a tuple of exception types",
        )
        for each in self.remember:
            for kind, meaning in _NEVER_AN_OUTCOME.items():
                self._require("remember", not issubclass(each, kind), f"{each.__name__} {meaning}; leave it out")
            self._require("remember", issubclass(each, Exception), f"{each.__name__} {_ENDS_ITS_PROCESS}")
        self._require("scope", self.scope is None or _is_scope(self.scope), "must be text of 1 to 1900 bytes")
        self._require("private", isinstance(self.private, bool), "must be True or False")
        check_effects(self.effects)
        self._require("label", self.label != WHOLE_CALL, "must name what to show: all arguments are no name")
        _ = self.selectors

    def __set_name__(self, owner: type, name: str) -> None:
        """Have a Celery task that declares a policy without being idempotent refused when it is bound.

        Celery takes any option, so ``@app.task(idempotent=Policy(...))`` without ``base`` would run unprotected.
        Python tells a value the class that it is put into.
        """
        if hasattr(owner, "on_bound") and not hasattr(owner, "idempotency_policy"):
            owner.on_bound = classmethod(_refuse_without_base)
            owner.__call__ = _refuse_to_run  # type: ignore[method-assign]  # Celery has registered it by then

    def _require(self, option: str, holds: bool, remedy: str) -> None:
        if not holds:
            raise PolicyError(option, repr(getattr(self, option)), remedy)

    @cached_property
    def selectors(self) -> Selectors:
        """What ``key``, ``fingerprint`` and ``label`` select."""
        return Selectors(
            Selector("key", self.key),
            None if self.fingerprint is None else Selector("fingerprint", self.fingerprint, nulls=True),
            None if self.label is None else Selector("label", self.label, nulls=True),
        )

    lease_ms = _in_ms("lease")
    retain_ms = _in_ms("retain")
    backoff_ms = _in_ms("backoff")

    @cached_property
    def deadline_ms(self) -> float:
        """``deadline`` in milliseconds; infinite where there is none."""
        return inf if self.deadline is None else milliseconds(self.deadline)

    @cached_property
    def observed(self) -> "Policy":
        """As it is observed: an operation that observing left UNKNOWN would stop once the policy is enforced.

        Nor is a body told to begin nothing more.
        """
        return replace(self, on_takeover="rerun", max_takeovers=None, deadline=None)

    @property
    def outcomes(self) -> tuple[type[BaseException], ...]:
        """Exceptions that are a final outcome, recorded and replayed; save those that steer, which never are."""
        return self.remember if self.on_takeover == "rerun" else (Exception, *self.remember)

    def conflict_delay_ms(
        self, postponed: int, running_for: int, retry_after: int, *, bounds: Sequence[int], draw: float, grace: int
    ) -> int:
        """How long to wait for another's body, in milliseconds: in proportion to how long it has been running.

        A delivery may ask once for every doubling of that time. As long as it has asked less often, it waits for about
        a quarter of the time, so that it is answered soon after the end; else for about all of it. The rest of the
        lease is no bound while that is renewed, or a short lease would be asked for again and again. Where a renewal is
        overdue, or where it makes little difference, the next try comes right after the lease.

        It was ``postponed`` so often before, and can take over in ``retry_after``, of which ``grace`` is beyond the
        lease. ``bounds`` are further caps; ``draw``, a random number from 0 to 1, keeps a crowd apart.
        """
        age = max(running_for, 2 * self.backoff_ms)
        share = 0.25 if postponed < log2(age / self.backoff_ms) else 1
        longest = min((self._longest_delay_ms, *bounds)) * (1 + draw) / 2
        delay = round(min(max(age * share * (0.75 + draw / 2), self.backoff_ms), longest))
        is_overdue = retry_after - grace < self.lease_ms / 2
        if retry_after < delay and (is_overdue or delay <= 2 * retry_after):
            return retry_after + round(draw * self.backoff_ms)
        return delay

    def outage_delay_ms(self, postponed: int, *, bounds: Sequence[int], draw: float) -> int:
        """How long to wait for a store, in milliseconds: exponential, capped, full jitter.

        ``bounds`` are further caps; ``draw`` is a random number from 0 to 1.
        """
        grown = self.backoff_ms * (1 << min(postponed, 30))
        return max(_MIN_DELAY_MS, round(draw * min(grown, self._longest_delay_ms, *bounds)))

    @property
    def _longest_delay_ms(self) -> int:
        return max(_MAX_DELAY_MS, self.backoff_ms)

    def guarantee(self, task: str) -> str:
        """What is promised of the task called ``task``: a line for it, its key, and a line for each kind of effect."""
        lines = [f"{task}: {_MODES[self.mode]}"]
        if self.mode == "enforce":
            counts = (
                f"an outcome counts for {in_words(self.retain)}"
                if self.retain_ms
                else "once it is done, it may run again"
            )
            lines[0] += f"; {counts}"
            lines += [f"  key: {_ALL_ARGUMENTS if self.key == WHOLE_CALL else self.selectors.key}"]
            lines += [f"  {name}: {promise(effect)}" for name, effect in self.effects.items()]
            lines += [f"  {'anything else in the body' if self.effects else 'the body'}: {_BODY[self.on_takeover]}"]
            if self.deadline is not None:
                lines += [f"  a body that runs for longer than {in_words(self.deadline)}: {_LATE[self.on_takeover]}"]
            if self.private:
                lines += ["  a duplicate returns None, or fails without a text: neither is kept"]
            lines += [f"  when the store does not answer: {_OUTAGE[self.on_outage]}"]
        return "\n".join(lines)

    def scope_of(self, task: str) -> str:
        """What the keys of the task called ``task`` begin with: their scope, and the generation of their form."""
        scope = self.scope or task
        if not _is_scope(scope):
            raise PolicyError("scope", repr(scope), "the task's name is over 1900 bytes; set a shorter scope")
        return f"{scope}:{_KEY_GENERATION}"


def _refuse_without_base(cls: type, app: object) -> None:
    raise PolicyError(
        "idempotent",
        "Policy(...)",
        f"{cls.__name__} would run unprotected, because its base is not an IdempotentTask; write base=IdempotentTask",
    )


_NEVER_AN_OUTCOME: Mapping[type[Exception], str] = {
    SafeToRetry: "says that no effect has begun, so it always gives the claim back",
    LeaseLost: "says that another attempt owns the key, so this one can record nothing",
    StoreUnavailable: "is an outage of the store, after which the delivery is postponed",
}

_ENDS_ITS_PROCESS = (
    "ends a process or a thread, or is the base of what does: replayed, it would end every worker that reads the "
    "record; name types that derive from Exception"
)


def _refuse_to_run(task: object, *args: object, **kwargs: object) -> None:
    _refuse_without_base(type(task), None)


_MODES: Mapping[Mode, str] = {
    "enforce": "calls with the same idempotency key are one operation",
    "observe": "nothing is promised; every delivery runs, and what would have been suppressed is reported",
    "off": "nothing is promised; every delivery runs",
}

_ALL_ARGUMENTS = "ALL ARGUMENTS: two equal calls are one operation, and a new parameter makes every call a new one"

_BODY: Mapping[OnTakeover, str] = {
    "rerun": "exactly once unless a worker dies in it or it raises; then it runs again (at least once)",
    "refuse": "at most once; exactly once unless a worker dies in it, and then the operation ends UNKNOWN",
}

_LATE: Mapping[OnTakeover, str] = {
    "rerun": "begins no further step, and another attempt may take over",
    "refuse": "begins no further step, and unless it ends all the same the operation ends UNKNOWN",
}

_OUTAGE: Mapping[OnOutage, str] = {"retry": "nothing runs; a task is postponed", "run": "the body runs unprotected"}


def _is_scope(value: object) -> bool:
    # Room for ":1:" and 64 hexadecimal digits within MAX_KEY_BYTES.
    return isinstance(value, str) and 1 <= len(value.encode()) <= MAX_KEY_BYTES - 148
