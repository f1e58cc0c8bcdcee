"""Keys: typed, stable, the same for every way of writing a call."""

import inspect
import json
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_idempotent.errors import KeyMissing, PolicyError
from celery_idempotent.protocol.canonical import NotCanonical, canonical
from celery_idempotent.protocol.keys import WHOLE_CALL, CallSignature, Selector, Spec, identify

GOLDEN = Path(__file__).with_name("golden_keys.json")


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Kind(StrEnum):
    CARD = "card"


@dataclass
class Money:
    cents: int
    currency: str = "EUR"


class Order(pydantic.BaseModel):
    id: int
    note: str | None = None


GOLDEN_VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "one": 1,
    "minus one": -1,
    "big": 2**70,
    "one as float": 1.0,
    "tenth": 0.1,
    "minus zero": -0.0,
    "infinity": float("inf"),
    "one as text": "1",
    "empty text": "",
    "text": "Grüße, 世界 \N{SNOWMAN}",
    "lone surrogate": "\ud800",
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "decimal": Decimal("12.50"),
    "small decimal": Decimal("-0.001"),
    "large decimal": Decimal("1E+3"),
    "decimal zero": Decimal("0.00"),
    "decimal infinity": Decimal("-Infinity"),
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "date": date(2026, 2, 28),
    "time": time(12, 30, 1, 5),
    "zoned": datetime(2026, 2, 28, 12, 0, 0, 250, tzinfo=UTC),
    "naive": datetime(2026, 2, 28, 12, 0),
    "duration": timedelta(days=-1, microseconds=3),
    "list": [1, "a", None],
    "empty list": [],
    "nested": {"a": [1, {"b": (2, 3)}], "c": {"x", "y"}},
    "empty dict": {},
    "int keys": {1: "a", 2: "b"},
    "set": {3, 1, 2},
    "enum": Color.RED,
    "dataclass": Money(5),
    "model": Order(id=7),
}


def test_canonical_forms_are_frozen() -> None:
    """A changed form gives every running operation a new key: it would run again."""
    frozen = json.loads(GOLDEN.read_text())

    assert {name: canonical(value) for name, value in GOLDEN_VALUES.items()} == frozen["canonical"]


def _charge(order_id: int, cents: int = 100, *, currency: str = "EUR") -> None: ...


def test_keys_and_fingerprints_are_frozen() -> None:
    """So are whole keys, for every form of selector and for explicit keys."""
    frozen = json.loads(GOLDEN.read_text())

    assert {name: _golden_key(name) for name in frozen["keys"]} == frozen["keys"]
    assert len(frozen["keys"]) == 5


def _golden_key(name: str) -> list[str | None]:
    specs: dict[str, Spec] = {
        "whole call": WHOLE_CALL,
        "path": "order_id",
        "tuple": ("order_id", "currency"),
        "function": lambda order_id, cents, currency: [order_id, currency],
        "explicit": "order_id",
    }
    identity = _identity(specs[name], (7,), {"currency": "USD"}, explicit="mine" if name == "explicit" else None)
    return [identity.key, identity.fingerprint]


def _identity(key: Spec, args: Any, kwargs: Any, *, fingerprint: Spec | None = WHOLE_CALL, **more: Any) -> Any:
    return identify(
        "orders.charge:1",
        CallSignature(inspect.signature(_charge)).bind(args, kwargs),
        task="orders.charge",
        key=Selector("key", key),
        fingerprint=None if fingerprint is None else Selector("fingerprint", fingerprint),
        **more,
    )


