"""Does the effect of *your* task happen once? Deliver it in every way that a broker and a dying worker can.

The library keeps a claim and an outcome to one. What the body does in between is its author's, and whether
a crash there repeats it depends on the receiver and the policy. So it is tried, and reported as it is.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Literal, get_args

from celery import Task

from celery_idempotent.errors import IdempotencyError, OutcomeUnknown
from celery_idempotent.integration.task.task import IdempotentMixin
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.testing.scenarios import Deliveries, DeliveryResult, Row, rehearse
from celery_idempotent.troubleshooting import with_link

Promise = Literal["exactly once", "at least once", "at most once"]


def assert_effect_once(
    task: Task,
    *args: Any,
    effects: Callable[[], int] | Sized | None = None,
    promise: Promise = "exactly once",
    reset: Callable[[], object] = lambda: None,
    **kwargs: Any,
) -> None:
    """Assert that ``task(*args, **kwargs)`` has its effect once, however it is delivered and wherever it dies.

    The task is executed by Celery's own tracer in this process, on a store in memory: once, twice one after
    the other, twice at the same time, and then with a lost request, a lost reply and the worker's death at
    every write to the store and at both ends of the body; each followed by what a broker does then, and by
    one more duplicate. Every scenario is an operation of its own, with an idempotency key of its own.

    The writes of steps and of a commit are among them, so a step's call is cut off on either side of it. Elsewhere
    within the body no death is tried. What ``attempt.commit()`` writes is kept in the store, where
    ``effects`` can count it: ``app.conf.idempotency_store.committed``. What is done in ``attempt.transaction()``
    is done in the database of the app's own store, which must be an SQL or Django store then, and ``effects`` looks
    there; only the record is kept in memory.

    A worker's death is acted: the store refuses whatever the dead attempt still tries to write. ``finally``
    blocks of the body do run, though.

    Args:
        task: Your task; nothing of it is replaced but what surrounds its body.
        args: Its positional arguments; they are serialised as for a real message.
        effects: What counts the effects so far: a function, or a container whose length is their number. Without it
            every run of the body to its end counts as one, which is right where no receiver knows a repetition.
        promise: What must hold. ``"exactly once"``; ``"at least once"``: repeated only if the worker died or
            lost the store for as long as it tried; ``"at most once"``: missing only then. Without a death,
            all of them mean once.
        reset: Called before every scenario, for receivers that would know the arguments again.
        kwargs: Its keyword arguments.

    Raises:
        AssertionError: The promise does not hold; a table says where, and what to do about it.
        TypeError: ``task`` is not a task, or ``effects`` neither counts nor has a length.
        ValueError: ``promise`` is not one of the three.
    """
    __tracebackhide__ = True
    check_arguments(task, promise)
    with Deliveries.of(task) as deliveries:
        count = _counting(deliveries.results if effects is None else effects)
        rows = rehearse(deliveries, args, kwargs, count, reset)
    if not all(_keeps(row, promise) for row in rows):
        raise AssertionError(_report(deliveries.task, promise, rows, are_runs=effects is None))


def check_arguments(task: Task, promise: Promise) -> None:
    """Refuse what is not a task, or not a promise."""
    if promise not in get_args(Promise):
        raise ValueError(refusal(f"promise={promise!r}: must be one of {get_args(Promise)}"))
    if not isinstance(task, Task):
        raise TypeError(refusal(f"task={task!r}: must be a Celery task; not its function, its signature or its name"))


def refusal(text: str) -> str:
    """What is said against an argument."""
    return with_link(text, "errors#test-argument")


def _counting(effects: Callable[[], int] | Sized) -> Callable[[], int]:
    if isinstance(effects, Sized):
        return effects.__len__
    if callable(effects):
        return effects
    raise TypeError(refusal(f"effects={effects!r}: must be a function that counts, or a container with a length"))


def keeps(effects: int, expected: int, promise: Promise) -> bool:
    """Whether what happened is what was promised of ``expected`` effects."""
    if effects > expected:
        return promise == "at least once"
    return effects == expected or promise == "at most once"


def _keeps(row: Row, promise: Promise) -> bool:
    return keeps(row.effects, 1, promise if row.is_death else "exactly once")


def _report(task: Task, promise: Promise, rows: Sequence[Row], *, are_runs: bool) -> str:
    broken = [row for row in rows if not _keeps(row, promise)]
    width = max(len(row.name) for row in rows)
    lines = [
        f"the effect of {task.name} was promised {promise}; {len(broken)} of {len(rows)} scenarios broke that:",
        "",
        f"  effects  {'scenario':<{width}}  what its deliveries returned",
        *(
            f"{'>' if row in broken else ' '} {row.effects:7}  {row.name:<{width}}  "
            + ", ".join(map(_describe, row.endings))
            for row in rows
        ),
        "",
        *(f"* {each}" for each in (*_advice(task, rows[0], broken), *([_ABOUT_RUNS] if are_runs else []))),
    ]
    return "\n".join(lines)


_ABOUT_RUNS = (
    "Each run of the body to its end was counted as an effect. Where a receiver knows a repetition, as by a key, or a "
    "step is not made again, let effects= count what the receiver has"
)


def _describe(ending: DeliveryResult) -> str:
    if ending.how == "SUCCESS":
        return _short(repr(ending.value))
    if ending.how == "FAILURE":
        is_known = isinstance(ending.value, IdempotencyError)
        return f"raised {type(ending.value).__name__ if is_known else _short(repr(ending.value))}"
    return "postponed" if ending.how == "RETRY" else ending.how.lower()


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _advice(task: Task, single: Row, broken: Sequence[Row]) -> Iterator[str]:
    if single in broken:
        yield (
            f"A single delivery had {single.effects} effects, so nothing else was tried. Let effects= count one "
            "effect of the task, and pass arguments with which its body succeeds"
        )
        if single.endings[-1].how == "FAILURE":
            error = single.endings[-1].value
            yield f"The body raised {type(error).__name__}: {error}"
        return
    if not isinstance(task, IdempotentMixin):
        yield (
            "This is a plain Celery task: nothing keeps its effect to one. Declare it with base=IdempotentTask, "
            "idempotent=Policy(key=...)"
        )
        return
    policy = task.idempotency_policy
    if policy.mode != "enforce":
        yield f"Policy(mode={policy.mode!r}) protects nothing"
        return
    if single.endings[-1].how == "FAILURE":
        yield (
            f"The body raised {type(single.endings[-1].value).__name__}. That gives its claim back, and the next "
            "delivery runs; if it is an outcome, name it in Policy(remember=...)"
        )
        return
    if any(row.endings[-1].how == "DIED" for row in broken):
        yield (
            "A message was lost with its worker. Set task_acks_late and task_reject_on_worker_lost, in the test's app "
            "as in production"
        )
    missing = [row for row in broken if row.effects < 1 and row.endings[-1].how != "DIED"]
    if missing:
        yield _about_missing(policy, missing)
    if any(row.effects > 1 and row.is_death for row in broken):
        yield (
            "A worker that dies after its effect looks like one that died before it, so the body ran again. Give the "
            'receiver a key that every attempt has, attempt.effect_key("...") or step.key in attempt.step(), '
            "so that it recognises the repetition; or commit the effect with its record, by attempt.commit(); or "
            'never have it again, with Policy(on_takeover="refuse") or a step AtMostOnce, and promise="at most once"; '
            'or, if repeating it is harmless, state promise="at least once"'
        )
    if any(row.effects > 1 and not row.is_death for row in broken):
        yield (
            "It was repeated although no worker died. Look for effects outside of the body: before_start, on_success "
            "and signal receivers run for every delivery"
        )


def _about_missing(policy: Policy, missing: Sequence[Row]) -> str:
    if policy.on_takeover == "refuse":
        return (
            'Policy(on_takeover="refuse") does not run again what may have begun, so the effect can be missing. State '
            'promise="at most once"; or let it rerun, and give the receiver attempt.effect_key("...") or step.key'
        )
    if any(isinstance(ended.value, OutcomeUnknown) for row in missing for ended in row.endings):
        return (
            "An at-most-once step is not made again once it has begun, so the effect can be missing. State "
            'promise="at most once"; or declare it Keyed() and give the receiver step.key, if it honours such keys'
        )
    return (
        "The effect is missing although its message was delivered again. Look for what the body does on another attempt"
    )
