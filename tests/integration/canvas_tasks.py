"""Bodies that every kind of app runs, each written to the ledger under the name of its test (`of`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import signature
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_idempotent import Policy
from lab.short_delays import ShortDelays
from tests.support.ledger import record, wait_at

TASKS: list[tuple[Callable[..., Any], Policy | None, dict[str, Any]]] = []
"""Each with the policy that it has where its kind is idempotent, if not the app's, and with its other options."""

QUICK: dict[str, Any] = {"lease": 10, "backoff": 0.2}
Body = Callable[..., Any]


def task(policy: Policy | None = None, **options: Any) -> Callable[[Body], Body]:
    """Register a body."""

    def collect(body: Body) -> Body:
        TASKS.append((body, policy, options))
        return body

    return collect


@task()
def add(self: Any, x: int, y: int, of: str) -> int:
    record("ran", of, task="add", retries=self.request.retries)
    return x + y


@task()
def add_pair(self: Any, item: list[Any]) -> int:
    """As `add`, of one item."""
    x, y, of = item
    record("ran", of, task="add_pair")
    return int(x + y)


@task()
def total(self: Any, numbers: list[int], of: str) -> int:
    record("ran", of, task="total")
    return sum(numbers)


@task()
def say(self: Any, what: Any, of: str) -> Any:
    record("ran", of, task="say", said=what)
    return what


@task()
def hold(self: Any, what: Any, of: str, gate: str) -> Any:
    """As `say`, and wait at a gate before the end."""
    record("ran", of, task="hold", said=what)
    wait_at(gate)
    return what


@task(ShortDelays(key="what", on_conflict="skip", **QUICK))
def hold_or_skip(self: Any, what: str, of: str, gate: str) -> str:
    """As `hold`, with a policy that drops a conflict that nothing waits for."""
    record("ran", of, task="hold_or_skip")
    wait_at(gate)
    return what


@task()
def fail(self: Any, of: str) -> None:
    record("ran", of, task="fail")
    raise ValueError("as asked")


@task()
def mourn(self: Any, task_id: str, of: str) -> None:
    record("ran", of, task="mourn", failed=task_id)


@task(bind=False)
def mourn_at_once(request: Any, error: BaseException, traceback: Any, of: str) -> None:
    record("ran", of, task="mourn_at_once", failed=request.id)


@task()
def see(self: Any, of: str, name: str = "", after: Any = None) -> dict[str, Any]:
    seen = what_is_seen(self.request)
    record("ran", of, task="see", name=name, **seen)
    return seen


@task()
def see_after(self: Any, result: Any, of: str, name: str = "") -> dict[str, Any]:
    """As `see`, for a callback: with the result of the task before it."""
    seen = what_is_seen(self.request)
    record("ran", of, task="see_after", name=name, result=result, **seen)
    return seen


def what_is_seen(request: Any) -> dict[str, Any]:
    return {
        "id": request.id,
        "root": request.root_id,
        "parent": request.parent_id,
        "group": request.group,
        "index": request.group_index,
        "retries": request.retries,
        "expires": str(request.expires) if request.expires else None,
        "eta": bool(request.eta),
        "limits": list(request.timelimit or ()),
        "ignored": request.ignore_result,
        "queue": request.delivery_info["routing_key"],
        "priority": request.delivery_info["priority"],
        "shadow": request.shadow,
        "stamps": request.stamps,
        "trace": (request.headers or {}).get("trace"),
    }


# ---- replace


@task()
def become(self: Any, what: Mapping[str, Any], of: str) -> Any:
    """Let another signature take this task's place."""
    record("ran", of, task="become", nesting=self.request.replaced_task_nesting)
    return self.replace(signature(dict(what), app=self.app))


@task()
def become_itself(self: Any, times: int, of: str) -> Any:
    record("ran", of, task="become_itself", times=times)
    if times:
        return self.replace(self.s(times - 1, of))
    return "done"


@task()
def widen(self: Any, numbers: list[int], of: str) -> int:
    """Add one member for each number to the chord that this task belongs to."""
    record("ran", of, task="widen")
    for number in numbers:
        self.add_to_chord(self.app.tasks["add"].s(number, 1, of))
    return 0


