"""Keys: typed, stable, the same for every way of writing a call."""

import inspect
import json
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.errors import IdempotencyError, KeyMissing, PolicyError
from celery_idempotent.protocol.canonical import NotCanonical, arguments_form, canonical
from celery_idempotent.protocol.keys import WHOLE_CALL, CallSignature, Identity, Selector, Selectors, Spec, identify
from tests.support.scene import raising

GOLDEN = json.loads(Path(__file__).with_name("golden_keys.json").read_text())
HOUR_EAST = timezone(timedelta(hours=1))


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Kind(StrEnum):
    CARD = "card"


@dataclass
class Money:
    cents: Any
    currency: str = "EUR"

    @property
    def total(self) -> int:
        return sum(self.cents)


class Order(pydantic.BaseModel):
    id: int
    note: str | None = None


BY_HAND: list[dict[str, Any]] = [
    {"none": None, "true": True, "false": False, "one": 1, "minus one": -1, "big": 2**70},
    {"one as float": 1.0, "tenth": 0.1, "minus zero": -0.0, "infinity": float("inf")},
    {"one as text": "1", "empty text": "", "text": "Grüße, 世界 \N{SNOWMAN}", "lone surrogate": "\ud800"},
    {"bytes": b"\x00\xff", "no bytes": b"", "uuid": UUID("12345678-1234-5678-1234-567812345678")},
    {"decimal": Decimal("12.50"), "small decimal": Decimal("-0.001"), "large decimal": Decimal("1E+3")},
    {"decimal zero": Decimal("0.00"), "decimal infinity": Decimal("-Infinity")},
    {"date": date(2026, 2, 28), "time": time(12, 30, 1, 5), "duration": timedelta(days=-1, microseconds=3)},
    {"zoned": datetime(2026, 2, 28, 12, 0, 0, 250, tzinfo=UTC), "naive": datetime(2026, 2, 28, 12, 0)},
    {"list": [1, "a", None], "empty list": [], "nested": {"a": [1, {"b": (2, 3)}], "c": {"x", "y"}}},
    {"empty dict": {}, "int keys": {1: "a", 2: "b"}, "set": {3, 1, 2}},
    {"enum": Color.RED, "dataclass": Money(5), "model": Order(id=7)},
]


def test_canonical_forms_are_frozen() -> None:
    """A changed form gives every running operation a new key: it would run again."""
    assert {name: canonical(value) for each in BY_HAND for name, value in each.items()} == GOLDEN["canonical"]


def _charge(order_id: int, cents: int = 100, *, currency: str = "EUR") -> None: ...


def _identity(
    key: Spec, *args: Any, fingerprint: Spec | None = WHOLE_CALL, kwargs: Any = None, **more: Any
) -> Identity:
    return identify(
        "orders.charge:1",
        CallSignature(inspect.signature(_charge)).bind(args, kwargs or {}),
        Selectors(Selector("key", key), None if fingerprint is None else Selector("fingerprint", fingerprint), None),
        task="orders.charge",
        **more,
    )


@pytest.mark.parametrize(
    ("name", "spec", "explicit"),
    [
        ("whole call", WHOLE_CALL, None),
        ("path", "order_id", None),
        ("tuple", ("order_id", "currency"), None),
        ("function", lambda order_id, cents, currency: [order_id, currency], None),
        ("explicit", "order_id", "mine"),
    ],
)
def test_keys_and_fingerprints_are_frozen(name: str, spec: Spec, explicit: str | None) -> None:
    """So are whole keys, for every form of selector and for explicit keys."""
    identity = _identity(spec, 7, kwargs={"currency": "USD"}, explicit=explicit)
    assert [identity.key, identity.fingerprint] == GOLDEN["keys"][name]


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes(datetime(2, 1, 1), timezones=st.sampled_from([UTC, HOUR_EAST]))
    | st.datetimes()
    | st.dates()
    | st.timedeltas()
)
_values = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def _typed(value: Any) -> Any:
    """An independent statement of what is the same: type and value, all the way down."""
    if isinstance(value, dict):
        return ("dict", frozenset((_typed(key), _typed(each)) for key, each in value.items()))
    return ("list", tuple(map(_typed, value))) if isinstance(value, list) else (type(value), value)


@given(_values, _values)
def test_forms_are_equal_exactly_when_values_are(one: Any, other: Any) -> None:
    """Two values have the same form if and only if they are of the same type and equal."""
    assert (canonical(one) == canonical(other)) == (_typed(one) == _typed(other))