def test_types_are_told_apart() -> None:
    """1, "1", 1.0, True, None and their kin are all different, also as keys of a dict and inside a list."""
    values = [
        1,
        "1",
        1.0,
        True,
        None,
        "True",
        "None",
        b"1",
        Decimal(1),
        [1],
        {1: 1},
        {"1": 1},
        [[1]],
        "",
        [],
        {},
        set(),
    ]

    forms = [canonical(value) for value in values]
    nested = [canonical({"x": [value]}) for value in values]

    assert len(set(forms)) == len(values)
    assert len(set(nested)) == len(values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
        ({"a": 1}, UserDict({"a": 1})),
        ({1, 2, 3}, frozenset([3, 2, 1])),
        (0.0, -0.0),
        (Decimal("1.0"), Decimal("1.000")),
        (Decimal("100"), Decimal("1E2")),
        (Decimal("0"), Decimal("-0.0")),
        (b"ab", bytearray(b"ab")),
        (b"ab", memoryview(b"ab")),
        (Color.RED, "red"),
        (Level.HIGH, 3),
        (Kind.CARD, "card"),
        (Money(5), {"currency": "EUR", "cents": 5}),
        (Order(id=7), {"id": 7, "note": None}),
        (
            datetime(2026, 1, 1, 12, tzinfo=UTC),
            datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))),
        ),
    ],
)
def test_equal_values_have_one_form(one: Any, other: Any) -> None:
    """What is equal, or cannot be told apart after it went over the wire, is one key."""
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Decimal("0.1234567890123456789012345678901"), Decimal("0.1234567890123456789012345678902")),
        (["a", "b"], ["a,s1:b"]),
        ({"a": "b", "c": "d"}, {"a": "b,s1:c=s1:d"}),
        (datetime(2026, 1, 1, 12), datetime(2026, 1, 1, 12, tzinfo=UTC)),
        (datetime(2026, 1, 1), date(2026, 1, 1)),
        ("\u00e9", "e\u0301"),
        (timedelta(1), timedelta(1, microseconds=1)),
        ([1, [2]], [[1], 2]),
        ([None], []),
    ],
)
def test_different_values_have_different_forms(one: Any, other: Any) -> None:
    """Nothing is rounded, normalised or joined into a collision."""
    assert canonical(one) != canonical(other)


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
)
_values = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def _typed(value: Any) -> Any:
    """An independent statement of what is the same: type and value, all the way down."""
    if isinstance(value, dict):
        return ("dict", frozenset((_typed(key), _typed(each)) for key, each in value.items()))
    if isinstance(value, list):
        return ("list", tuple(map(_typed, value)))
    return (type(value), value)


@given(_values, _values)
def test_forms_are_equal_exactly_when_values_are(one: Any, other: Any) -> None:
    """Two values have the same form if and only if they are of the same type and equal."""
    assert (canonical(one) == canonical(other)) == (_typed(one) == _typed(other))


class Everything(pydantic.BaseModel):
    """One field of every kind whose form nobody has changed."""

    model_config = pydantic.ConfigDict(extra="allow")
    text: str
    count: int
    ratio: float
    sure: bool
    amount: Decimal
    when: datetime
    day: date
    at: time
    took: timedelta
    id: UUID
    raw: bytes
    color: Color
    maybe: str | None
    either: int | str
    names: list[str]
    pair: tuple[int, str]
    by_number: dict[int, Decimal]
    order: Order
    orders: list[Order]
    money: Money
    anything: Any
    number: int = pydantic.Field(alias="No")
    where: IPv4Address = IPv4Address("127.0.0.1")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def length(self) -> int:
        return len(self.text)


_orders = st.builds(Order, id=st.integers(), note=st.none() | st.text())
_everything = st.builds(
    Everything,
    raw=st.text().map(str.encode),
    ratio=st.floats(allow_nan=False),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    by_number=st.dictionaries(st.integers(), st.decimals(allow_nan=False, allow_infinity=False)),
    order=_orders,
    orders=st.lists(_orders),
    when=st.datetimes(timezones=st.none() | st.timezones()),
    anything=_orders | st.lists(st.text()) | st.dictionaries(st.text(), _orders),
    No=st.integers(),
    more=st.text() | _orders,
)


@settings(max_examples=25)
@given(_everything)
def test_form_of_a_model_is_that_of_its_json(model: Everything) -> None:
    """A model is what it is on the wire, fields by name, whatever they hold."""
    assert canonical(model) == canonical(model.model_dump(mode="json"))


class Ids(pydantic.RootModel[list[Order]]): ...


def test_form_of_a_root_model_is_that_of_its_root() -> None:
    """It is nothing but what it holds, for a path, too."""
    ids = Ids([Order(id=7)])
    bound = inspect.signature(lambda ids: None).bind({"ids": ids})

    assert canonical(ids) == canonical([{"id": 7, "note": None}])
    with pytest.raises(PolicyError, match="cannot choose 'id' of a list"):
        Selector("key", "ids.ids.id").canonical(bound, "t")