# ---- retry


@task(max_retries=5)
def walk(self: Any, page: int, of: str, last: int = 3, seen: Any = ()) -> list[int]:
    """Go on with the next page by a retry with other arguments, and return all pages."""
    record("ran", of, task="walk", page=page, retries=self.request.retries)
    pages = [*seen, page]
    if page < last:
        raise self.retry(args=(page + 1, of), kwargs={"last": last, "seen": pages}, countdown=0)
    return pages


@task(ShortDelays(key="of", fingerprint="of", **QUICK), max_retries=5)
def walk_by_name(self: Any, page: int, of: str, last: int = 3) -> list[int]:
    """As `walk`, with other keywords only, and with a key that all pages share."""
    record("ran", of, task="walk_by_name", page=page, retries=self.request.retries)
    if page < last:
        raise self.retry(kwargs={"page": page + 1}, countdown=0)
    return [page]


@task(ShortDelays(key="of", **QUICK), max_retries=5)
def walk_by_key(self: Any, page: int, of: str, last: int = 3) -> list[int]:
    """As `walk_by_name`, with all arguments as the fingerprint."""
    record("ran", of, task="walk_by_key", page=page, retries=self.request.retries)
    if page < last:
        raise self.retry(kwargs={"page": page + 1}, countdown=0)
    return [page]


@task(autoretry_for=(ConnectionError,), retry_backoff=False, default_retry_delay=0, max_retries=3)
def amend(self: Any, order: dict[str, Any], of: str) -> dict[str, Any]:
    """Write into its own argument, and fail twice after that."""
    record("ran", of, task="amend", order=dict(order), retries=self.request.retries)
    order["tries"] = order.get("tries", 0) + 1
    if self.request.retries < 2:
        raise ConnectionError("away")
    return order


@task(max_retries=2)
def never(self: Any, of: str) -> None:
    record("ran", of, task="never", retries=self.request.retries)
    raise self.retry(exc=KeyError("in vain"), countdown=0)


@task(max_retries=1)
def retry_with(self: Any, of: str, options: dict[str, Any], eta_in: float | None = None) -> dict[str, Any]:
    """Retry once with these options, and return what the second body sees."""
    seen = what_is_seen(self.request)
    record("ran", of, task="retry_with", **seen)
    if self.request.retries:
        return seen
    eta = None if eta_in is None else datetime.now(UTC) + timedelta(seconds=eta_in)
    raise self.retry(eta=eta, **options)


@task(max_retries=3)
def retry_on_the_side(self: Any, of: str) -> str:
    """Publish a retry and go on, in place of raising it."""
    record("ran", of, task="retry_on_the_side", retries=self.request.retries)
    if self.request.retries < 1:
        self.retry(countdown=0, throw=False)
        return "went on"
    return "came back"


@task(max_retries=1)
def recall(self: Any, what: dict[Any, Any], of: str) -> list[str]:
    """Retry once, and return the types of what came the second time."""
    record("ran", of, task="recall", retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return sorted(f"{type(name).__name__}: {type(value).__name__}" for name, value in what.items())


# ---- other ends


@task()
def end_with(self: Any, error: str, of: str) -> None:
    record("ran", of, task="end_with", error=error, redelivered=bool(self.request.delivery_info.get("redelivered")))
    if error == "Ignore":
        raise Ignore
    if error == "Reject":
        raise Reject("as asked", requeue=False)
    if error == "requeue" and not self.request.delivery_info.get("redelivered"):
        raise Reject("as asked", requeue=True)


@task()
def report_progress(self: Any, of: str, gate: str) -> str:
    record("ran", of, task="report_progress")
    self.update_state(state="PROGRESS", meta={"of": of})
    wait_at(gate)
    return "done"


@task()
def outlast(self: Any, of: str) -> str:
    record("ran", of, task="outlast")
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        return "soft"
    return "never reached"


@task(ignore_result=True)
def whisper(self: Any, of: str, what: str) -> str:
    record("ran", of, task="whisper")
    return what


@task(typing=False)
def untyped(self: Any, *args: Any, of: str, **kwargs: Any) -> list[Any]:
    record("ran", of, task="untyped")
    return [list(args), kwargs]