def test_lookalikes_are_told_apart() -> None:
    """Nothing is rounded, normalised or joined into a collision, at the top, in a list or as a key of a dict."""
    like_one: list[Any] = [1, "1", 1.0, True, b"1", Decimal(1), [1], {1: 1}, {"1": 1}, [[1]]]
    like_none: list[Any] = [None, "None", "", [], {}, set(), [None]]
    texts = [["a", "b"], ["a,s1:b"], {"a": "b", "c": "d"}, {"a": "b,s1:c=s1:d"}, [1, [2]], [[1], 2], "é", "e\u0301"]
    days = [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), timedelta(1), timedelta(1, 0, 1)]
    decimals = [Decimal("0.1234567890123456789012345678901"), Decimal("0.1234567890123456789012345678902")]
    values = [*like_one, *like_none, *texts, *days, *decimals]

    for form in (canonical, lambda each: canonical({"x": [each]})):
        assert len(set(map(form, values))) == len(values)
    assert len({canonical({each: 0}) for each in (1, "1", True, b"1", None)} | {canonical({1.5: 0})}) == 6


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


class Nowhere(tzinfo):
    """Knows no offset, so that its times are no instants; Python would take this machine's zone."""

    def utcoffset(self, when: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


class Bag(pydantic.BaseModel):
    what: Any

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {"what": self.what}


class Orders(pydantic.RootModel[list[Order]]): ...


class Tags(pydantic.BaseModel):
    tags: set[int]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, OrderedDict([("b", 2), ("a", 1)])),
        ({"a": 1}, UserDict({"a": 1})),
        ({1, 2, 3}, frozenset([3, 2, 1])),
        ([0.0, Decimal("1.0"), Decimal("100")], [-0.0, Decimal("1.000"), Decimal("1E2")]),
        (Decimal("0"), Decimal("-0.0")),
        ([b"ab", b"ab"], [bytearray(b"ab"), memoryview(b"ab")]),
        ([Color.RED, Level.HIGH, Kind.CARD], ["red", 3, "card"]),
        (Money(5), {"currency": "EUR", "cents": 5}),
        (Order(id=7), {"id": 7, "note": None}),
        (Orders([Order(id=7)]), [{"id": 7, "note": None}]),
        (Tags(tags={0, 8}), Tags(tags={8, 0})),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=HOUR_EAST)),
        (datetime(2026, 1, 1, tzinfo=Nowhere()), datetime(2026, 1, 1)),
        ({Masked("a"): [Masked("b"), Rounded(1.5), Numbered(7)]}, {"a": ["b", 1.5, 7]}),
        (Bag(what=Masked("4111")), {"what": "4111"}),
        ([float("nan"), Decimal("sNaN")], [float("nan"), Decimal("sNaN")]),
    ],
)
def test_equal_values_have_one_form(one: Any, other: Any) -> None:
    """What is equal, or cannot be told apart after it went over the wire, whatever it prints as, is one key."""
    assert canonical(one) == canonical(other)


class Card(pydantic.BaseModel):
    number: pydantic.SecretStr = pydantic.SecretStr("4111")
    pin: pydantic.SecretBytes = pydantic.SecretBytes(b"1")
    owner: str = pydantic.Field("ann", exclude=True)
    bank: str = "first"
    limits: dict[int | str, int] = {}

    @pydantic.field_serializer("bank")
    def _masked(self, bank: str) -> str:
        return "***"


class NamedCard(Card):
    name: str = "a"


class Cards(pydantic.BaseModel):
    cards: list[Card]


class Summary(Order):
    @pydantic.model_serializer
    def _total(self) -> int:
        return 5


def _card(**fields: Any) -> Card:
    return Card.model_validate(fields)


HIDING: list[Any] = [
    *(_card(), _card(number="4222"), _card(pin=b"2"), _card(owner="bob"), _card(bank="second")),
    *(NamedCard.model_validate({"name": each}) for each in "ab"),
    # Of 1 and "1" in one dict of a model, only one would be left in JSON.
    *(_card(limits={1: 5, "1": 6}), _card(limits={1: 4, "1": 6})),
]


def test_what_a_model_hides_counts() -> None:
    """Secrets, and what an author keeps out of a model's JSON, tell two calls apart all the same."""
    others = [Summary(id=7), Summary(id=8), pydantic.SecretStr("a"), pydantic.SecretStr("b")]
    for values in ([*HIDING, *others], [Cards(cards=[each]) for each in HIDING]):
        assert not any(canonical(one) == canonical(other) for one, other in combinations(values, 2))
    assert canonical(_card(limits={1: 5})) == canonical(_card(limits={"1": 5}))


