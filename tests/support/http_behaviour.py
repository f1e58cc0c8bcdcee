"""What every framework's coat does with requests that have an ``Idempotency-Key``: the same tests for all of them."""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from celery_idempotent import Policy, Status, current_attempt, resolve
from celery_idempotent.contrib.http import answer
from celery_idempotent.errors import KeyReused, OutcomeUnknown, StoreMisconfigured, StoreUnavailable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import an_app

DAY = 86_400_000


@dataclass
class Reply:
    """What an application responds."""

    status: int = 201
    body: bytes = b'{"order": 1}'
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: list[bytes] | None = None


class Got(NamedTuple):
    """What a client gets; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def __str__(self) -> str:
        """Its status, its body or problem, and whether it is replayed or should be asked for later."""
        words = [str(self.status), self.body.decode()]
        if self.headers.get("content-type") == "application/problem+json":
            told = json.loads(self.body)
            assert (told["status"], bool(told["title"]), bool(told["detail"])) == (self.status, True, True)
            words[1] = str(told["type"]).partition("#")[2]
        words += ["later"] if "retry-after" in self.headers else []
        words += ["replayed"] if self.headers.get("idempotent-replayed") == "true" else []
        return " ".join(filter(None, words))


class Shop(ABC):
    """An application behind a coat, and a client of it."""

    bodies: list[bytes]

    @abstractmethod
    def serve(self, respond: Callable[[], Reply], **options: Any) -> None:
        """Have requests to any path answered by ``respond``; ``options`` are the coat's."""

    @abstractmethod
    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Got: ...

    def request(
        self, key: str | None = "k-1", *, method: str = "POST", path: str = "/orders", body: bytes = b"{}", **named: str
    ) -> Got:
        """Send a request; names of headers are written with underscores."""
        lines = {"idempotency-key": key, **{name.replace("_", "-"): each for name, each in named.items()}}
        return self.send(method, path, [(name, each) for name, each in lines.items() if each is not None], body)


def counting(**reply: Any) -> Callable[[], Reply]:
    """An application whose body is the number of its order."""
    numbers = itertools.count(1)
    return lambda: Reply(**{"body": b"%d" % next(numbers), **reply})


TWICE: tuple[dict[str, Any], ...] = ({}, {})
SAME, AGAIN, REUSED = ("201 1", "201 1 replayed"), ("201 1", "201 2"), ("201 1", "422 key-reused")
LOST, UNKNOWN = ("201 abab", "500 response-lost"), ("403 caller-unknown",)
JSON, LARGE = "application/json", b"x" * 11
ANN, BOB = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
REFUSE, ORDER = Policy(on_takeover="refuse"), Policy(label=("caller", "body.order"), fingerprint="body.order")
AT: tuple[dict[str, Any], ...] = ({"body": b'{"order": "o-7", "at": 1}'}, {"body": b'{"at": 2, "order": "o-7"}'})
ODD: tuple[dict[str, Any], ...] = (
    {"key": None, "body": LARGE},
    {"key": "a,b", "body": LARGE},
    {"body": LARGE},
    {"cookie": "s=1"},
    *TWICE,
)
SIX = tuple(f"201 {number}" for number in range(1, 7))
STRICT = {"required": True, "max_request": 10, "caller": None}

