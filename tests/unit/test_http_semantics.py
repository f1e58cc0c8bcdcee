"""The rules of requests with an ``Idempotency-Key``, apart from any framework."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent import KeyReused, LeaseLost, OutcomeUnknown, Policy, PolicyError, ResultLost
from celery_idempotent.contrib.http import answer
from celery_idempotent.contrib.http.guard import Buffer, Response, _Unkept, finish
from celery_idempotent.contrib.http.semantics import (
    LONGEST_KEY,
    HttpAnswer,
    HttpRules,
    Problem,
    RequestFacts,
    answer_of,
    by_authorization,
    caller_of,
    key_of,
    record_of,
)
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.troubleshooting import link

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)
BARE = "!#$%&'*+.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:/=@-"
BYTES = Codec("json", frozenset({"application/json"}))


def quoted(key: str) -> str:
    """``key`` as RFC 9651 serialises a string."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def facts(path: str = "/", body: bytes = b"", route: str | None = None) -> RequestFacts:
    return RequestFacts("POST", path, "", "", body, "k", "", route)


def rules(**options: Any) -> HttpRules:
    return HttpRules(**{"caller": "anybody", **options})


@given(PRINTABLE)
def test_structured_string_is_its_value(key: str) -> None:
    """Whatever printable characters it holds; blanks around it do not count."""
    assert key_of([quoted(key)]) == key_of([f" {quoted(key)}\t"]) == key


@given(st.text(BARE, min_size=1, max_size=255))
def test_key_without_quotes_is_the_same_key(key: str) -> None:
    """As most clients send it."""
    assert key_of([key]) == key_of([quoted(key)]) == key


@given(st.text(max_size=300))
def test_every_other_line_is_refused(line: str) -> None:
    """No line is read as a key that it does not spell."""
    key = key_of([line])
    bare = line.strip(" \t")
    assert key is Problem.KEY_MALFORMED or (isinstance(key, str) and bare in (key, quoted(key)))


@pytest.mark.parametrize(
    "line",
    ["", '""', "a,b", '"a", "b"', '"a";b=1', "a;b", '"a\\b"', '"a', 'a"', '"é"', "é", "a b", "a\n", '"a\n"', "x" * 256],
)
def test_malformed_key_is_refused(line: str) -> None:
    """Lists, parameters, text that is not ASCII, and keys that are too long or empty."""
    assert key_of([line]) is Problem.KEY_MALFORMED


def test_one_line_is_all_that_is_allowed() -> None:
    """Two are refused even if they are equal (section 2.1); none is a key that is missing."""
    assert (key_of(["a", "a"]), key_of([])) == (Problem.KEY_MALFORMED, Problem.KEY_MISSING)


@pytest.mark.parametrize(("length", "fits"), [(1, True), (LONGEST_KEY, True), (LONGEST_KEY + 1, False)])
def test_key_has_up_to_255_characters(length: int, fits: bool) -> None:
    """As Stripe's; quotes and escapes are not counted."""
    assert key_of([quoted('"' * length)]) == ('"' * length if fits else Problem.KEY_MALFORMED)


