"""How long it takes to get from a call to its key, against the size of the arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aws_lambda_powertools.utilities.idempotency import DynamoDBPersistenceLayer, IdempotencyConfig
from celery import Celery

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.protocol.keys import Spec
from celery_idempotent.stores.memory import MemoryStore
from lab.benchmarks.contenders import make_app
from lab.benchmarks.environment import Servers
from lab.benchmarks.payloads import SIZES, order, size_of
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.stats import Spread, shuffled, spread

__all__ = ["measure"]

_MOST_US = 30.0
"""Microseconds for the small order: what the library wants to take at most."""

_BATCH_US = 3_000
"""About as long does one batch take: short enough to interleave, long enough for the clock."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """One way to name the key, in the words of either library."""

    name: str
    key: Spec | None
    powertools: str | None
    nested: bool


_SELECTIONS = (
    _Selection("all arguments (default)", None, "", nested=True),
    _Selection('"order_id"', "order_id", "id", nested=False),
    _Selection('"order.id"', "order.id", "order.id", nested=True),
    _Selection('("order_id", "total")', ("order_id", "total"), "[id, total]", nested=False),
    _Selection("callable", lambda order: order["id"], None, nested=True),
)


@dataclass(frozen=True, slots=True)
class _Derivation:
    selection: str
    by: str
    derive: Callable[[dict[str, Any]], object]


def measure(servers: Servers, rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` interleaved rounds of each size, calling ``progress`` after each."""
    derivations = _derivations(servers)
    orders = [order(1, size) for size in SIZES]
    found = [_sample(derivations, each, rounds, progress) for each in orders]
    small = found[0]
    goals = [
        Goal(
            f"{each.selection}, small order",
            f"under {_MOST_US:.0f} us",
            f"{small[index].median:.1f} us",
            small[index].median < _MOST_US,
        )
        for index, each in enumerate(derivations)
        if each.by == _WITH_FINGERPRINT
    ]
    return Section(
        "3. Key derivation against argument size",
        f"Microseconds of thread CPU time, median of {rounds} batches, the batches of all rows interleaved. `key "
        "and fingerprint` is what a delivery pays under the default policy, argument binding included: the "
        "fingerprint always covers all arguments. `key alone` is the same with `fingerprint=None`. Powertools: "
        "`_get_hashed_idempotency_key` alone, without the deep copy of the payload that goes before it.",
        [_grid(derivations, orders, found)],
        goals,
        {
            f"{size_of(sent)} bytes": {
                f"{each.selection}, {each.by}": asdict(figures[index]) for index, each in enumerate(derivations)
            }
            for sent, figures in zip(orders, found, strict=True)
        },
    )


_WITH_FINGERPRINT = "key and fingerprint"
_KEY_ALONE = "key alone"
_POWERTOOLS = "Powertools, key alone"


def _derivations(servers: Servers) -> list[_Derivation]:
    app = make_app(MemoryStore())
    found = []
    for index, each in enumerate(_SELECTIONS):
        key: dict[str, Any] = {} if each.key is None else {"key": each.key}
        nested = each.nested
        both = _task(app, f"both-{index}", Policy(**key), nested=nested)
        alone = _task(app, f"alone-{index}", Policy(**key, fingerprint=None), nested=nested)
        found += [
            _Derivation(each.name, _WITH_FINGERPRINT, _by_task(both, nested=nested)),
            _Derivation(each.name, _KEY_ALONE, _by_task(alone, nested=nested)),
        ]
        if each.powertools is not None:
            found.append(_Derivation(each.name, _POWERTOOLS, _by_powertools(servers, each.powertools)))
    return found


def _task(app: Celery, name: str, policy: Policy, *, nested: bool) -> Any:
    def charge_order(order: dict[str, Any]) -> None: ...

    def charge(order_id: str, customer: str, currency: str, total: float, lines: list[Any]) -> None: ...

    task = app.task(name=name, base=IdempotentTask, idempotent=policy, shared=False)
    return task(charge_order if nested else charge)


def _by_task(task: Any, *, nested: bool) -> Callable[[dict[str, Any]], object]:
    def derive(sent: dict[str, Any]) -> object:
        return task.idempotency_identity((), sent, headers={}, task_id="")

    if nested:
        return lambda sent: derive({"order": sent})
    return lambda sent: derive({"order_id" if name == "id" else name: each for name, each in sent.items()})


def _by_powertools(servers: Servers, path: str) -> Callable[[dict[str, Any]], object]:
    client = servers.session().client("dynamodb", endpoint_url=servers.dynamodb)
    layer = DynamoDBPersistenceLayer("unused", boto3_client=client)
    layer.configure(IdempotencyConfig(event_key_jmespath=path), "benchmarks.charge")
    derive = layer._get_hashed_idempotency_key
    return (lambda sent: derive({"order": sent})) if path.startswith("order.") else derive


def _sample(
    derivations: Sequence[_Derivation], sent: dict[str, Any], rounds: int, progress: Callable[[], None]
) -> list[Spread]:
    calls = [_calls_per_batch(each, sent) for each in derivations]
    samples: list[list[float]] = [[] for _ in derivations]
    for number in range(rounds):
        for index in shuffled(range(len(derivations)), number):
            samples[index].append(_batch(derivations[index], sent, calls[index]))
        progress()
    return [spread(each) for each in samples]


def _calls_per_batch(derivation: _Derivation, sent: dict[str, Any]) -> int:
    _batch(derivation, sent, 3)
    return max(1, min(200, round(_BATCH_US / _batch(derivation, sent, 3))))


def _batch(derivation: _Derivation, sent: dict[str, Any], calls: int) -> float:
    derive = derivation.derive
    begin = time.thread_time_ns()
    for _ in range(calls):
        derive(sent)
    return (time.thread_time_ns() - begin) / 1000 / calls


def _grid(derivations: Sequence[_Derivation], orders: Sequence[dict[str, Any]], found: list[list[Spread]]) -> Grid:
    columns = ("Key", "By", *(f"{size_of(each):,} B" for each in orders))
    rows = [
        (each.selection, each.by, *(_microseconds(figures[index].median) for figures in found))
        for index, each in enumerate(derivations)
    ]
    return Grid("Microseconds, by bytes of the order", columns, rows)


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
