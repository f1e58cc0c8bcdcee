"""What people call an operation: taken from the arguments of its first call, and never in its way."""

from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, PolicyError, Record, signals
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import an_app, deliver, settle

NUMBER = UUID("0af76519-16cd-43dd-8448-eb211c80319c")


@pytest.fixture
def app() -> Celery:
    return an_app()


def _record(app: Celery, label: Any, *args: Any) -> Record:
    @app.task(base=IdempotentTask, shared=False, idempotent=Policy("order", label=label))
    def charge(order: Any, tenant: Any = "acme") -> None:
        """Nothing."""

    deliver(charge, *args)
    (record,) = runtime_of(app).store.scan()
    return record


@pytest.mark.parametrize(
    ("label", "args", "text"),
    [
        ("order", ("o-1",), "o-1"),
        ("order", (17,), "17"),
        ("order.id", ({"id": 7},), "7"),
        ("order", ("half of a pair: \ud83d",), r"half of a pair: \ud83d"),
        (("tenant", "order"), (17,), "acme/17"),
        (lambda order, tenant: f"{tenant}#{order}", (17,), "acme#17"),
        (lambda order, tenant: (tenant, order), (17, "shop"), "shop/17"),
        (lambda order, tenant: NUMBER, (17,), str(NUMBER)),
        ("tenant", (17, None), ""),
        (("order", "tenant"), (17, None), ""),
    ],
)
def test_a_label_is_text_of_the_arguments(app: Celery, label: Any, args: Any, text: str) -> None:
    """Texts and numbers as they are, parts joined by a slash; a call that lacks a part has none."""
    assert _record(app, label, *args).label == text


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("order", "(no label: a dict is neither text nor number)"),
        (lambda order, tenant: 1 / 0, "(no label: ZeroDivisionError)"),
        (lambda order, tenant: 10**5000, "(no label: ValueError)"),
        ("order.id.x", ""),
    ],
)
def test_a_label_that_cannot_be_had_stops_nothing(app: Celery, label: Any, text: str) -> None:
    """The call runs and is recorded; where the label would stand, it says why there is none."""
    assert _record(app, label, {"id": 7}).label == text


def test_a_long_label_is_cut(app: Celery) -> None:
    """Every store has room for 255 characters, and different labels stay different."""
    assert len(_record(app, "order", "x" * 1000).label) == 255


def test_the_first_call_names_the_operation(app: Celery) -> None:
    """A retry with other arguments is the same operation, and keeps its name."""

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy("order", fingerprint=None, label="tenant"))
    def charge(order: int, tenant: str) -> None:
        if tenant == "acme":
            raise ValueError("the first time")

    states = [deliver(charge, 1, tenant).state for tenant in ("acme", "other")]

    (record,) = runtime_of(app).store.scan()
    assert states == ["FAILURE", "SUCCESS"]
    assert (record.attempts, record.label) == (2, "acme")


def test_an_operation_that_begins_after_an_outage_has_its_label() -> None:
    """Its first claim is that of a postponed message, whose identity travels in a header, and the label does not."""
    store = MemoryStore()
    app = an_app()
    app.conf.idempotency_store = FaultyStore(store, "request lost", "request lost")

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy("order", label=("tenant", "order")))
    def charge(order: int, tenant: str) -> None:
        """Nothing."""

    postponed = deliver(charge, 1, "acme")
    settled = settle(app, charge, postponed)

    (record,) = store.scan()
    assert (postponed.state, settled.state) == ("RETRY", "SUCCESS")
    assert record.label == "acme/1"


@pytest.mark.parametrize(
    ("label", "reason"),
    [("*", "all arguments are no name"), ("a b", "must be an argument's name"), (7, "must be an argument's name")],
)
def test_a_label_that_names_nothing_is_refused(label: Any, reason: str) -> None:
    """Where it is written."""
    with pytest.raises(PolicyError, match=reason):
        Policy(label=label)


def test_a_label_of_no_argument_is_refused_when_the_task_is_made(app: Celery) -> None:
    """As a key of no argument is."""

    @app.task(base=IdempotentTask, shared=False, idempotent=Policy(label="ordre"))
    def charge(order: int) -> None:
        """Nothing."""

    with pytest.raises(PolicyError, match=r"label='ordre'.*no argument 'ordre'"):
        app.finalize()


def test_signals_and_log_lines_tell_the_label(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """So that whoever is paged knows which order it is."""
    told = []

    def tell(label: str, **_: Any) -> None:
        told.append(label)

    signals.completed.connect(tell)
    try:
        with caplog.at_level("DEBUG", logger="celery_idempotent"):
            _record(app, "order", "o-1")
    finally:
        signals.completed.disconnect(tell)

    assert told == ["o-1"]
    assert "label=o-1" in caplog.text