@given(
    st.integers(200, 599),
    st.lists(st.tuples(st.sampled_from(["location", "x-a"]), st.text(st.characters(max_codepoint=255)))),
    st.binary(),
)
def test_record_gives_the_response_back(status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    """Through the serialiser, whatever the body holds."""
    given_answer = HttpAnswer(status, tuple(headers), body)
    assert answer_of(BYTES.keep(record_of(given_answer)).value) == given_answer


@pytest.mark.parametrize("name", ["Set-Cookie", "Date", "Server", "Connection", "Transfer-Encoding", "Content-Length"])
def test_headers_about_one_message_are_not_recorded(name: str) -> None:
    """Cookies are one client's, and the rest is one connection's."""
    assert answer_of(record_of(HttpAnswer(200, ((name, "x"), ("ETag", "1"))))).headers == (("ETag", "1"),)


ORDER = UUID(int=1)


@pytest.mark.parametrize(
    ("content", "given_headers", "headers", "body"),
    [
        ({"order": ORDER}, {"Location": "/1"}, {"content-type": "application/json", "Location": "/1"}, None),
        ("é", {}, {"content-type": "text/plain; charset=utf-8"}, "é".encode()),
        (b"\xff", {"Content-Type": "x/y"}, {"Content-Type": "x/y"}, b"\xff"),
        (b"x", None, {"content-type": "application/octet-stream"}, b"x"),
        (None, None, {}, b""),
    ],
)
def test_answers_for_a_commit_are_built(content: Any, given_headers: Any, headers: Any, body: bytes | None) -> None:
    """JSON, text, bytes or nothing; a header of the author's counts."""
    found = answer_of(answer(201, content, given_headers))
    assert (found.status, dict(found.headers)) == (201, headers)
    assert found.body == body if body is not None else json.loads(found.body) == {"order": str(ORDER)}


@pytest.mark.parametrize(
    ("status", "content", "headers", "named"),
    [
        *((status, None, {}, "status") for status in (99, 103, 600, "201", None)),
        *((status, "", {"ETag": "1"}, None) for status in (204, 205, 304)),
        *((status, {"a": 1}, {}, "status") for status in (204, 205, 304)),
        *((201, None, {name: "x"}, "headers") for name in ("", "a b", "a:", "é", "a\n", 1)),
        *(
            (201, None, {"Location": value}, "headers")
            for value in ("\u2603", "/a\r\nB: c", "/a\n", "\0", " a", "a\t", 3)
        ),
        *((201, None, {"Location": value}, None) for value in ("", "/a b", "\xe9", "a\tb")),
    ],
)
def test_answer_that_no_server_can_send_is_refused_before_it_is_committed(
    status: Any, content: Any, headers: Any, named: str | None
) -> None:
    """Its effect would be there, and each repetition would fail."""
    if named is None:
        assert answer_of(answer(status, content, headers)).status == status
        return
    with pytest.raises(PolicyError) as refused:
        answer(status, content, headers)
    assert refused.value.option == named


def test_result_that_is_no_response_is_sent_as_json() -> None:
    """As a view has committed it, or a person has said."""
    assert answer_of({"booked": 5}) == HttpAnswer(200, (("content-type", "application/json"),), b'{"booked": 5}')
    assert answer_of(None) == HttpAnswer(204)


@pytest.mark.parametrize(
    ("value", "caller"),
    [
        *((None, Problem.CALLER_UNKNOWN), ("", Problem.CALLER_UNKNOWN), ("a", "a"), (7, "7")),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        *((value, None) for value in (True, 1.5, b"a", object())),
    ],
)
def test_caller_is_text(value: Any, caller: str | Problem | None) -> None:
    """An id of a database or of a token; nothing names nobody, and two callers must not be written alike."""
    if caller is not None:
        assert caller_of(value) == caller
        return
    with pytest.raises(PolicyError, match="caller"):
        caller_of(value)


def test_authorization_is_hashed() -> None:
    """The token is not in the key; where there is none, nobody calls."""
    found = by_authorization("Bearer secret")
    assert "secret" not in str(found)
    assert found != by_authorization("Bearer other")
    assert by_authorization(None) is by_authorization("") is None


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("caller", ["cookie"]),
        ("required", [1]),
        ("outcomes", [200]),
        ("max_request", [0]),
        ("max_response", [True]),
        ("documentation", ["shop.example/api", "https://a.example/b#c", "https://a.example/\u30d8", "https://a.b/\0"]),
        ("methods", [(), "POST", 5, ("GET", "POST")]),
        ("headers", [(1,), ("Set-Cookie",)]),
        ("policy", ["order_id", Policy("body.order"), Policy(label="order"), Policy(publish="once")]),
        ("policy", [Policy(on_conflict="skip")]),
    ],
)
def test_options_that_cannot_work_are_refused(option: str, values: list[Any]) -> None:
    """Where they are written."""
    for value in values:
        with pytest.raises(PolicyError):
            rules(**{option: value})


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        *((declared, None) for declared in (None, "", "0", "0010")),
        *((declared, Problem.BODY_TOO_LARGE) for declared in ("11", "9" * 5000)),
        *((declared, Problem.BODY_MALFORMED) for declared in ("-1", "ten", "²")),
    ],
)
def test_declared_length_is_checked(declared: str | None, problem: Problem | None) -> None:
    """Before anything is read."""
    assert rules(max_request=10).problem_of_length(declared) is problem