class Card(pydantic.BaseModel):
    number: pydantic.SecretStr = pydantic.SecretStr("4111")
    pin: pydantic.SecretBytes = pydantic.SecretBytes(b"1")
    owner: str = pydantic.Field("ann", exclude=True)
    bank: str = "first"
    limits: dict[int | str, int] = {}

    @pydantic.field_serializer("bank")
    def _masked(self, bank: str) -> str:
        return "***"


class CardWithName(Card):
    name: str = "a"


def _card(cls: Any = Card, **fields: Any) -> Any:
    return cls(**fields)


class Cards(pydantic.BaseModel):
    cards: list[Card]


class Summary(Order):
    @pydantic.model_serializer
    def _total(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_card(number="4111"), _card(number="4222")),
        (_card(pin=b"1"), _card(pin=b"2")),
        (_card(owner="ann"), _card(owner="bob")),
        (_card(bank="first"), _card(bank="second")),
        (_card(CardWithName, name="a"), _card(CardWithName, name="b")),
        (Summary(id=7), Summary(id=8)),
        (pydantic.SecretStr("a"), pydantic.SecretStr("b")),
    ],
)
def test_what_a_model_hides_counts(one: Any, other: Any) -> None:
    """Secrets, and what an author keeps out of a model's JSON, tell two calls apart all the same."""
    assert canonical(one) != canonical(other)
    if not isinstance(one, pydantic.SecretStr | Summary):
        assert canonical(Cards(cards=[one])) != canonical(Cards(cards=[other]))


def test_a_path_sees_what_a_model_hides() -> None:
    """A key of a masked field is not the mask."""
    signature = inspect.signature(lambda card: None)

    for path, option in {"card.number": "number", "card.owner": "owner", "card.bank": "bank"}.items():
        selected = Selector("key", path).canonical(signature.bind(_card(**{option: "mine"})), "t")
        assert selected == canonical("mine")


class Tags(pydantic.BaseModel):
    tags: set[int]


def test_set_in_a_model_has_no_order() -> None:
    """The order of a set differs between processes, and a key must not."""
    one, other = Tags(tags={0, 8}), Tags(tags={8, 0})
    assert list(one.tags) != list(other.tags)

    assert canonical(one) == canonical(other)


def test_names_that_json_cannot_tell_apart_are_told_apart() -> None:
    """Of 1 and "1" in one dict of a model, only one would be left in JSON."""
    assert canonical(_card(limits={1: 5, "1": 6})) != canonical(_card(limits={1: 4, "1": 6}))
    assert canonical(_card(limits={1: 5})) == canonical(_card(limits={"1": 5}))


class Formless:
    pass


class Holder(Enum):
    BAD = Formless()


class Number(Enum):
    ONE = 1


class Nowhere(tzinfo):
    """Knows no offset, so that its times are no instants; Python would take this machine's zone."""

    def utcoffset(self, when: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


class Bag(pydantic.BaseModel):
    what: Any

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {"what": self.what}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Formless(), "value"),
        ({"lines": [1, {"what": Formless()}]}, "value.lines[1].what"),
        ((1, Formless()), "value[1]"),
        ({Formless(): 1}, "key of value"),
        ({1, Formless()}, "value{}"),
        (Holder.BAD, "value"),
        (Money(Formless()), "value.cents"),  # type: ignore[arg-type]
        (Bag(what=Formless()), "value.what"),
    ],
)
def test_value_without_a_form_is_named(value: Any, path: str) -> None:
    """The error says which argument it was, however deep."""
    with pytest.raises(NotCanonical, match="Formless has no canonical form") as raised:
        canonical(value)

    assert raised.value.path == path


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return {"a": value}


class Broken(pydantic.BaseModel):
    id: int = 7

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        raise LookupError("no rates today")