class Formless:
    pass


class Holder(Enum):
    BAD = Formless()


class Number(Enum):
    ONE = 1


class Broken(pydantic.BaseModel):
    id: int = 7

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        raise LookupError("no rates today")


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: dict[str, Any] = {}
CYCLE["a"] = CYCLE
RELEASED = memoryview(b"a")
RELEASED.release()
FORMLESS = f"{__name__}.Formless"
BEFORE_TIME = datetime.min.replace(tzinfo=HOUR_EAST)


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (Formless(), "value", FORMLESS),
        (Money, "value", "builtins.type"),
        ({"lines": [1, {"what": Formless()}]}, "value.lines[1].what", FORMLESS),
        ({Formless(): 1}, "key of value", FORMLESS),
        ({1, Formless()}, "value{}", FORMLESS),
        (Holder.BAD, "value", FORMLESS),
        (Money(Formless()), "value.cents", FORMLESS),
        (Bag(what=Formless()), "value.what", FORMLESS),
        (_nested(10_000), "value", "builtins.list (nested too deep, or inside itself)"),
        (CYCLE, "value", "builtins.dict (nested too deep, or inside itself)"),
        (Bag(what=_nested(10_000)), "value", f"{__name__}.Bag (nested too deep, or inside itself)"),
        ({"n": [10**5000]}, "value.n[0]", "builtins.int"),
        ([1, Broken()], "value[1]", f"{__name__}.Broken"),
        ({"at": BEFORE_TIME}, "value.at", "datetime.datetime"),
        ((RELEASED,), "value[0]", "builtins.memoryview"),
        ([{1: "a", Level.HIGH: "b", Number.ONE: "c"}], "value[0]", "builtins.dict"),
    ],
)
def test_value_without_a_form_is_named(value: Any, path: str, kind: str) -> None:
    """However deep, and however a value fails to give one, it is the same error, with its path and its type."""
    with pytest.raises(NotCanonical) as raised:
        canonical(value)
    assert (raised.value.path, raised.value.type_name) == (path, kind)
    assert path in str(raised.value)


def test_what_strikes_while_an_argument_gets_its_form_is_raised_as_it_is() -> None:
    """It is no fault of the argument, which has a form: a time limit, say."""
    strikes = [raising(TimeoutError())]

    class Card:
        def get_secret_value(self) -> str:
            return strikes.pop()() if strikes else "4242"

    with pytest.raises(TimeoutError):
        arguments_form({"card": Card()})
    assert arguments_form({"card": Card()}) == canonical({"card": "4242"})


def test_argument_without_a_form_is_the_option_at_fault() -> None:
    """The error names the task, the argument and its type."""
    with pytest.raises(PolicyError) as raised:
        _identity(WHOLE_CALL, object())
    assert (raised.value.option, raised.value.value) == ("order_id", "<builtins.object>")
    assert raised.value.remedy.startswith("orders.charge: ")


def test_what_makes_another_key_and_what_another_fingerprint() -> None:
    """The selected argument makes the key, the others the fingerprint; explicit keys and occurrences have their own."""
    base = _identity("order_id", 7)
    explicit = _identity("order_id", 7, explicit="card")
    ticks = [_identity(WHOLE_CALL, 7, **each) for each in ({}, {"occurrence": "a"}, {"occurrence": "b"}, {"tick": "a"})]

    assert base.key == _identity("order_id", 7, 5).key
    assert len({base.key, _identity("order_id", 8).key, _identity(("order_id",), 7).key, explicit.key}) == 4
    assert len({base.fingerprint, _identity("order_id", 7, 5).fingerprint}) == 2
    assert _identity("order_id", 7, fingerprint="cents").fingerprint != base.fingerprint == explicit.fingerprint
    assert _identity("order_id", 7, fingerprint=None).fingerprint is None
    assert explicit.key == _identity("order_id", 8, explicit="card").key != _identity("order_id", 7, explicit="x").key
    assert explicit == _identity("order_id", 7, explicit=Masked("card"))  # what travels, not what it prints
    assert (len({each.key for each in ticks}), len({each.fingerprint for each in ticks})) == (4, 1)


def _select(spec: Spec, order: Any, option: str = "key", **more: Any) -> str:
    return Selector(option, spec, **more).canonical(inspect.signature(lambda order: None).bind(order), "t")


