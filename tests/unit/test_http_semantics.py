"""The rules of requests with an ``Idempotency-Key``, apart from any framework."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent import KeyReused, LeaseLost, OutcomeUnknown, Policy, PolicyError, ResultLost
from celery_idempotent.contrib.http import answer, semantics
from celery_idempotent.contrib.http.guard import Buffer, Response, _Unkept, finish
from celery_idempotent.contrib.http.semantics import LONGEST_KEY, HttpAnswer, Problem, answer_of, caller_of, key_of
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.troubleshooting import link

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)
BARE = "!#$%&'*+.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:/=@-"
CODEC = Codec("json", frozenset({"application/json"}))
ORDER = UUID(int=1)


def quoted(key: str) -> str:
    """``key`` as RFC 9651 serialises a string."""
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def facts(path: str = "/", body: bytes = b"", route: str | None = None) -> semantics.RequestFacts:
    return semantics.RequestFacts("POST", path, "", "", body, "k", "", route)


def rules(**options: Any) -> semantics.HttpRules:
    return semantics.HttpRules(**{"caller": "anybody", **options})


@given(PRINTABLE, st.text(BARE, min_size=1, max_size=255))
def test_structured_string_is_its_value_and_quotes_may_be_left_out(key: str, bare: str) -> None:
    """Whatever printable characters it holds; blanks around it do not count."""
    assert key_of([quoted(key)]) == key_of([f" {quoted(key)}\t"]) == key
    assert key_of([bare]) == key_of([quoted(bare)]) == bare


@given(st.text(max_size=40))
def test_every_other_line_is_refused(line: str) -> None:
    """No line is read as a key that it does not spell."""
    key = key_of([line])
    assert key is Problem.KEY_MALFORMED or (isinstance(key, str) and line.strip(" \t") in (key, quoted(key)))


@pytest.mark.parametrize(
    "lines",
    [
        *([line] for line in ("", '""', '"a", "b"', '"a";b=1', '"a\\b"', '"a', 'a"', '"é"', "é", "a b", '"a\n"')),
        [quoted("x" * (LONGEST_KEY + 1))],
        ["a", "a"],
    ],
)
def test_malformed_key_is_refused(lines: list[str]) -> None:
    """Lists, parameters, text that is not ASCII, keys that are too long or empty, and two lines even if equal."""
    assert (key_of(lines), LONGEST_KEY) == (Problem.KEY_MALFORMED, 255)


@given(
    st.integers(200, 599),
    st.lists(st.tuples(st.sampled_from(["location", "x-a"]), st.text(st.characters(max_codepoint=255)))),
    st.binary(),
)
def test_record_gives_the_response_back(status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    """Through the serialiser, whatever the body holds; cookies are one client's, and some headers one connection's."""
    of_one = [(name, "x") for name in ("Set-Cookie", "Date", "Server", "Connection", "Transfer-Encoding")]
    sent = HttpAnswer(status, (*headers, *of_one, ("Content-Length", "1")), body)
    assert answer_of(CODEC.keep(semantics.record_of(sent)).value) == HttpAnswer(status, tuple(headers), body)


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
    """JSON, text, bytes or nothing; a header of the author's counts; what is no response is sent as JSON."""
    assert answer_of({"booked": 5}) == HttpAnswer(200, (("content-type", "application/json"),), b'{"booked": 5}')
    found = answer_of(answer(201, content, given_headers))
    assert (found.status, dict(found.headers)) == (201, headers)
    assert found.body == body if body is not None else json.loads(found.body) == {"order": str(ORDER)}


@pytest.mark.parametrize(
    ("status", "content", "headers", "named"),
    [
        *((status, None, {}, "status") for status in (99, 103, 600, "201", None)),
        *((204, content, {"ETag": "1"}, named) for content, named in (("", None), ({"a": 1}, "status"))),
        *((201, None, {name: "x"}, "headers") for name in ("", "a b", "é", "a\n", 1)),
        *((201, None, {"Location": value}, "headers") for value in ("\u2603", "/a\r\nB: c", "\0", " a", "a\t", 3)),
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


@pytest.mark.parametrize(
    ("value", "caller"),
    [
        *((None, Problem.CALLER_UNKNOWN), ("", Problem.CALLER_UNKNOWN), ("a", "a"), (7, "7"), (ORDER, str(ORDER))),
        *((value, None) for value in (True, 1.5, b"a")),
    ],
)
def test_caller_is_text(value: Any, caller: str | Problem | None) -> None:
    """An id of a database or of a token, which is hashed; nothing names nobody, and no two are written alike."""
    assert "secret" not in str(semantics.by_authorization("Bearer secret"))
    if caller is not None:
        assert caller_of(value) == caller
        return
    with pytest.raises(PolicyError, match="caller"):
        caller_of(value)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *(("caller", ["cookie"]), ("required", [1]), ("outcomes", [200]), ("max_request", [0])),
        ("max_response", [1.5]),
        ("documentation", ["shop.example/api", "https://a.example/b#c", "https://a.example/\u30d8"]),
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


def test_name_of_a_request_is_bounded() -> None:
    """The route is what people know; a path may be as long as a client likes."""
    assert facts("/orders/7", route="/orders/{id}").name == "POST /orders/{id}"
    assert facts("/a\0b/\ud800 é").name == "POST /a%00b/%5Cud800%20%C3%A9"
    assert 10 < len(facts("/" + "x" * 5000).name) < 1000


@pytest.mark.parametrize(("chunks", "is_kept"), [([b"o", b"k"], True), ([b"o", b"k!"], False)])
def test_response_of_the_largest_size_is_kept(chunks: list[bytes], is_kept: bool) -> None:
    """Whether it comes at once or in parts."""
    for body in (b"".join(chunks), Buffer(2).fill(chunks)):
        value = Response(None, 200, [], body).value(rules(max_response=2))
        assert value["text"] == "ok" if is_kept else isinstance(value, _Unkept)


def test_no_serialiser_keeps_a_response_that_is_too_large() -> None:
    """Not even pickle, and the record says why."""
    kept = Codec("pickle", frozenset({"application/json"})).keep(_Unkept(20, 10))
    assert (kept.encoded, "max_response=10" in str(kept.lost)) == (None, True)


def test_large_body_is_read_in_parts_as_often_as_needed() -> None:
    """And one that is nested too deeply for JSON is text."""
    large = Buffer(10).fill([b"x" * 70_000])
    assert [[len(each) for each in large.chunks()] for _ in range(2)] == [[65_536, 4_464]] * 2
    assert facts(body=b"[" * 100_000).arguments()["body"] == "[" * 100_000


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LeaseLost("k", 1), 409),  # a repetition gets what the other one has done
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


@pytest.mark.parametrize(("seconds", "told"), [(0, "1"), (1, "1"), (1.2, "2")])
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


def test_request_that_waits_without_an_event_loop_is_refused() -> None:
    """It would never go on; only code of ASGI may wait."""
    with pytest.raises(RuntimeError, match="no event loop"):
        finish(asyncio.sleep(0))