def _released() -> memoryview:
    view = memoryview(b"a")
    view.release()
    return view


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (_nested(10_000), "value of type builtins.list (nested too deep"),
        (_cycle(), "value of type builtins.dict (nested too deep"),
        (Bag(what=_nested(10_000)), "Bag (nested too deep"),
        ({"n": [10**5000]}, "value.n[0] of type builtins.int"),
        ([1, Broken()], "value[1] of type tests.unit.test_keys.Broken"),
        ({"at": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))}, "value.at of type datetime.datetime"),
        ((_released(),), "value[0] of type builtins.memoryview"),
        ([{1: "a", Level.HIGH: "b", Number.ONE: "c"}], "value[0] of type builtins.dict"),
    ],
)
def test_value_that_cannot_have_a_form_is_named(value: Any, named: str) -> None:
    """However a value fails to give a form, it is the same clear error, and never another one."""
    with pytest.raises(NotCanonical, match=re.escape(named)):
        canonical(value)


def test_deep_values_have_a_form_as_long_as_they_can_be_read() -> None:
    """No depth that a message could have is refused."""
    assert canonical(_nested(100)) == f"{'l1[' * 100}i1{']' * 100}"


class Masked(str):
    """Prints as something else, as types that keep secrets out of logs do."""

    def __str__(self) -> str:
        return "***"

    def __len__(self) -> int:
        return 3


class Rounded(float):
    """As numpy's: a sum of two is of the same type, and its repr depends on the version."""

    def __add__(self, other: float) -> "Rounded":
        return Rounded(float(self) + other)

    def __repr__(self) -> str:
        return f"about {int(self)}"


class Numbered(int):
    def __repr__(self) -> str:
        return "a number"

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (Masked("4111"), "4111"),
        (Rounded(1.5), 1.5),
        (Numbered(7), 7),
        ({Masked("a"): [Masked("b")]}, {"a": ["b"]}),
        (Bag(what=Masked("4111")), {"what": "4111"}),
        (float("nan"), float("nan")),
        (Decimal("sNaN"), Decimal("sNaN")),
        (datetime(2026, 1, 1, tzinfo=Nowhere()), datetime(2026, 1, 1)),
        ("\ud83d", "\ud83d"),
    ],
)
def test_values_are_told_by_what_they_are(value: Any, same: Any) -> None:
    """Not by what they print as: that may hide a difference, or depend on a library's version."""
    assert canonical(value) == canonical(same)


def test_type_is_no_value() -> None:
    """A class has no form, even that of a dataclass."""
    with pytest.raises(NotCanonical, match="builtins.type"):
        canonical(Money)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((7,), {}),
        ((7, 100), {}),
        ((7,), {"cents": 100}),
        ((), {"order_id": 7}),
        ((), {"cents": 100, "order_id": 7, "currency": "EUR"}),
        ([7], {"currency": "EUR"}),
    ],
)
@pytest.mark.parametrize(
    "key", [WHOLE_CALL, "order_id", ("order_id", "cents"), lambda order_id, cents, currency: order_id]
)
def test_calling_style_does_not_matter(args: Any, kwargs: Any, key: Spec) -> None:
    """Positional, keyword, defaulted: the same call has the same key and fingerprint."""
    assert _identity(key, args, kwargs) == _identity(key, (7,), {})


def test_key_separates_what_it_selects_and_nothing_else() -> None:
    """The selected argument makes the key; the others only the fingerprint."""
    base = _identity("order_id", (7,), {})
    other_cents = _identity("order_id", (7, 5), {})

    assert base.key == other_cents.key
    assert base.fingerprint != other_cents.fingerprint
    assert _identity("order_id", (8,), {}).key != base.key
    assert _identity("order_id", (7,), {}, fingerprint="cents").fingerprint != base.fingerprint
    assert _identity("order_id", (7,), {}, fingerprint=None).fingerprint is None
    assert _identity(("order_id",), (7,), {}).key != base.key


def test_explicit_key_takes_the_place_of_the_selected_one() -> None:
    """A publisher's key identifies the effect, is hashed, and cannot collide with a derived one."""
    mine = _identity("order_id", (7,), {}, explicit="order-7")

    assert mine.key == _identity("order_id", (8,), {}, explicit="order-7").key
    assert mine.key != _identity("order_id", (7,), {}, explicit="order-8").key
    assert mine.key != _identity("order_id", (7,), {}).key
    assert mine.fingerprint == _identity("order_id", (7,), {}).fingerprint
    assert "order-7" not in mine.key


