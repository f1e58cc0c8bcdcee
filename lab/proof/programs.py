"""What deliveries do under the explorer, and what the world may do to them."""

from dataclasses import dataclass
from enum import StrEnum

from celery_idempotent.protocol.policy import Policy


class Declined(Exception):
    """What a body raises where a program says so."""


class Fault(StrEnum):
    """What the world may do to a delivery's request, to a delivery, or to its record."""

    KILLED_BEFORE_SEND = "killed before send"
    KILLED_IN_FLIGHT = "killed, request in flight"
    KILLED_AFTER_EFFECT = "killed after effect"
    REPLY_LOST = "reply lost"
    REQUEST_LOST = "request lost"
    REQUEST_LATE = "request in flight, sender goes on"
    CUT_OFF = "store out of reach from here on"
    CALL_IN_FLIGHT = "killed, call in flight"
    CALL_LATE = "call timed out and lands later"
    STRUCK_BEFORE_SEND = "exception strikes before send"
    STRUCK_IN_FLIGHT = "exception strikes, request in flight"
    STRUCK_AFTER_WRITE = "exception strikes, reply on the way"
    FORGOTTEN = "store forgets what is not finished"
    UNREADABLE = "answer cannot be read"
    PUBLISHED = "a publisher records the operation"
    CONFIRMED = "its message is sent, and it confirms that"
    WITHDRAWN = "its message is refused, and it takes that back"


_OF_CALLS = {Fault.CALL_IN_FLIGHT, Fault.CALL_LATE}

_STRIKES = {Fault.STRUCK_BEFORE_SEND: "before", Fault.STRUCK_IN_FLIGHT: "amid", Fault.STRUCK_AFTER_WRITE: "after"}
"""By a soft time limit, say, as an exception that is raised wherever the thread is; it is not the store's own."""

_EARLY, _LATE = tuple(_STRIKES)[:2], tuple(_STRIKES)[1:]

OF_PUBLISHERS = {Fault.PUBLISHED, Fault.CONFIRMED, Fault.WITHDRAWN}
"""What changes the record, and is no delivery's request."""

_ORDINARY = set(Fault) - {*_STRIKES, *OF_PUBLISHERS, Fault.FORGOTTEN, Fault.UNREADABLE}


class Effect(StrEnum):
    """How a body has its effect."""

    BARE = "bare"
    STEP = "step"
    REFUSED_STEP = "step under refuse"
    KEYED_STEP = "step, receiver honours its key"
    WINDOWED_STEP = "step under refuse, receiver honours its key"
    FENCED_STEP = "fenced step"
    TOKEN_ALONE = "fencing token alone"
    PROBE_ALONE = "probe without a fence"
    COMMIT = "commit"
    TRANSACTION = "transaction"


_REMEMBERED = {Effect.COMMIT, Effect.TRANSACTION, Effect.KEYED_STEP, Effect.WINDOWED_STEP, Effect.FENCED_STEP}
"""Where a second effect is a broken promise even if the store forgot what was not finished: the receiver remembers."""

_ONCE = {*_REMEMBERED, Effect.REFUSED_STEP}
"""Where a second effect is a broken promise, whatever the policy says."""

ALONE = (Effect.TOKEN_ALONE, Effect.PROBE_ALONE)
"""Half of what a fenced step does, which is not enough."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every delivery does, and what may happen to it.

    Its body may renew its lease before its effect, as the heartbeat does, raise after it, or ask whether it may go on.
    Under a policy with a deadline the local clock goes as the store's does, so that it can be late. Each thing that may
    happen ``besides`` the ordinary faults does so as often as it is named. Of all deliveries of one machine each can
    tell whether the process of another is gone. With other arguments every other delivery uses the key for others, and
    only the first of them raises, if any does. A quick look takes so many ``deliveries``.
    """

    policy: Policy
    renews: bool = False
    raises: type[Exception] | None = None
    effect: Effect = Effect.BARE
    claims_once: bool | None = None
    besides: tuple[Fault, ...] = ()
    asks: bool = False
    one_message: bool = False
    one_machine: bool = False
    other_arguments: bool = False
    deliveries: int = 2

    @property
    def at_most_once(self) -> bool:
        """Whether a second effect breaks a rule."""
        if self.claims_once is not None:
            return self.claims_once
        if Fault.FORGOTTEN in self.besides:
            return self.effect in _REMEMBERED
        return self.policy.on_takeover == "refuse" or self.effect in _ONCE

    @property
    def faults(self) -> set[Fault]:
        return self.ordinary_faults | set(self.besides)

    @property
    def ordinary_faults(self) -> set[Fault]:
        if self.policy.on_outage == "run":
            return set()  # each of them may be an outage, and its body is not protected
        match self.effect:
            case Effect.BARE:
                return _ORDINARY - _OF_CALLS
            case Effect.COMMIT | Effect.TRANSACTION:
                return _ORDINARY - _OF_CALLS - {Fault.KILLED_AFTER_EFFECT}
            case _:
                return _ORDINARY

    @property
    def few_faults(self) -> int:
        """How many faults a quick look takes: fewer where each delivery does more, or more may happen to it."""
        if not self.ordinary_faults:
            return 0
        is_small = self.effect in {Effect.BARE, Effect.COMMIT} and not self.renews
        if self.besides:
            return 1 if is_small else 0
        return 2 if self.deliveries == 2 and (is_small or self.effect is Effect.TRANSACTION) else 1

    @property
    def has_outcome(self) -> bool:
        """Whether what the body does is recorded: a result, or a failure that counts as one."""
        policy = self.policy
        return self.raises is None or policy.on_takeover == "refuse" or self.raises in policy.remember

    @property
    def name(self) -> str:
        parts: list[str] = [self.policy.on_takeover]
        parts += [] if self.policy.max_takeovers == Policy.max_takeovers else [f"{self.policy.max_takeovers} takeover"]
        parts += [] if self.effect is Effect.BARE else [self.effect]
        struck = " and ".join(_STRIKES[each] for each in self.besides if each in _STRIKES)
        said = {
            "renewing": self.renews,
            "with a deadline": self.policy.deadline,
            "asking": self.asks,
            "failing": self.raises,
            "remembering": self.policy.remember,
            "forgetful store": Fault.FORGOTTEN in self.besides,
            f"struck {struck}": struck,
            "one machine": self.one_machine,
            "unreadable": Fault.UNREADABLE in self.besides,
            "published once": Fault.PUBLISHED in self.besides,
            "confirmed": Fault.CONFIRMED in self.besides,
            "other arguments": self.other_arguments,
        }
        parts += [words for words, is_so in said.items() if is_so]
        return ", ".join(parts)


