"""What this library does itself where some of Celery's versions do not; each rule holds on all of them."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Task

from celery_idempotent.integration import versions
from celery_idempotent.integration.versions import KeepsRequest, comes_back_from_lost_worker, dumped_models

DEATHS = ["x-death", *(f"x-{which}-death-{what}" for which in ("first", "last") for what in ("queue", "reason"))]
KEPT = {"mine": "x", "x-deadline": 5, 7: "number"}


@pytest.mark.parametrize(
    ("headers", "again"), [*(({each: [{"count": 1}], **KEPT}, KEPT) for each in DEATHS), (None, {})]
)
def test_no_version_publishes_the_deaths_of_a_message_again(headers: Any, again: Any) -> None:
    """RabbitMQ would drop a message that carries them, and nobody would hear of it; None says that there are none."""
    # One whose headers Celery gives back as they came, as it does before 5.6.
    request = SimpleNamespace(_headers=headers, as_execution_options=lambda: {"headers": headers})
    assert versions.headers_again(request) == again


def test_models_are_dumped_where_celery_dumps_them() -> None:
    """The key is that of what is sent; pickle sends models as they are, and before 5.7 nobody dumps them."""
    since_57 = SimpleNamespace(_dump_pydantic_arguments=lambda args, kwargs: ("dumped", kwargs))
    args, kwargs = (object(),), {"model": object()}
    assert dumped_models(since_57, args, kwargs, "json") == ("dumped", kwargs)
    assert dumped_models(since_57, args, kwargs, "pickle") == (args, kwargs)
    assert dumped_models(SimpleNamespace(), args, kwargs, "json") == (args, kwargs)


@pytest.mark.parametrize(
    ("late", "rejects", "retries", "since_57", "comes_back"),
    [
        (True, True, False, True, True),
        (True, True, False, False, True),
        (True, False, True, True, True),
        (True, False, True, False, False),
        (True, False, False, True, False),
        (False, True, True, True, False),
    ],
)
def test_message_of_a_lost_worker_comes_back_if_this_celery_heeds_it(
    monkeypatch: pytest.MonkeyPatch, late: bool, rejects: bool, retries: bool, since_57: bool, comes_back: bool
) -> None:
    """An option that Celery does not know is one like any other, and brings nothing back."""
    if since_57:
        monkeypatch.setattr(Task, "retry_on_worker_lost", False, raising=False)
    else:
        monkeypatch.delattr(Task, "retry_on_worker_lost", raising=False)
    task = SimpleNamespace(acks_late=late, reject_on_worker_lost=rejects, retry_on_worker_lost=retries)
    assert comes_back_from_lost_worker(task) is comes_back


def test_request_is_kept_where_celery_pushes_another() -> None:
    """What is not said anew stays: an eager body keeps its task id, and can retry."""
    pushed: list[dict[str, Any]] = []

    class Pushing:
        request = SimpleNamespace(id="i-1", retries=2)

        def push_request(self, *args: Any, **kwargs: Any) -> None:
            pushed.append(kwargs)

    type("Kept", (KeepsRequest, Pushing), {})().push_request(args=(1,), retries=3)
    assert pushed == [{"id": "i-1", "args": (1,), "retries": 3}]