def test_explicit_key_is_what_travels() -> None:
    """A text that prints as something else has the key that its message has, in eager mode, too."""
    kind = Enum("kind", {"CARD": "card"}, type=str)

    assert _identity("order_id", (7,), {}, explicit=kind["CARD"]) == _identity("order_id", (7,), {}, explicit="card")


def test_occurrences_of_one_call_are_different_operations() -> None:
    """Equal calls that are meant to happen each time are told apart by their occurrence."""
    first, second, plain = (_identity(WHOLE_CALL, (7,), {}, occurrence=each) for each in ("a", "b", None))

    assert len({first.key, second.key, plain.key}) == 3
    assert first.fingerprint == second.fingerprint


def test_key_is_short_and_shows_its_scope() -> None:
    """The key fits DynamoDB's 2048 bytes whatever the arguments, and a person sees what it belongs to."""
    key = _identity(WHOLE_CALL, ("x" * 100_000,), {}).key

    assert key.startswith("orders.charge:1:")
    assert len(key.encode()) <= 2048


class Place(NamedTuple):
    city: str


class Totals(pydantic.RootModel[dict[str, int]]): ...


@dataclass
class Basket:
    prices: list[int]

    @property
    def total(self) -> int:
        return sum(self.prices)


@pytest.mark.parametrize(
    ("spec", "order", "expected"),
    [
        ("order", 0, 0),
        ("order", "", ""),
        ("order", False, False),
        ("order", [], []),
        ("order.id", {"id": 7}, 7),
        ("order.id", UserDict({"id": 7}), 7),
        ("order.lines", {"lines": []}, []),
        ("order.ship-to.aws:arn", {"ship-to": {"aws:arn": "a"}}, "a"),
        ("order.1", {"1": "a", 1: "b"}, "a"),
        ("order.id", Order(id=7), 7),
        ("order.cents", Money(7), 7),
        ("order.total", Basket([3, 4]), 7),
        ("order.city", Place("A"), "A"),
        ("order.all", Totals({"all": 7}), 7),
        ("order.name", Color.RED, "RED"),
        ("order.value", Color.RED, "red"),
        ("order.value", Kind.CARD, "card"),
        ("order.where", {"where": {"street": None, "lines": ["a", None]}}, {"street": None, "lines": ["a", None]}),
        (("order.id", "order.tenant"), {"id": 7, "tenant": "t"}, [7, "t"]),
        (("order", "order.id"), {"id": 7, "note": None}, [{"id": 7, "note": None}, 7]),
        (lambda order: order["a.b"], {"a.b": 7}, 7),
        (lambda order: [each["sku"] for each in order["lines"]], {"lines": [{"sku": "a"}]}, ["a"]),
    ],
)
def test_selects(spec: Spec, order: Any, expected: Any) -> None:
    """A path goes through members and attributes; falsy is not missing, and a whole value may hold nulls."""
    bound = inspect.signature(lambda order: None).bind(order)

    assert Selector("key", spec).canonical(bound, "t") == canonical(expected)


@pytest.mark.parametrize("spec", ["order.id", ("order.tenant", "order.id"), lambda order: order.get("id")])
@pytest.mark.parametrize("order", [{"tenant": "t"}, {"tenant": "t", "id": None}])
def test_missing_or_null_key_is_an_error(spec: Spec, order: dict[str, Any]) -> None:
    """Any missing part refuses the call: half a key would mix up two tenants."""
    bound = inspect.signature(lambda order: None).bind(order)

    with pytest.raises(KeyMissing, match="nothing ran"):
        Selector("key", spec).canonical(bound, "t")


@pytest.mark.parametrize(
    ("spec", "order", "named"),
    [
        ("order", None, "key='order'"),
        ("order.id", {}, "key='order.id'"),
        ("order.id", None, "'order' of key='order.id'"),
        ("order.id", "text", "key='order.id'"),
        ("order.id", 7, "key='order.id'"),
        ("order.id", object(), "key='order.id'"),
        ("order.1", {1: "a"}, "key='order.1'"),
        ("order.a.b", {"a.b": 7}, "'order.a' of key='order.a.b'"),
        ("order.shop.tenant.id", {"shop": {"tenant": None}}, "'order.shop.tenant' of key='order.shop.tenant.id'"),
        (("order.id", "order.tenant"), Order(id=7), "key='order.tenant'"),
        (lambda order: order, None, "what key=<function"),
        (lambda order: (None, None), 7, "a part of what key=<function"),
        (lambda order: [order.id, order.note], Order(id=7), "a part of what key=<function"),
        (lambda order: {order.id, order.note}, Order(id=7), "a part of what key=<function"),
    ],
)
def test_missing_part_of_a_key_is_named(spec: Spec, order: Any, named: str) -> None:
    """Half an identity would make one operation of different calls."""
    bound = inspect.signature(lambda order: None).bind(order)

    with pytest.raises(KeyMissing, match=f"^t: {re.escape(named)}.* nothing ran"):
        Selector("key", spec).canonical(bound, "t")