_RERUN, _REFUSE = Policy(), Policy(on_takeover="refuse")
_LATE_RERUN, _LATE_REFUSE = Policy(deadline=60), Policy(deadline=60, on_takeover="refuse")
_POISON, _REMEMBERING = Policy(max_takeovers=1), Policy(remember=(Declined,))
_FORGOTTEN = (Fault.FORGOTTEN,)
_PUBLISHED = (Fault.PUBLISHED, Fault.PUBLISHED, Fault.WITHDRAWN)
_CONFIRMED = (Fault.PUBLISHED, Fault.CONFIRMED)
_TRANSACTIONAL = (Effect.COMMIT, Effect.TRANSACTION)

PROGRAMS = (
    *(Program(policy, raises=raises) for policy in (_REFUSE, _RERUN) for raises in (None, Declined)),
    Program(_REMEMBERING, raises=Declined),
    *(Program(policy, renews=True) for policy in (_RERUN, _REFUSE)),
    *(Program(_RERUN, effect=effect) for effect in Effect if effect not in {Effect.BARE, *ALONE}),
    *(Program(_RERUN, effect=effect, raises=Declined) for effect in (Effect.STEP, Effect.REFUSED_STEP)),
    Program(_REMEMBERING, effect=Effect.STEP, raises=Declined),
    # A body that never ends is not run for ever.
    Program(_POISON, deliveries=3),
    # A body that is late asks before its effect, after it, or in a step that it then records all the same.
    *(Program(policy, renews=True) for policy in (_LATE_RERUN, _LATE_REFUSE)),
    Program(_LATE_REFUSE, asks=True),
    Program(Policy(deadline=60, max_takeovers=1), asks=True, deliveries=3),
    *(Program(_LATE_RERUN, effect=effect) for effect in (Effect.REFUSED_STEP, Effect.COMMIT)),
    # A store that forgets.
    *(Program(policy, besides=_FORGOTTEN) for policy in (_REFUSE, _RERUN)),
    Program(_RERUN, raises=Declined, besides=_FORGOTTEN),
    Program(_RERUN, renews=True, besides=_FORGOTTEN),
    *(
        Program(_RERUN, effect=effect, besides=_FORGOTTEN)
        for effect in (Effect.REFUSED_STEP, Effect.KEYED_STEP, Effect.FENCED_STEP, *_TRANSACTIONAL)
    ),
    # Somebody else's exceptions in a write.
    *(Program(_RERUN, besides=strikes) for strikes in (_EARLY, _LATE)),
    Program(_REFUSE, besides=_EARLY),
    Program(_REFUSE, raises=Declined, besides=_LATE),
    *(Program(_RERUN, effect=effect, besides=_LATE) for effect in (Effect.REFUSED_STEP, *_TRANSACTIONAL)),
    # Processes that are provably gone.
    *(Program(policy, one_machine=True) for policy in (_RERUN, _REFUSE)),
    Program(_POISON, one_machine=True, deliveries=3),
    Program(_RERUN, effect=Effect.COMMIT, one_machine=True),
    # Publishers record the operation at any time, before their messages and between attempts, and confirm it at any
    # later one or never, or take it back.
    *(Program(policy, besides=said) for said in (_PUBLISHED, _CONFIRMED) for policy in (_RERUN, _REFUSE)),
    Program(_RERUN, raises=Declined, besides=_PUBLISHED),
    *(Program(_RERUN, effect=Effect.STEP, raises=Declined, besides=said) for said in (_PUBLISHED, _CONFIRMED)),
    # One key for two kinds of arguments: the second may have it once nothing binds the first, and has its own outcome.
    Program(_RERUN, other_arguments=True, raises=Declined),
    Program(_RERUN, other_arguments=True, besides=_FORGOTTEN),
    *(
        Program(_RERUN, other_arguments=True, raises=Declined, effect=effect)
        for effect in (Effect.STEP, Effect.REFUSED_STEP)
    ),
    # An answer that cannot be read is no outage.
    Program(Policy(on_takeover="refuse", on_outage="run"), besides=(Fault.UNREADABLE,)),
)
"""What the explorer runs: both promises, with and without renewals, with results and with failures, every way to have
an effect, and every kind of trouble that comes from around a delivery."""

NOT_ENOUGH = tuple(Program(Policy(), effect=effect, claims_once=True) for effect in ALONE)
"""What is often taken for enough: the explorer shows how it is not."""
