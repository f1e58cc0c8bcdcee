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
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import an_app

__all__ = ["Behaviour", "Got", "Reply", "Sender", "Shop"]


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
        assert told["status"] == self.status
        assert told["title"]
        assert told["detail"]
        return str(told["type"]).partition("#")[2]


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
    """An application that numbers its orders."""

    def __init__(self, **reply: Any) -> None:
        self.orders = 0
        self._reply = reply

    def __call__(self) -> Reply:
        self.orders += 1
        return Reply(**{"body": b'{"order": %d}' % self.orders, **self._reply})


class Behaviour:
    """The tests; a subclass says by its fixture ``shop`` of what."""

    @pytest.fixture
    def store(self) -> Iterator[MemoryStore]:
        """A store of the test's own."""
        with_store = MemoryStore()
        yield with_store
        with_store.close()

    def test_repetition_gets_the_same_answer(self, shop: Shop, store: MemoryStore) -> None:
        """The application runs once; status, headers and body are those of the first request."""
        count = Count(headers={"Location": "/orders/1", "Set-Cookie": "session=1", "Content-Type": "application/json"})
        shop.serve(count, store=store)

        first, again = shop.request(), shop.request('"k-1"')

        assert count.orders == 1
        assert (first.status, first.body) == (again.status, again.body) == (201, b'{"order": 1}')
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["location"] == "/orders/1"
        assert again.headers["content-type"] == first.headers["content-type"]
        assert again.headers.get("content-length") == first.headers.get("content-length")
        assert "set-cookie" in first.headers
        assert "set-cookie" not in again.headers

    def test_application_reads_the_whole_body(self, shop: Shop, store: MemoryStore) -> None:
        """What was read for the fingerprint is there for the application."""
        shop.serve(Count(), store=store)
        shop.request(body=b"x" * 100_000)
        assert shop.bodies == [b"x" * 100_000]

    def test_each_key_path_method_and_caller_is_an_operation(self, shop: Shop, store: MemoryStore) -> None:
        """Equal keys of two callers are two operations."""
        count = Count()
        shop.serve(count, store=store, caller="authorization")

        shop.request(authorization="Bearer a")
        shop.request("k-2", authorization="Bearer a")
        shop.request(path="/refunds", authorization="Bearer a")
        shop.request(method="PATCH", authorization="Bearer a")
        shop.request(authorization="Bearer b")

        assert count.orders == 5

    def test_what_no_key_protects_runs_each_time(self, shop: Shop, store: MemoryStore) -> None:
        """Neither a request without key, nor one of a method that is not protected."""
        count = Count()
        shop.serve(count, store=store)
        for _ in range(2):
            shop.request(None)
            shop.request(method="PUT")
        assert count.orders == 4

    def test_missing_and_malformed_keys_are_refused(self, shop: Shop, store: MemoryStore) -> None:
        """400, and nothing runs; the problem's type is in the author's page."""
        count = Count()
        shop.serve(count, store=store, required=True, documentation="https://shop.example/api")

        missing = shop.request(None)

        assert (missing.status, missing.problem) == (400, "key-missing")
        assert json.loads(missing.body)["type"] == "https://shop.example/api#key-missing"
        assert missing.headers["link"] == '<https://shop.example/api>; rel="describedby"; type="text/html"'
        assert {shop.request(key).problem for key in ("a,b", '"a', "x" * 256, '""', "a b")} == {"key-malformed"}
        assert count.orders == 0

    def test_caller_that_cannot_be_told_is_refused(self, shop: Shop, store: MemoryStore) -> None:
        """403: without him, others could be answered with his responses."""
        count = Count()
        shop.serve(count, store=store, caller="authorization")
        assert (shop.request().status, shop.request().problem) == (403, "caller-unknown")
        assert count.orders == 0

    @pytest.mark.filterwarnings("ignore:caller is not given")
    def test_session_is_not_answered_with_anothers_response(self, shop: Shop, store: MemoryStore) -> None:
        """A cookie alone may be one, and nobody has said who it is; who is told by a header keeps to himself."""
        shop.serve(Count(), store=store, caller=None)
        assert {shop.request(cookie=f"session={each}").problem for each in ("ann", "bob")} == {"caller-unknown"}
        answers = [shop.request(cookie="a=b", authorization=each).body for each in ("ann", "bob", "ann")]
        assert answers == [b'{"order": 1}', b'{"order": 2}', b'{"order": 1}']
        assert [shop.request().body for _ in range(2)] == [b'{"order": 3}'] * 2

    def test_function_names_the_caller(self, shop: Shop, store: MemoryStore) -> None:
        """Of the framework's own request."""
        count = Count()
        tenants = iter([1, 2, "1"])
        shop.serve(count, store=store, caller=lambda request: next(tenants))
        assert [shop.request().body for _ in range(3)] == [b'{"order": 1}', b'{"order": 2}', b'{"order": 1}']

    def test_key_with_another_payload_is_refused(self, shop: Shop, store: MemoryStore) -> None:
        """422: another body, query or content type; parameters of the type do not count."""
        shop.serve(Count(), store=store)
        shop.request(content_type="application/json")
        assert (shop.request(body=b"[]", content_type="application/json").problem) == "key-reused"
        assert (shop.request(path="/orders?now=1", content_type="application/json").status) == 422
        assert (shop.request(content_type="text/plain").status) == 422
        assert (shop.request(content_type="application/json; charset=utf-8").status) == 201

    def test_repetition_meets_a_request_in_flight(self, shop: Shop, store: MemoryStore) -> None:
        """409 with Retry-After, while the first one runs."""
        met: list[Got] = []

        def respond() -> Reply:
            beside = Thread(target=lambda: met.append(shop.request()))
            beside.start()
            beside.join()
            return Reply()

        shop.serve(respond, store=store)
        assert shop.request().status == 201
        assert (met[0].status, met[0].problem) == (409, "in-flight")
        assert int(met[0].headers["retry-after"]) >= 1

    @pytest.mark.parametrize("status", [200, 303, 400, 404, 422])
    def test_outcome_is_replayed(self, shop: Shop, store: MemoryStore, status: int) -> None:
        """2xx, 3xx and 4xx are."""
        count = Count(status=status)
        shop.serve(count, store=store)
        assert [shop.request().status for _ in range(2)] == [status, status]
        assert count.orders == 1

    @pytest.mark.parametrize("status", [401, 408, 409, 425, 429, 500, 503])
    def test_what_is_no_outcome_gives_the_claim_back(self, shop: Shop, store: MemoryStore, status: int) -> None:
        """The caller gets the response, and his repetition runs."""
        count = Count(status=status)
        shop.serve(count, store=store)
        assert [shop.request().body for _ in range(2)] == [b'{"order": 1}', b'{"order": 2}']
        assert [each.status for each in store.scan()] == [Status.RELEASED]

    def test_under_refuse_every_response_is_an_outcome(self, shop: Shop, store: MemoryStore) -> None:
        """A 500 may have begun; running again is what the policy refuses."""
        count = Count(status=500)
        shop.serve(count, store=store, policy=Policy(on_takeover="refuse"))
        assert [shop.request().status for _ in range(2)] == [500, 500]
        assert count.orders == 1

    def test_author_says_what_an_outcome_is(self, shop: Shop, store: MemoryStore) -> None:
        """His word counts, also under refuse."""
        count = Count(status=503)
        shop.serve(
            count,
            store=store,
            policy=Policy(on_takeover="refuse"),
            outcomes=lambda status: status != 503,
            required=True,
        )
        assert [shop.request().status for _ in range(2)] == [503, 503]
        assert count.orders == 2

    def test_stream_is_sent_when_it_is_recorded(self, shop: Shop, store: MemoryStore) -> None:
        """As a whole, and a repetition gets all of it; bytes that are no text included."""
        shop.serve(Count(chunks=[b"\xff", b"\0", b"c" * 10]), store=store)
        first, again = shop.request(), shop.request()
        assert first.body == again.body == b"\xff\0" + b"c" * 10

    @pytest.mark.parametrize("reply", [{"body": b"x" * 20}, {"chunks": [b"x" * 10] * 2}])
    def test_response_that_is_too_large_is_sent_once(self, shop: Shop, store: MemoryStore, reply: Any) -> None:
        """The operation is completed; a repetition is told that the response is lost, and nothing runs."""
        count = Count(**reply)
        shop.serve(count, store=store, max_response=19)
        assert shop.request().body == b"x" * 20
        again = shop.request()
        assert (again.status, again.problem) == (500, "response-lost")
        assert count.orders == 1
        (record,) = store.scan()
        assert "20 bytes, over max_response=19" in str(record.error)

    def test_request_that_is_too_large_is_refused(self, shop: Shop, store: MemoryStore) -> None:
        """413, and nothing runs."""
        count = Count()
        shop.serve(count, store=store, max_request=10)
        assert (shop.request(body=b"x" * 11).problem, shop.request(body=b"x" * 10).status) == ("body-too-large", 201)
        assert count.orders == 1

    def test_headers_are_chosen(self, shop: Shop, store: MemoryStore) -> None:
        """By their names; what identifies one response is the author's to leave out."""
        shop.serve(Count(headers={"X-Request": "1", "Location": "/1"}), store=store, headers=("location",))
        shop.request()
        again = shop.request()
        assert again.headers["location"] == "/1"
        assert "x-request" not in again.headers

    def test_outage_of_the_store_runs_nothing(self, shop: Shop, store: MemoryStore) -> None:
        """503 with Retry-After: the claim was not confirmed."""
        count = Count()
        faulty = FaultyStore(store)
        faulty.faults.extend(["request lost"] * 9)
        shop.serve(count, store=faulty)
        refused = shop.request()
        assert (refused.status, refused.problem) == (503, "store-unavailable")
        assert refused.headers["retry-after"] == "1"
        assert count.orders == 0
        faulty.faults.clear()
        assert shop.request().status == 201

    def test_outage_after_the_application_is_told_apart(self, shop: Shop, store: MemoryStore) -> None:
        """The response of a request whose record cannot be confirmed is not sent."""

        def respond() -> Reply:
            raise StoreUnavailable("the store", "swap", "no answer")  # as a step of the view's raises it

        shop.serve(respond, store=store)
        assert (shop.request().status, shop.request().problem) == (503, "unconfirmed")

    def test_nobody_repeats_what_nobody_knows(self, shop: Shop, store: MemoryStore) -> None:
        """500, until a person has decided; what he says is then the answer."""

        def respond() -> Reply:
            current_attempt().step("pay", lambda step: 1)
            raise OutcomeUnknown(current_attempt().key, "the bank does not say")

        shop.serve(respond, store=store)
        assert [shop.request().problem for _ in range(2)] == ["outcome-unknown"] * 2

        (record,) = store.scan()
        app = an_app(idempotency_store=store)
        resolve(record.key, completed=answer(200, "paid"), by="ann", reason="asked the bank", app=app)
        again = shop.request()
        assert (again.status, again.body, again.headers["idempotent-replayed"]) == (200, b"paid", "true")

    def test_step_is_made_once(self, shop: Shop, store: MemoryStore) -> None:
        """The view has its attempt, and a repetition after a failure goes on where it was."""
        steps: list[str] = []
        statuses = iter([500, 201])

        def respond() -> Reply:
            current_attempt().step("pay", lambda step: steps.append(step.key))
            return Reply(next(statuses))

        shop.serve(respond, store=store)
        assert [shop.request().status for _ in range(3)] == [500, 201, 201]
        assert len(steps) == 1

    def test_policy_is_in_force(self, shop: Shop, store: MemoryStore) -> None:
        """Its label is of the request's own fields, its mode is its mode, and the record has the request's name."""
        count = Count()
        shop.serve(count, store=store, policy=Policy(label=("caller", "body.order"), fingerprint="body.order"))
        shop.request(body=b'{"order": "o-7", "at": 1}')
        shop.request(body=b'{"at": 2, "order": "o-7"}')
        assert count.orders == 1
        (record,) = store.scan()
        assert record.label == "anybody/o-7"
        assert record.task in {"POST /orders", "POST /<path:path>"}

        shop.serve(count, store=store, policy=Policy(mode="off"))
        shop.request(body=b'{"order": "o-7"}')
        assert count.orders == 2

    @pytest.mark.parametrize("mode", ["observe", "off"])
    def test_policy_that_does_not_enforce_refuses_nothing(self, shop: Shop, store: MemoryStore, mode: Any) -> None:
        """Everything runs, and the application reads all of its body."""
        count = Count()
        callers = iter(["ann", None, "ann", "ann"])
        shop.serve(
            count,
            store=store,
            policy=Policy(mode=mode),
            required=True,
            max_request=10,
            caller=lambda request: next(callers),
        )
        shop.request(None, body=b"x" * 11)
        shop.request("a,b", body=b"x" * 11)
        shop.request(body=b"x" * 11)
        assert [shop.request().status for _ in range(3)] == [201] * 3
        assert count.orders == 6
        assert shop.bodies == [b"x" * 11] * 3 + [b"{}"] * 3

    def test_request_without_key_has_an_attempt_that_protects_nothing(self, shop: Shop, store: MemoryStore) -> None:
        """Its steps are made each time, under keys of its own."""
        keys: list[str] = []

        def respond() -> Reply:
            assert current_attempt().number == 0
            current_attempt().step("pay", lambda step: keys.append(step.key))
            return Reply()

        shop.serve(respond, store=store)
        assert [shop.request(None).status for _ in range(2)] == [201, 201]
        assert len(set(keys)) == 2
        assert not list(store.scan())

    def test_outcome_of_who_took_over_is_the_answer(self, shop: Shop, store: MemoryStore) -> None:
        """Not that of the request that was slower."""

        def respond() -> Reply:
            (record,) = store.scan()
            result = json.dumps(answer(202, "by another"))
            other = replace(
                record,
                status=Status.COMPLETED,
                revision="r",
                owner="o",
                result=result,
                content_type="application/json",
                expires_at=store.now() + 60_000,
            )
            assert store.swap(other, record.revision) == other
            return Reply()

        shop.serve(respond, store=store)
        got = shop.request()
        assert (got.status, got.body) == (202, b"by another")

    def test_request_that_was_taken_over_is_sent_again(self, shop: Shop, store: MemoryStore) -> None:
        """409: the other one runs, and its outcome counts."""

        def respond() -> Reply:
            (record,) = store.scan()
            other = replace(record, revision="r", owner="o", fencing_token=record.fencing_token + 1)
            assert store.swap(other, record.revision) == other
            return Reply()

        shop.serve(respond, store=store)
        assert (shop.request().status, shop.request().problem) == (409, "in-flight")

    def test_result_that_is_not_kept_is_no_content(self, shop: Shop, store: MemoryStore) -> None:
        """The first request gets the response."""
        shop.serve(Count(), store=store, policy=Policy(private=True))
        first, again = shop.request(), shop.request()
        assert (first.status, first.body) == (201, b'{"order": 1}')
        assert (again.status, again.body, again.headers["idempotent-replayed"]) == (204, b"", "true")

    def test_signals_are_sent(self, shop: Shop, store: MemoryStore) -> None:
        """As of tasks; the sender has the request's name."""
        seen: list[str] = []

        def note(sender: Any, **told: Any) -> None:
            seen.append(sender.name)

        signals.replayed.connect(note)
        try:
            shop.serve(Count(), store=store)
            shop.request()
            shop.request()
        finally:
            signals.replayed.disconnect(note)
        assert len(seen) == 1
        assert seen[0].startswith("POST /")

    def test_errors_that_are_not_the_requests_own_pass(self, shop: Shop, store: MemoryStore) -> None:
        """What another operation says is the application's to answer; so is a store that is set up wrongly."""
        for error in (KeyReused("another", "t-1"), StoreMisconfigured("the store", "swap", "no table")):

            def respond(error: Exception = error) -> Reply:
                raise error

            shop.serve(respond, store=store)
            with pytest.raises(type(error)):
                shop.request(str(type(error).__name__))

    def test_exception_of_the_application_gives_the_claim_back(self, shop: Shop, store: MemoryStore) -> None:
        """It passes, as it does without the coat."""

        def respond() -> Reply:
            raise ZeroDivisionError

        shop.serve(respond, store=store)
        with pytest.raises(ZeroDivisionError):
            shop.request()
        assert [each.status for each in store.scan()] == [Status.RELEASED]

    def test_bad_options_are_refused_at_once(self, shop: Shop, store: Store) -> None:
        """Not when the first request comes."""
        with pytest.raises(PolicyError, match="caller"):
            shop.serve(Count(), store=store, caller="cookie")