@pytest.mark.parametrize("order", [["a"], ("a",), {"a"}, frozenset({"a"})])
@pytest.mark.parametrize("option", ["key", "fingerprint"])
def test_path_into_a_list_is_refused(order: Any, option: str) -> None:
    """Which of its items is meant only a function can say, and what is null would be skipped in silence."""
    bound = inspect.signature(lambda order: None).bind(order)

    with pytest.raises(
        PolicyError, match=f"^{option}='order.0': t: a path cannot choose '0' of a .*; write a function"
    ):
        Selector(option, "order.0", nulls=option == "fingerprint").canonical(bound, "t")


@pytest.mark.parametrize(
    "function", [lambda order: order, lambda order: {**order}, lambda order: (order["id"], order), lambda order: ()]
)
def test_null_deeper_in_what_a_key_function_returns_is_data(function: Any) -> None:
    """Such as the optional fields of an order; only what a function puts together is chosen part by part."""
    bound = inspect.signature(lambda order: None).bind({"id": 7, "note": None, "lines": ["a", None]})

    assert Selector("key", function).canonical(bound, "t")


@pytest.mark.parametrize(
    "fingerprint",
    [
        "coupon",
        ("order_id", "coupon"),
        lambda order_id, coupon: (order_id, coupon),
    ],
)
def test_null_in_a_fingerprint_is_a_value(fingerprint: Spec) -> None:
    """A fingerprint is compared and identifies nothing: a call without a coupon differs from one with."""
    signature = inspect.signature(lambda order_id, coupon=None: None)
    selector = Selector("fingerprint", fingerprint, nulls=True)

    without, again, with_one = (
        selector.canonical(CallSignature(signature).bind(args, {}), "t") for args in ((7,), (7, None), (7, "c"))
    )

    assert without == again != with_one


def test_fingerprint_function_that_returns_nothing_is_an_error() -> None:
    """A forgotten return would compare nothing, in silence."""
    bound = inspect.signature(lambda order: None).bind(5)

    with pytest.raises(PolicyError, match="returned None"):
        Selector("fingerprint", lambda order: None, nulls=True).canonical(bound, "t")


@pytest.mark.parametrize("nulls", [False, True])
def test_property_that_raises_is_an_error(nulls: bool) -> None:
    """It names the task and the path."""
    bound = inspect.signature(lambda order: None).bind(Broken())

    with pytest.raises(PolicyError, match=r"^key='order.total': t: it raised LookupError .*: no rates today"):
        Selector("key", "order.total", nulls=nulls).canonical(bound, "t")


def test_function_that_raises_is_an_error() -> None:
    """A key function's own error names the task, the option and what it was; one of ours passes."""

    def function(order: Any) -> Any:
        if order is None:
            raise KeyMissing("t", "mine")
        return order["id"]

    selector = Selector("key", function)
    signature = inspect.signature(function)

    with pytest.raises(PolicyError, match=r"key=<function .*>: t: it raised KeyError for these arguments: 'id'") as it:
        selector.canonical(signature.bind({}), "t")
    assert isinstance(it.value.__cause__, KeyError)
    with pytest.raises(KeyMissing, match="mine"):
        selector.canonical(signature.bind(None), "t")


def test_error_without_a_text_is_named_by_its_type() -> None:
    """Its text may be about the very value that cannot be shown."""

    def function(order: int) -> Any:
        raise ValueError(order)

    bound = inspect.signature(function).bind(10**5000)

    with pytest.raises(PolicyError, match="t: it raised ValueError for these arguments; see"):
        Selector("key", function).canonical(bound, "t")