Row = tuple[tuple[dict[str, Any], ...], tuple[str, ...], dict[str, Any], dict[str, Any]]
ROWS: dict[str, Row] = {
    "a repetition": (TWICE, SAME, {}, {}),
    "another key": (({}, {"key": "k-2"}), AGAIN, {}, {}),
    "another path": (({}, {"path": "/refunds"}), AGAIN, {}, {}),
    "another method": (({}, {"method": "PATCH"}), AGAIN, {}, {}),
    "another caller": ((ANN, BOB, ANN), (*AGAIN, "201 1 replayed"), {"caller": "authorization"}, {}),
    "no key": (({"key": None},) * 2, AGAIN, {}, {}),
    "no key where one is required": (({"key": None},), ("400 key-missing",), {"required": True}, {}),
    "a malformed key": (({"key": "a,b"},), ("400 key-malformed",), {}, {}),
    "a method that is not protected": (({"method": "PUT"},) * 2, AGAIN, {}, {}),
    "no caller": (({},), UNKNOWN, {"caller": "authorization"}, {}),
    "a session where nobody has named callers": (({"cookie": "s=1"},), UNKNOWN, {"caller": None}, {}),
    "a caller beside a session": (({"cookie": "s=1", **ANN}, {"cookie": "s=1", **BOB}), AGAIN, {"caller": None}, {}),
    "neither caller nor session": (TWICE, SAME, {"caller": None}, {}),
    "another body": (({}, {"body": b"[]"}), REUSED, {}, {}),
    "another query": (({}, {"path": "/orders?now=1"}), REUSED, {}, {}),
    "another type": (({"content_type": JSON}, {"content_type": "text/plain"}), REUSED, {}, {}),
    "another charset": (({"content_type": JSON}, {"content_type": f"{JSON}; charset=utf-8"}), SAME, {}, {}),
    "a fingerprint of the author's": (AT, SAME, {"policy": ORDER}, {}),
    "a body that is too large": (({"body": LARGE},), ("413 body-too-large",), {"max_request": 10}, {}),
    **{f"{n}": (TWICE, (f"{n} 1", f"{n} 1 replayed"), {}, {"status": n}) for n in (200, 303, 422)},
    **{f"{n}": (TWICE, (f"{n} 1", f"{n} 2"), {}, {"status": n}) for n in (401, 408, 409, 425, 429, 500, 503)},
    "500 under refuse": (TWICE, ("500 1", "500 1 replayed"), {"policy": REFUSE}, {"status": 500}),
    "500 under refuse that the author excludes": (
        *(TWICE, ("500 1", "500 2"), {"policy": REFUSE, "outcomes": lambda status: status < 500}, {"status": 500}),
    ),
    "a stream": (TWICE, ("201 abab", "201 abab replayed"), {}, {"chunks": [b"ab"] * 2}),
    "a response that is too large": (TWICE, LOST, {"max_response": 3}, {"body": b"abab"}),
    "a result that is not kept": (TWICE, ("201 1", "204 replayed"), {"policy": Policy(private=True)}, {}),
    **{f"mode {mode}": (ODD, SIX, {"policy": Policy(mode=mode), **STRICT}, {}) for mode in ("observe", "off")},
}
"""By what is special: the requests, their answers, the coat's options, and what the application replies."""