def test_name_of_a_request_is_bounded() -> None:
    """The route is what people know; a path may be as long as a client likes."""
    assert facts("/orders/7", route="/orders/{id}").name == "POST /orders/{id}"
    assert facts("/a\0b/\ud800 é").name == "POST /a%00b/%5Cud800%20%C3%A9"
    assert 10 < len(facts("/" + "x" * 5000).name) < 1000


def test_keys_do_not_depend_on_how_routes_are_called() -> None:
    """A route that is written in another way is the same operation; a policy may still have a scope of its own."""
    assert [rules(policy=Policy(scope=each)).policy.scope for each in (None, "shop")] == ["http", "shop"]


@pytest.mark.parametrize(("chunks", "is_kept"), [([b"o", b"k"], True), ([b"o", b"k!"], False)])
def test_response_of_the_largest_size_is_kept(chunks: list[bytes], is_kept: bool) -> None:
    """Whether it comes at once or in parts."""
    for body in (b"".join(chunks), Buffer(2).fill(chunks)):
        value = Response(None, 200, [], body).value(rules(max_response=2))
        assert value["text"] == "ok" if is_kept else isinstance(value, _Unkept)


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_no_serialiser_keeps_a_response_that_is_too_large(serializer: str) -> None:
    """And the record says why."""
    kept = Codec(serializer, frozenset({"application/json"})).keep(_Unkept(20, 10))
    assert kept.encoded is None
    assert "20 bytes, over max_response=10" in str(kept.lost)


def test_buffer_is_read_as_often_as_needed() -> None:
    """Small ones as a whole; large ones in parts, from a file."""
    small, large = Buffer(10).fill([b"a", b"b"]), Buffer(10).fill([b"x" * 70_000])
    assert bytes(small) == bytes(small) == b"ab"
    assert (len(large), [len(each) for each in large.chunks()]) == (70_000, [65_536, 4_464])


def test_body_that_is_no_json_is_text() -> None:
    """For labels and fingerprints."""
    assert facts(body=b"[" * 100_000).arguments()["body"] == "[" * 100_000


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LeaseLost("k", 1), 409),  # who repeats the request gets what the other one has done
        (KeyReused("k", "t-1"), 422),
        (OutcomeUnknown("k", "nobody knows"), 500),
        (ResultLost("k", "too large"), 500),
    ],
    ids=lambda each: type(each).__name__,
)
def test_error_about_the_request_is_told_and_one_about_another_operation_is_not(error: Exception, status: int) -> None:
    """What the application asks of others is its own business."""
    refusal = rules().refusal_of(error, "k", has_run=True)
    assert refusal is not None
    assert refusal.status == status
    assert rules().refusal_of(error, "other", has_run=True) is None


@pytest.mark.parametrize(("seconds", "told"), [(0, "1"), (0.2, "1"), (1, "1"), (1.2, "2")])
def test_retry_after_is_whole_seconds_and_never_too_early(seconds: float, told: str) -> None:
    """Zero would have a client ask without a pause."""
    assert ("retry-after", told) in rules().refusal(Problem.IN_FLIGHT, seconds).headers


@pytest.mark.parametrize("problem", Problem)
def test_type_of_a_problem_leads_to_its_entry(problem: Problem) -> None:
    """On the site of this library, or on the page that the application names."""
    ours, theirs = rules().refusal(problem), rules(documentation="https://shop.example/api").refusal(problem)
    types = [json.loads(each.body)["type"] for each in (ours, theirs)]
    assert types == [link(f"http#{problem.value[0]}"), f"https://shop.example/api#{problem.value[0]}"]
    assert dict(theirs.headers)["link"] == '<https://shop.example/api>; rel="describedby"; type="text/html"'
    assert "link" not in dict(ours.headers)


def test_request_that_waits_without_an_event_loop_is_refused() -> None:
    """It would never go on; only code of ASGI may wait."""
    with pytest.raises(RuntimeError, match="no event loop"):
        finish(asyncio.sleep(0))