@pytest.mark.parametrize("nulls", [False, True])
def test_function_cannot_change_the_arguments(nulls: bool) -> None:
    """The body, and the other selector, get what the message held."""

    def function(order: Any, *more: Any, **named: Any) -> Any:
        order["tags"].add("new")
        order["lines"][0].pop("sku")
        more[0].clear()
        named["deep"][0][0] = "b"
        return order.pop("id")

    def arguments() -> Any:
        return ({"id": 7, "lines": [{"sku": "a"}], "tags": {"old"}}, [1]), {"deep": (["a"],)}

    args, kwargs = arguments()
    form = Selector("key", function, nulls=nulls).canonical(inspect.signature(function).bind(*args, **kwargs), "t")

    assert form == canonical(7)
    assert (args, kwargs) == arguments()


def test_function_gets_what_is_too_deep_to_copy() -> None:
    """Only what it selects must have a form."""
    bound = inspect.signature(lambda order_id, deep: None).bind(7, _nested(10_000))

    assert Selector("key", lambda order_id, deep: order_id).canonical(bound, "t") == canonical(7)


@pytest.mark.parametrize("spec", ["order.", ".id", "", " ", "a..b", (), ("a", 1), ("*",), 5, None, ["a"]])
def test_unusable_selector_is_refused(spec: Any) -> None:
    """What cannot select anything is refused when it is written."""
    with pytest.raises(PolicyError, match="key=.*: must be an argument's name"):
        Selector("key", spec)


@pytest.mark.parametrize(
    "spec",
    [
        "[order.id, user]",
        "{id: order.id}",
        "body.items[0]",
        "lines[].sku",
        "lines.*.sku",
        "lines[?paid].sku",
        "order.id || order.number",
        "powertools_json(body).id",
        "order | id",
        '"order-id"',
        "@",
        ("order.id", "[user]"),
    ],
)
def test_expression_is_refused_with_the_remedy(spec: Spec) -> None:
    """As those write keys who come from Powertools."""
    remedy = "a tuple of these, or a function of the arguments for what is chosen from a list or computed"
    with pytest.raises(PolicyError, match=re.escape(remedy)):
        Selector("key", spec)


_ODD: list[Any] = [
    _nested(3_000),
    _cycle(),
    Broken(),
    Bag(what=Formless()),
    Holder.BAD,
    Number.ONE,
    Masked("x"),
    10**5000,
    object(),
    _card(),
    {1: 2, "1": 3},
    {Number.ONE: 1, 1: 2},
    {(1, 2): 3, None: 1},
    "\ud800",
    datetime.min.replace(tzinfo=timezone(timedelta(hours=1))),
    frozenset({1, None}),
    UserDict({"id": None}),
]
_any_values = st.recursive(
    _scalars | st.floats() | st.decimals() | _orders | st.integers(0, len(_ODD) - 1).map(lambda index: _ODD[index]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "a", 1, None]), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
_SPECS: list[Spec] = [
    WHOLE_CALL,
    "order",
    "order.id",
    "order.id.a",
    "order.value",
    "order.1",
    "order.total",
    ("order", "order.id"),
    lambda order: (order, order),
    lambda order: {"id": order["id"]},
    lambda order: list(order),
]


@given(_any_values, st.sampled_from(_SPECS), st.booleans())
def test_any_value_has_a_key_or_a_clear_error(order: Any, spec: Spec, nulls: bool) -> None:
    """Whatever a call holds and a policy selects: always the same key, or an error of ours, and no other."""
    bound = inspect.signature(lambda order: None).bind(order)
    fingerprint = Selector("fingerprint", spec, nulls=True) if nulls else None

    with suppress(KeyMissing, PolicyError):
        found = [identify("s", bound, task="t", key=Selector("key", spec), fingerprint=fingerprint) for _ in range(2)]
        assert found[0] == found[1]


def test_selector_that_cannot_give_a_value_is_refused() -> None:
    """A coroutine or generator would be its own, ever different key."""

    async def later(order_id: int) -> int:
        return order_id

    def several(order_id: int) -> Any:
        yield order_id

    for spec in (later, several):
        with pytest.raises(PolicyError, match="plain function"):
            Selector("key", spec)


