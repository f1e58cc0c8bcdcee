"""Tasks with ``pydantic=True``: what Celery can run has a key, and the key is that of what the body gets."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pydantic
import pytest
from celery import Celery, Task, states

from celery_idempotent import IdempotentTask, current_attempt
from tests.support.celeries import since_celery
from tests.support.deliveries import an_app, deliver, published, redeliver

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers

pytestmark = since_celery("5.5", "pydantic=True")
publishes_models = since_celery("5.7", "the publishing of models")


class Item(pydantic.BaseModel):
    sku: str
    count: int = 1


NONE = Item(sku="none")


class Tagged(Item):
    tags: set[str] = set()


class Priced(pydantic.BaseModel):
    cents: int

    @pydantic.field_validator("cents")
    @classmethod
    def _in_the_currency_of_the_context(cls, cents: int, info: pydantic.ValidationInfo) -> int:
        assert isinstance(info.context, Mapping)
        assert isinstance(info.context["celery_app"], Celery)
        assert info.context["celery_task_name"] == "t"
        return cents * int(info.context["rate"])


class Emptying(pydantic.BaseModel):
    sku: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _take_the_name(cls, data: Any) -> Any:
        return {"sku": data.pop("name")} if "name" in data else data


def one(item: Item) -> object:
    return item


def one_of_its_own(self: Any, item: Item, *, other: Item = NONE) -> object:
    return [item.sku, other.sku]


def for_type_checkers(item: Item, price: "OnlyForTypeCheckers") -> object:
    return [item.sku, price]


def untyped(item, *rest, **more) -> object:  # type: ignore[no-untyped-def]
    return [item, list(rest), more]


def each_of_the_rest(*items: Item) -> object:
    return items


def of(annotation: Any, *default: Any) -> Any:
    """A body whose one argument is annotated so."""

    def body(item: Any) -> object:
        return item

    body.__annotations__ = {"item": annotation}
    body.__defaults__ = default or None
    body.__name__ = re.sub(r"\W+", "_", str(annotation))
    return body


perhaps, perhaps_in_old_style, annotated = of(Item | None, None), of(Optional[Item]), of(Annotated[Item, "the item"])  # noqa: UP045
several, by_name, one_or_text, by_text = of(list[Item]), of(dict[str, Item]), of(Item | str), of("Item")
priced, emptying = of(Priced), of(Emptying)

SPELT_OUT: dict[str, Any] = {"sku": "a", "count": 1}
SHORT: dict[str, Any] = {"sku": "a"}
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (one, (SHORT,), {}),
    (one, (5,), {}),
    (one, ({"sku": "a", "count": "2"},), {"pydantic_strict": True}),
    (one, (SHORT,), {"pydantic_dump_kwargs": {"exclude_defaults": True}}),
    (one_of_its_own, (SHORT,), {"bind": True}),
    (perhaps, (), {}),
    (perhaps_in_old_style, (SHORT,), {}),
    (annotated, (SHORT,), {}),
    (several, ([SHORT, SHORT],), {}),
    (by_name, ({"x": SHORT},), {}),
    (one_or_text, (SHORT,), {}),
    (of(Item | Tagged | None), (SHORT,), {}),
    (by_text, (SHORT,), {}),
    (for_type_checkers, (SHORT, "1.5"), {}),
    (untyped, (SHORT, SHORT), {}),
    (each_of_the_rest, (SHORT,), {}),
    (of(Tagged), ({"sku": "a", "tags": ["x", "y"]},), {}),
    (priced, ({"cents": 7},), {"pydantic_context": {"rate": 2}}),
    (emptying, ({"name": "a"},), {}),
    (of(Item, {"sku": "a"}), (), {}),
]


def _task(app: Celery, body: Any, **options: Any) -> Any:
    return app.task(shared=False, name="t", pydantic=True, **options)(body)


@pytest.mark.parametrize(("body", "args", "options"), CALLS, ids=[f"{body.__name__} {args}" for body, args, _ in CALLS])
def test_body_gets_what_it_gets_from_plain_celery(body: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Whatever Celery converts, leaves or refuses: the guard changes nothing about it, and keys the call."""
    plain, guarded = (_task(an_app(), body, base=base, **options) for base in (Task, IdempotentTask))
    expected, ended = deliver(plain, *deepcopy(args)), deliver(guarded, *deepcopy(args))

    assert ended.state == expected.state
    if expected.state == states.SUCCESS:
        assert ended.value == expected.value
        assert deliver(guarded, *deepcopy(args)).value == expected.value
    else:
        assert str(ended.value) == str(expected.value)


def _keys(body: Any, *calls: Any, **options: Any) -> list[str]:
    task = _task(an_app(), body, base=IdempotentTask, **options)
    return [task.idempotency_key_for(each) for each in calls]


@publishes_models
@pytest.mark.parametrize("body", [one, perhaps, perhaps_in_old_style, annotated, by_text])
def test_default_left_out_is_the_default_where_celery_builds_the_model(body: Any) -> None:
    """A publisher that leaves a field out means what one means that spells it out, or that sends the model."""
    assert len(set(_keys(body, SHORT, SPELT_OUT, Item(sku="a")))) == 1
    assert len(set(_keys(body, SHORT, {"sku": "a", "count": 2}))) == 2


def test_calls_are_different_where_the_body_gets_different_values() -> None:
    """Celery builds no model there, so the body sees two different calls."""
    assert len(set(_keys(several, [SHORT], [SPELT_OUT]))) == 2
    for body in (one_or_text, untyped):
        assert len(set(_keys(body, SHORT, SPELT_OUT))) == 2


def test_key_is_of_what_a_validator_makes() -> None:
    """The context that Celery hands to validators counts, and so does what they make of a value."""
    (cheap,), (dear,) = (_keys(priced, {"cents": 7}, pydantic_context={"rate": rate}) for rate in (1, 2))
    assert cheap != dear
    assert len(set(_keys(emptying, {"name": "a"}, {"sku": "a"}))) == 1


@pytest.mark.parametrize(
    ("hint", "sent"),
    [
        pytest.param(Item, Item(sku="a"), marks=publishes_models),
        (Item, SHORT),
        (Item | None, None),
        (list[Item], [SHORT]),
        (Item | str, "a"),
        ("No", 5),
    ],
)
def test_publisher_and_worker_have_one_key(hint: Any, sent: Any) -> None:
    """Whatever form the publisher gives an argument, its key is that of the delivery."""
    app, seen = an_app(), []

    def keyed(self: Any, item: Any) -> None:
        seen.append(current_attempt().key)

    keyed.__annotations__ = {"item": hint}
    task = _task(app, keyed, base=IdempotentTask, bind=True)
    task.delay(sent)
    (message,) = published(app)
    redeliver(app, message)
    assert seen == [task.idempotency_key_for(sent)]
