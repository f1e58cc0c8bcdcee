"""What every framework's coat does with requests that have an ``Idempotency-Key``: the same tests for all of them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any, NamedTuple

import pytest

from celery_idempotent import (
    KeyReused,
    OutcomeUnknown,
    Policy,
    PolicyError,
    Status,
    StoreMisconfigured,
    StoreUnavailable,
    current_attempt,
    resolve,
    signals,
)
from celery_idempotent.contrib.http import answer
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import an_app

__all__ = ["Behaviour", "Got", "Reply", "Sender", "Shop"]

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

    @property
    def problem(self) -> str:
        """The type of the problem that it tells of."""
        assert self.headers["content-type"] == "application/problem+json"
        told = json.loads(self.body)
        assert (told["status"], bool(told["title"]), bool(told["detail"])) == (self.status, True, True)
        return str(told["type"]).partition("#")[2]

    def __str__(self) -> str:
        """Its status, its body or problem, and whether it is replayed or should be asked for later."""
        is_problem = "problem+json" in self.headers.get("content-type", "")
        words = [str(self.status), self.problem if is_problem else self.body.decode()]
        words += ["later"] if "retry-after" in self.headers else []
        words += ["replayed"] if self.headers.get("idempotent-replayed") == "true" else []
        return " ".join(filter(None, words))


class Sender(ABC):
    """Sends requests as a client does."""

    def request(
        self,
        key: str | None = "k-1",
        *,
        method: str = "POST",
        path: str = "/orders",
        body: bytes = b"{}",
        **headers: str,
    ) -> Got:
        """Send a request; names of headers are written with underscores."""
        lines = [("idempotency-key", key)] if key is not None else []
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return self.send(method, path, [*lines, *named], body)

    @abstractmethod
    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Got:
        """Send it as its framework's client sends."""


class Shop(Sender):
    """An application behind a coat."""

    bodies: list[bytes]

    @abstractmethod
    def serve(self, respond: Callable[[], Reply], **options: Any) -> None:
        """Have requests to any path answered by ``respond``; ``options`` are the coat's."""


class Count:
    """An application whose body is the number of its order."""

    def __init__(self, **reply: Any) -> None:
        self.orders = 0
        self._reply = reply

    def __call__(self) -> Reply:
        self.orders += 1
        return Reply(**{"body": b"%d" % self.orders, **self._reply})


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
    "a key in quotes and without": (({}, {"key": '"k-1"'}), SAME, {}, {}),
    "another key": (({}, {"key": "k-2"}), AGAIN, {}, {}),
    "another path": (({}, {"path": "/refunds"}), AGAIN, {}, {}),
    "another method": (({}, {"method": "PATCH"}), AGAIN, {}, {}),
    "another caller": ((ANN, BOB, ANN), (*AGAIN, "201 1 replayed"), {"caller": "authorization"}, {}),
    "no key": (({"key": None},) * 2, AGAIN, {}, {}),
    "no key where one is required": (({"key": None},), ("400 key-missing",), {"required": True}, {}),
    "a malformed key": (({"key": "a,b"}, {"key": "x" * 256}), ("400 key-malformed",) * 2, {}, {}),
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
    "a large body": (({"body": b"x" * 100_000},), ("201 1",), {}, {}),
    "a body that is too large": (({"body": LARGE},), ("413 body-too-large",), {"max_request": 10}, {}),
    "a body of the largest size": (({"body": LARGE},), ("201 1",), {"max_request": 11}, {}),
    **{f"{n}": (TWICE, (f"{n} 1", f"{n} 1 replayed"), {}, {"status": n}) for n in (200, 303, 400, 404, 422)},
    **{f"{n}": (TWICE, (f"{n} 1", f"{n} 2"), {}, {"status": n}) for n in (401, 408, 409, 425, 429, 500, 503)},
    "500 under refuse": (TWICE, ("500 1", "500 1 replayed"), {"policy": REFUSE}, {"status": 500}),
    "500 under refuse that the author excludes": (
        *(TWICE, ("500 1", "500 2"), {"policy": REFUSE, "outcomes": lambda status: status < 500}, {"status": 500}),
    ),
    "a stream": (TWICE, ("201 abab", "201 abab replayed"), {}, {"chunks": [b"ab"] * 2}),
    "a response that is too large": (TWICE, LOST, {"max_response": 3}, {"body": b"abab"}),
    "a stream that is too large": (TWICE, LOST, {"max_response": 3}, {"chunks": [b"ab"] * 2}),
    "a result that is not kept": (TWICE, ("201 1", "204 replayed"), {"policy": Policy(private=True)}, {}),
    **{f"mode {mode}": (ODD, SIX, {"policy": Policy(mode=mode), **STRICT}, {}) for mode in ("observe", "off")},
}
"""By what is special: the requests, their answers, the coat's options, and what the application replies."""