class Place(NamedTuple):
    city: str


class Totals(pydantic.RootModel[dict[str, int]]): ...


FULL = {"id": 7, "note": None, "lines": ["a", None]}


@pytest.mark.parametrize(
    ("spec", "order", "expected"),
    [
        *(("order", each, each) for each in list[Any]([0, "", False, []])),
        ("order.id", {"id": 7}, 7),
        ("order.id", UserDict({"id": 7}), 7),
        ("order.lines", {"lines": []}, []),
        ("order.ship-to.aws:arn", {"ship-to": {"aws:arn": "a"}}, "a"),
        ("order.1", {"1": "a", 1: "b"}, "a"),
        ("order.id", Order(id=7), 7),
        ("order.total", Money([3, 4]), 7),
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
        (lambda order: {**order}, FULL, FULL),
        (lambda order: (order["id"], order), FULL, (7, FULL)),
        (lambda order: (), 7, ()),
        (lambda order: order["id"], {"id": 7, "deep": _nested(10_000)}, 7),  # only what it selects must have a form
        *((f"order.{field}", _card(**{field: "mine"}), "mine") for field in ("number", "owner", "bank")),  # no mask
    ],
)
def test_selects(spec: Spec, order: Any, expected: Any) -> None:
    """A path goes through members and attributes; falsy is not missing, and nulls deeper in a whole value are data."""
    assert _select(spec, order) == canonical(expected)


@pytest.mark.parametrize(
    ("spec", "order", "named"),
    [
        ("order", None, "key='order'"),
        *(("order.id", order, "key='order.id'") for order in ({}, {"id": None}, "text", 7, object())),
        ("order.id", None, "'order' of key='order.id'"),
        ("order.1", {1: "a"}, "key='order.1'"),
        ("order.a.b", {"a.b": 7}, "'order.a' of key='order.a.b'"),
        ("order.shop.tenant.id", {"shop": {"tenant": None}}, "'order.shop.tenant' of key='order.shop.tenant.id'"),
        (("order.id", "order.note"), Order(id=7), "key='order.note'"),
        (lambda order: order, None, "what key=<function"),
        (lambda order: (None, None), 7, "a part of what key=<function"),
        (lambda order: [order.id, order.note], Order(id=7), "a part of what key=<function"),
        (lambda order: {order.id, order.note}, Order(id=7), "a part of what key=<function"),
    ],
)
def test_missing_part_of_a_key_is_named(spec: Spec, order: Any, named: str) -> None:
    """Half an identity would make one operation of different calls; an error of a function's own stays as it is."""
    with pytest.raises(KeyMissing) as raised:
        _select(spec, order)
    assert (raised.value.task, raised.value.source[: len(named)]) == ("t", named)


@pytest.mark.parametrize("spec", ["coupon", ("order_id", "coupon"), lambda order_id, coupon: (order_id, coupon)])
def test_null_in_a_fingerprint_is_a_value(spec: Spec) -> None:
    """A fingerprint is compared and identifies nothing: a call without a coupon differs from one with."""
    signature = CallSignature(inspect.signature(lambda order_id, coupon=None: None))
    selector = Selector("fingerprint", spec, nulls=True)
    without, again, given = (selector.canonical(signature.bind(args, {}), "t") for args in ((7,), (7, None), (7, "c")))
    assert without == again != given
    with pytest.raises(PolicyError, match="returned None"):  # a forgotten return would compare nothing, in silence
        _select(lambda order: None, 7, "fingerprint", nulls=True)


@pytest.mark.parametrize(
    ("spec", "order", "why"),
    [
        *(("order.0", each, "t: a path cannot choose '0' of a ") for each in (["a"], ("a",), {"a"}, frozenset({"a"}))),
        ("order.ids.id", {"ids": Orders([Order(id=7)])}, "t: a path cannot choose 'id' of a list"),
        ("order.total", Broken(), "t: it raised LookupError for these arguments: no rates today"),
        (lambda order: order["id"], {}, "t: it raised KeyError for these arguments: 'id'"),
        (raising(ValueError(10**5000)), 7, "t: it raised ValueError for these arguments$"),  # its text cannot be had
    ],
)
@pytest.mark.parametrize(("option", "nulls"), [("key", False), ("fingerprint", True)])
def test_what_cannot_be_selected_is_told_with_task_option_and_cause(
    spec: Spec, order: Any, why: str, option: str, nulls: bool
) -> None:
    """Which item of a list is meant only a function can say, and one that raises is an author's mistake."""
    with pytest.raises(PolicyError) as raised:
        _select(spec, order, option, nulls=nulls)
    assert (raised.value.option, raised.value.value) == (option, repr(spec))
    assert re.match(why, raised.value.remedy)