class Behaviour:
    """The tests; a subclass says by its fixture ``shop`` of what."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.mark.filterwarnings("ignore:caller is not given")
    @pytest.mark.parametrize("row", ROWS)
    def test_requests_are_answered_and_run_as_the_table_says(self, shop: Shop, store: MemoryStore, row: str) -> None:
        """What is neither refused nor replayed has run, with its whole body."""
        requests, answers, options, reply = ROWS[row]
        shop.serve(counting(**reply), store=store, **options)

        assert [str(shop.request(**each)) for each in requests] == list(answers)

        pairs = zip(requests, answers, strict=True)
        ran = [each for each, told in pairs if not ("-" in told or "replayed" in told)]
        assert shop.bodies == [each.get("body", b"{}") for each in ran]

    @pytest.mark.parametrize("chosen", [None, ("location",)])
    def test_repetition_has_the_headers_of_the_outcome(self, shop: Shop, store: MemoryStore, chosen: Any) -> None:
        """But for those about one client, and those that the author leaves out."""
        given = {"Location": "/1", "Set-Cookie": "session=1", "Content-Type": "application/json", "X-Request": "1"}
        shop.serve(counting(headers=given), store=store, **({"headers": chosen} if chosen else {}))
        first, again = (shop.request().headers for _ in range(2))
        kept = chosen or {"location", "content-type", "x-request"}
        assert {*map(str.lower, given)} <= first.keys()
        assert {each for each in given if again.get(each.lower()) == first[each.lower()]} == {
            each for each in given if each.lower() in kept
        }
        assert again.get("content-length") == first.get("content-length")

    def test_function_names_the_caller(self, shop: Shop, store: MemoryStore) -> None:
        """Of the framework's own request."""
        tenants = iter([1, 2, "1"])
        shop.serve(counting(), store=store, caller=lambda request: next(tenants))
        assert [str(shop.request()) for _ in range(3)] == ["201 1", "201 2", "201 1 replayed"]

    def test_repetition_meets_a_request_in_flight(self, shop: Shop, store: MemoryStore) -> None:
        """409, while the first one runs."""
        met: list[str] = []

        def respond() -> Reply:
            beside = Thread(target=lambda: met.append(str(shop.request())))
            beside.start()
            beside.join()
            return Reply()

        shop.serve(respond, store=store)
        assert shop.request().status == 201
        assert met == ["409 in-flight later"]

    def test_outcome_is_forgotten_after_retain(self, shop: Shop) -> None:
        """Seven days by default; until then the record has the request's name and label."""
        clock = FakeClock()
        store = MemoryStore(clock.now)
        shop.serve(counting(), store=store, policy=ORDER)
        shop.request(**AT[0])
        (record,) = store.scan()
        assert record.label == "anybody/o-7"
        assert record.task in {"POST /orders", "POST /<path:path>"}
        clock.advance(7 * DAY)
        assert str(shop.request(**AT[0])) == "201 2"

    def test_outage_of_the_store_runs_nothing_or_is_told_apart(self, shop: Shop, store: MemoryStore) -> None:
        """503: the claim was not confirmed, or the response was not, as a step of the view's raises it."""
        faulty = FaultyStore(store)
        faulty.faults.extend(["request lost"] * 9)
        shop.serve(counting(), store=faulty)
        assert str(shop.request()) == "503 store-unavailable later"
        faulty.faults.clear()
        assert str(shop.request()) == "201 1"
        shop.serve(Mock(side_effect=StoreUnavailable("the store", "swap", "no answer")), store=store)
        assert str(shop.request("k-2")) == "503 unconfirmed later"

    def test_nobody_repeats_what_nobody_knows(self, shop: Shop, store: MemoryStore) -> None:
        """500, until a person has decided; what he says is then the answer."""

        def respond() -> Reply:
            current_attempt().step("pay", lambda step: 1)
            raise OutcomeUnknown(current_attempt().key, "the bank does not say")

        shop.serve(respond, store=store)
        assert [str(shop.request()) for _ in range(2)] == ["500 outcome-unknown"] * 2

        (record,) = store.scan()
        app = an_app(idempotency_store=store)
        resolve(record.key, completed=answer(200, "paid"), by="ann", reason="asked the bank", app=app)
        assert str(shop.request()) == "200 paid replayed"

    def test_step_is_made_once(self, shop: Shop, store: MemoryStore) -> None:
        """A repetition after a failure goes on where it was; without key there is an attempt that protects nothing."""
        steps: list[str] = []
        statuses = iter([500, 201, 201, 201])

        def respond() -> Reply:
            current_attempt().step("pay", lambda step: steps.append(step.key))
            return Reply(next(statuses), str(current_attempt().number).encode())

        shop.serve(respond, store=store)
        assert [str(shop.request()) for _ in range(3)] == ["500 1", "201 2", "201 2 replayed"]
        assert [str(shop.request(None)) for _ in range(2)] == ["201 0", "201 0"]
        assert (len(steps), len(set(steps)), len(list(store.scan()))) == (3, 3, 1)

    @pytest.mark.parametrize("has_ended", [True, False])
    def test_request_that_was_taken_over_has_no_outcome_of_its_own(
        self, shop: Shop, store: MemoryStore, has_ended: bool
    ) -> None:
        """The outcome of the request that took over is the answer, or there is none yet."""
        theirs = {"status": Status.COMPLETED, "result": json.dumps(answer(202, "theirs")), "expires_at": 2**50}

        def respond() -> Reply:
            (record,) = store.scan()
            about: dict[str, Any] = {"revision": "r", "owner": "o", "content_type": "application/json"}
            about |= theirs if has_ended else {}
            other = replace(record, fencing_token=record.fencing_token + 1, **about)
            assert store.swap(other, record.revision) == other
            return Reply()

        shop.serve(respond, store=store)
        assert str(shop.request()) == ("202 theirs" if has_ended else "409 in-flight later")

    @pytest.mark.parametrize("error", [KeyReused("another", "t-1"), StoreMisconfigured("s", "swap", "x"), OSError()])
    def test_exception_of_something_else_passes(self, shop: Shop, store: MemoryStore, error: Exception) -> None:
        """As it does without the coat; the claim is given back."""
        shop.serve(Mock(side_effect=error), store=store)
        with pytest.raises(type(error)):
            shop.request()
        assert [each.status for each in store.scan()] == [Status.RELEASED]