class Behaviour:
    """The tests; a subclass says by its fixture ``shop`` of what."""

    @pytest.fixture
    def store(self) -> Iterator[MemoryStore]:
        """A store of the test's own."""
        with_store = MemoryStore()
        yield with_store
        with_store.close()

    @pytest.mark.filterwarnings("ignore:caller is not given")
    @pytest.mark.parametrize("row", ROWS)
    def test_requests_are_answered_and_run_as_the_table_says(self, shop: Shop, store: MemoryStore, row: str) -> None:
        """What is neither refused nor replayed has run, with its whole body."""
        requests, answers, options, reply = ROWS[row]
        shop.serve(Count(**reply), store=store, **options)

        assert [str(shop.request(**each)) for each in requests] == list(answers)

        pairs = zip(requests, answers, strict=True)
        ran = [each for each, told in pairs if not ("-" in told or "replayed" in told)]
        assert shop.bodies == [each.get("body", b"{}") for each in ran]

    @pytest.mark.parametrize("chosen", [None, ("location",)])
    def test_repetition_has_the_headers_of_the_outcome(self, shop: Shop, store: MemoryStore, chosen: Any) -> None:
        """But for those about one client, and those that the author leaves out."""
        given = {"Location": "/1", "Set-Cookie": "session=1", "Content-Type": "application/json", "X-Request": "1"}
        shop.serve(Count(headers=given), store=store, **({"headers": chosen} if chosen else {}))
        first, again = (shop.request().headers for _ in range(2))
        assert {each for each in first if each in {name.lower() for name in given}} == {*map(str.lower, given)}
        assert "set-cookie" not in again
        kept = {"location", "content-type", "content-length", "x-request"}
        same = {name for name in kept if again.get(name) == first.get(name)}
        assert same - {"content-length"} == ({"location"} if chosen else kept - {"content-length"})
        assert "content-length" in same

    def test_function_names_the_caller(self, shop: Shop, store: MemoryStore) -> None:
        """Of the framework's own request."""
        tenants = iter([1, 2, "1"])
        shop.serve(Count(), store=store, caller=lambda request: next(tenants))
        assert [str(shop.request()) for _ in range(3)] == ["201 1", "201 2", "201 1 replayed"]

    def test_bytes_that_are_no_text_are_replayed(self, shop: Shop, store: MemoryStore) -> None:
        """Of a stream as a whole."""
        shop.serve(Count(chunks=[b"\xff", b"\0"]), store=store)
        assert [shop.request().body for _ in range(2)] == [b"\xff\0"] * 2

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
        shop.serve(Count(), store=store, policy=ORDER)
        shop.request(**AT[0])
        (record,) = store.scan()
        assert record.label == "anybody/o-7"
        assert record.task in {"POST /orders", "POST /<path:path>"}
        clock.advance(7 * DAY)
        assert str(shop.request(**AT[0])) == "201 2"

    def test_outage_of_the_store_runs_nothing(self, shop: Shop, store: MemoryStore) -> None:
        """503: the claim was not confirmed."""
        faulty = FaultyStore(store)
        faulty.faults.extend(["request lost"] * 9)
        shop.serve(Count(), store=faulty)
        refused = shop.request()
        assert (str(refused), refused.headers["retry-after"]) == ("503 store-unavailable later", "1")
        faulty.faults.clear()
        assert str(shop.request()) == "201 1"

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

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (
                {"status": Status.COMPLETED, "result": json.dumps(answer(202, "theirs")), "expires_at": 2**50},
                "202 theirs",
            ),
            ({}, "409 in-flight later"),
        ],
    )
    def test_request_that_was_taken_over_has_no_outcome_of_its_own(
        self, shop: Shop, store: MemoryStore, change: Any, told: str
    ) -> None:
        """The outcome of the request that took over is the answer, or there is none yet."""

        def respond() -> Reply:
            (record,) = store.scan()
            about: dict[str, Any] = {"revision": "r", "owner": "o", "content_type": "application/json"}
            other = replace(record, fencing_token=record.fencing_token + 1, **about, **change)
            assert store.swap(other, record.revision) == other
            return Reply()

        shop.serve(respond, store=store)
        assert str(shop.request()) == told

    def test_signals_are_sent(self, shop: Shop, store: MemoryStore) -> None:
        """As of tasks; the sender has the request's name."""
        seen: list[str] = []

        def note(sender: Any, **told: Any) -> None:
            seen.append(sender.name.partition("/")[0])

        with_signal = signals.replayed
        with_signal.connect(note)
        try:
            shop.serve(Count(), store=store)
            shop.request()
            shop.request()
        finally:
            with_signal.disconnect(note)
        assert seen == ["POST "]

    @pytest.mark.parametrize(
        "error",
        [KeyReused("another", "t-1"), StoreMisconfigured("the store", "swap", "no table"), ZeroDivisionError()],
        ids=lambda each: type(each).__name__,
    )
    def test_exception_that_is_not_the_requests_own_passes(
        self, shop: Shop, store: MemoryStore, error: Exception
    ) -> None:
        """As it does without the coat; the claim is given back."""

        def respond() -> Reply:
            raise error

        shop.serve(respond, store=store)
        with pytest.raises(type(error)):
            shop.request()
        assert [each.status for each in store.scan()] == [Status.RELEASED]

    def test_outage_after_the_application_is_told_apart(self, shop: Shop, store: MemoryStore) -> None:
        """The response of a request whose record cannot be confirmed is not sent."""

        def respond() -> Reply:
            raise StoreUnavailable("the store", "swap", "no answer")  # as a step of the view's raises it

        shop.serve(respond, store=store)
        assert str(shop.request()) == "503 unconfirmed later"

    def test_bad_options_are_refused_at_once(self, shop: Shop, store: Store) -> None:
        """Not when the first request comes."""
        with pytest.raises(PolicyError, match="caller"):
            shop.serve(Count(), store=store, caller="cookie")