@pytest.mark.parametrize("error", [KeyMissing("t", "mine"), PolicyError("mine", "1", "no")])
def test_error_of_ours_that_a_function_raises_passes(error: IdempotencyError) -> None:
    """Its author means it."""
    with pytest.raises(type(error)) as raised:
        _select(raising(error), 7)
    assert raised.value is error


@pytest.mark.parametrize("nulls", [False, True])
def test_function_cannot_change_the_arguments(nulls: bool) -> None:
    """The body, and the other selector, get what the message held."""

    def function(order: Any, *more: Any, **named: Any) -> Any:
        order["tags"].add("new")
        more[0].clear()
        named["deep"][0][0].pop("sku")
        return order.pop("id")

    args, kwargs = ({"id": 7, "tags": {"old"}}, [1]), {"deep": ([{"sku": "a"}],)}
    before = deepcopy((args, kwargs))
    bound = inspect.signature(function).bind(*args, **kwargs)
    assert Selector("key", function, nulls=nulls).canonical(bound, "t") == canonical(7)
    assert (args, kwargs) == before


async def _later(order: Any) -> Any: ...


def _several(order: Any) -> Any:
    yield order


@pytest.mark.parametrize(
    "spec",
    [
        *("order.", ".id", "", " ", "a..b", (), ("a", 1), ("*",), 5, None, ["a"], _later, _several),
        # As those write keys who come from Powertools.
        *("[order.id, user]", "{id: order.id}", "body.items[0]", "lines[].sku", "lines.*.sku", "lines[?paid].sku"),
        *("order.id || order.number", "powertools_json(body).id", "order | id", '"order-id"', "@", ("a.b", "[user]")),
    ],
)
def test_unusable_selector_is_refused(spec: Any) -> None:
    """What cannot select anything, or would be its own, ever different key, is refused when it is written."""
    with pytest.raises(PolicyError) as raised:
        Selector("key", spec)
    assert (raised.value.option, raised.value.value) == ("key", repr(spec))
    assert "function" in raised.value.remedy


def _of_many(order_id: Any, *rest: Any, cents: int = 1, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("spec", "body", "refused"),
    [
        # What lies within the arguments cannot be judged before the call.
        *((spec, _charge, "") for spec in ("order_id", "order_id.x", WHOLE_CALL, ("cents", "order_id"))),
        ("order", _charge, "there is no argument 'order'; the signature is (order_id"),
        ("orderid.x", _charge, "there is no argument 'orderid'"),
        (("order_id", "tenant"), _charge, "there is no argument 'tenant'"),
        *((spec, _of_many, "") for spec in ("rest", "more.tenant")),
        ("tenant", _of_many, "write 'more.tenant'"),
        (lambda order_id, *rest, cents, **more: order_id, _of_many, ""),
        (lambda *args, **kwargs: args, _of_many, ""),
        (lambda: 1, _of_many, "must take the task's arguments"),
        (str, lambda order_id: None, ""),  # one of C's may not tell its signature
    ],
)
def test_selector_is_checked_when_the_task_is_bound(spec: Spec, body: Any, refused: str) -> None:
    """A misspelt argument is found then, not when money is at stake."""
    selector = Selector("key", spec)
    if not refused:
        selector.check(inspect.signature(body))
        return
    with pytest.raises(PolicyError) as raised:
        selector.check(inspect.signature(body))
    assert refused in raised.value.remedy


def _names(a: Any, b: Any, c: Any = 3, d: Any = 4) -> None: ...
def _no_arguments() -> None: ...
def _positions(a: Any, /, b: Any = 2) -> None: ...
def _keywords(a: Any, *, b: Any = 2) -> None: ...


@pytest.mark.parametrize("body", [_names, _no_arguments, _positions, _keywords, _of_many, _charge])
@given(
    args=st.lists(st.integers(), max_size=5),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d", "stranger"]), st.integers()),
)
def test_arguments_are_bound_as_by_python(body: Callable[..., Any], args: list[int], kwargs: dict[str, int]) -> None:
    """However a call is written, each argument has its name and its place, or the call is Python's TypeError."""
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