@pytest.mark.parametrize("spec", ["order", "orderid.x", ("order_id", "tenant"), "self", "0"])
def test_selector_must_start_at_an_argument(spec: Spec) -> None:
    """A misspelt argument is found when the task is bound, not when money is at stake."""
    with pytest.raises(PolicyError, match=r"there is no argument '\w+'; the signature is \(order_id"):
        Selector("key", spec).check(inspect.signature(_charge))


@pytest.mark.parametrize("spec", ["order_id", "order_id.x", WHOLE_CALL, ("cents", "order_id")])
def test_possible_selector_passes_the_check(spec: Spec) -> None:
    """What lies within the arguments cannot be judged before the call and passes."""
    Selector("key", spec).check(inspect.signature(_charge))


def test_arguments_without_names_of_their_own() -> None:
    """Those that ``*`` and ``**`` gather are selected by its name; the error says so."""
    signature = inspect.signature(lambda *items, **options: None)
    bound = signature.bind("a", "b", order_id=7)

    for spec, found in (("items", ["a", "b"]), ("options", {"order_id": 7}), ("options.order_id", 7)):
        selector = Selector("key", spec)
        selector.check(signature)
        assert selector.canonical(bound, "t") == canonical(found)
    with pytest.raises(PolicyError, match=re.escape("(*items, **options); write 'options.order_id'")):
        Selector("key", "order_id").check(signature)


def test_function_must_take_the_tasks_arguments() -> None:
    """A function of other arguments is refused at once; one of the same, or of any, is not."""
    signature = inspect.signature(lambda order_id, *rest, cents=1, **more: None)
    for fits in (
        lambda order_id, *rest, cents, **more: order_id,
        lambda *args, **kwargs: args,
    ):
        Selector("key", fits).check(signature)
    with pytest.raises(PolicyError, match="must take the task's arguments"):
        Selector("key", lambda: 1).check(signature)
    Selector("key", str).check(inspect.signature(lambda order_id: None))


def test_argument_without_canonical_form_is_a_clear_error() -> None:
    """The error names the task, the argument, its type and the remedy."""
    with pytest.raises(PolicyError, match=r"order_id=<builtins.object>: orders.charge: .*Policy\(key") as raised:
        _identity(WHOLE_CALL, (object(),), {})

    assert raised.value.option == "order_id"


def test_arguments_that_do_not_fit_are_a_type_error() -> None:
    """As calling the task would say."""
    with pytest.raises(TypeError, match="order_id"):
        _identity("order_id", (), {})


def _plain_call(a: Any, b: Any, c: Any = 3, d: Any = 4) -> None: ...
def _call_without_arguments() -> None: ...
def _call_by_position(a: Any, /, b: Any = 2) -> None: ...
def _call_by_name(a: Any, *, b: Any = 2) -> None: ...
def _call_of_many(a: Any, *rest: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    "body", [_plain_call, _call_without_arguments, _call_by_position, _call_by_name, _call_of_many]
)
@given(
    args=st.lists(st.integers(), max_size=5),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "stranger"]), st.integers()),
)
def test_arguments_are_bound_as_python_binds_them(
    body: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    """However a call is written, wrong or right, each argument has its name and its place, or it is refused."""
    signature = inspect.signature(body)
    bind = CallSignature(signature).bind
    try:
        expected = signature.bind(*args, **kwargs)
    except TypeError as error:
        with pytest.raises(TypeError, match=f"^{re.escape(str(error))}$"):
            bind(iter(args), kwargs)
        return
    expected.apply_defaults()
    assert list(bind(iter(args), kwargs).arguments.items()) == list(expected.arguments.items())


def test_conversion_makes_wire_form_and_model_one_call() -> None:
    """A pydantic task gets dicts from the wire and models from eager callers: one key."""

    def body(order: Order, count: int = 1) -> None: ...

    def convert(args: Any, kwargs: Any) -> Any:
        return [each and Order.model_validate(each) for each in args], kwargs

    signature = CallSignature(inspect.signature(body), convert)

    def key(order: Any) -> str:
        bound = signature.bind((order,), {})
        return identify("s", bound, task="t", key=Selector("key", WHOLE_CALL), fingerprint=None).key

    assert key({"id": 7}) == key(Order(id=7)) == key({"id": 7, "note": None})
    assert key(None) != key({"id": 7})
