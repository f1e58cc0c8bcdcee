"""The direct path to DynamoDB beside boto3's: what they send, and what they make of every answer."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import boto3
import pytest
from botocore import UNSIGNED
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.httpsession import URLLib3Session
from botocore.session import get_session
from botocore.stub import Stubber
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from click.testing import CliRunner
from moto.core.models import botocore_stubber

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.dynamodb import DynamoDBStore, direct
from celery_idempotent.testing.contract import a_record
from tests.support.certificates import new_certificates
from tests.support.scripted_http import CLOSE, SILENCE, Asked, ScriptedServer, answer, refusal

PATHS = ("direct", "boto3")
SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before tries, which nobody waits for."""
    taken: list[float] = []
    clock = SimpleNamespace(sleep=taken.append)
    monkeypatch.setattr("botocore.endpoint.time", clock)
    return taken


def opened(server: ScriptedServer, path: str, *, token: str | None = None, **options: Any) -> DynamoDBStore:
    """A store on one of the paths."""
    scheme = "https" if server.tls else "http"
    given: dict[str, Any] = {
        "endpoint_url": f"{scheme}://127.0.0.1:{server.port}",
        "region": "eu-west-1",
        "session": _session(token),
    }
    return DynamoDBStore("orders", transport=path, **{**given, **options})


@cache
def _session(token: str | None) -> boto3.session.Session:
    """One for all tests: each reads the models of AWS's services anew."""
    return boto3.session.Session("AKID", SECRET, token)


# -- what is sent

RECORD = replace(a_record(), process="host/1/2#abc", steps={"a": {"ü": 1}}, lease_until=1_800_000_000_000)
DONE = replace(RECORD, revision="b", result="☃ 'quoted' \"twice\"", content_type="application/json")
WRITES: list[Mapping[str, Any]] = [
    {"Put": {"TableName": "stock", "Item": {"sku": "a", "raw": b"\0\1", "n": Decimal("1.5"), "all": {"x", "y"}}}},
    {
        "Update": {
            "TableName": "stock",
            "Key": {"sku": {"S": "b"}},
            "UpdateExpression": "SET #n = :n",
            "ExpressionAttributeNames": {"#n": "n"},
            "ExpressionAttributeValues": {":n": {"L": [{"B": b"\2"}, {"M": {"x": {"BS": [b"\3"]}}}, {"B": "text"}]}},
        }
    },
]

OPERATIONS: dict[str, Callable[[DynamoDBStore], object]] = {
    "a claim": lambda store: store.swap(RECORD, None),
    "a completion": lambda store: store.swap(DONE, "a"),
    "a result in bytes": lambda store: store.swap(replace(DONE, result=b"\0\xff"), "a"),
    "the check": lambda store: store.verify(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temporary credentials": {"token": "Fwo+Gq/token=="},
    "own names": {"key_attr": "pk", "sort_key_attr": "sk", "ttl_attr": "ttl"},
    "user agent": {"config": Config(user_agent="mine", user_agent_extra="more/2")},
    "legacy retries": {"config": Config(retries={"mode": "legacy"})},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("act", OPERATIONS.values(), ids=OPERATIONS)
def test_both_paths_send_the_same(
    server: ScriptedServer, act: Callable[[DynamoDBStore], object], options: dict[str, Any]
) -> None:
    """Line, headers and body, byte by byte, but for what is made for each request; on a new connection and on a used
    one."""
    for path in PATHS:
        store = opened(server, path, **options)
        act(store)
        act(store)
        store.close()

    first, second, *boto3s = server.asked
    assert _same(first) == _same(second) == _same(boto3s[0]) == _same(boto3s[1])
    assert (first.connection, boto3s[0].connection) == (second.connection, boto3s[1].connection)
    assert len({each.headers["amz-sdk-invocation-id"] for each in server.asked}) == 4


def _same(asked: Asked) -> tuple[object, ...]:
    """Of a request, what two that say the same have in common."""
    once = {"x-amz-date", "amz-sdk-invocation-id", "authorization"}
    signed = re.fullmatch(
        r"(AWS4-HMAC-SHA256 Credential=AKID/)\d{8}(/eu-west-1/dynamodb/aws4_request, SignedHeaders=\S+, "
        r"Signature=)[0-9a-f]{64}",
        asked.headers["authorization"],
    )
    assert signed
    body = re.sub(rb'(?<="ClientRequestToken": ")[0-9a-f-]{36}(?=")', b"token", asked.body)
    values = {name: value for name, value in asked.headers.items() if name not in once}
    return asked.method, asked.target, sorted(asked.headers), values, signed.groups(), body


def test_headers_that_http_gives_are_given_once(server: ScriptedServer) -> None:
    """With AWS's own runtime installed, botocore's signer sets ``host`` by itself."""
    store = opened(server, "direct")

    def as_awscrt_does(request: Any, **_: Any) -> None:
        request.headers["host"] = f"127.0.0.1:{server.port}"

    store._connected().meta.events.register("request-created.dynamodb", as_awscrt_does)
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    assert [each.names.count("host") for each in server.asked] == [1, 1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ["", "/", "/prefix/of~ours/"])
def test_what_is_sent_is_signed(server: ScriptedServer, path: str, place: str) -> None:
    """A server that computes the signature from what came over the wire finds the same."""
    store = opened(server, path, token="token", endpoint_url=f"http://127.0.0.1:{server.port}{place}")
    store.swap(RECORD, None)
    store.swap_with(DONE, "a", WRITES)

    for asked in server.asked:
        names = re.findall(r"SignedHeaders=([^,]+)", asked.headers["authorization"])[0].split(";")
        assert {"host", "x-amz-date", "x-amz-security-token", "x-amz-target"} <= set(names)
        headers = {name: asked.headers[name] for name in names}
        request = AWSRequest(asked.method, f"http://{headers['host']}{asked.target}", headers, asked.body)
        request.context["timestamp"] = headers["x-amz-date"]
        signer = SigV4Auth(Credentials("AKID", SECRET), "dynamodb", "eu-west-1")
        signature = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
        assert asked.headers["authorization"].endswith(f"Signature={signature}")


# -- what becomes of answers

THEIRS = replace(a_record(), revision="theirs", result=b"\0\xff", content_type="application/x-python-serialize")


def _lost(path: str = "direct", **more: Any) -> bytes:
    return refusal("ConditionalCheckFailedException", "The conditional request failed", **more)


def _item(record: Record) -> dict[str, Any]:
    item = DynamoDBStore("orders")._item(record)
    return {name: {"B": "AP8="} if "B" in value else value for name, value in item.items()}


ANSWERS: dict[str, list[bytes]] = {
    "success": [answer()],
    "success without a checksum": [answer(x_amz_crc32="")],
    "success without a date": [answer(date="")],
    "success in chunks": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    ],
    "success after a 100": [b"HTTP/1.1 100 Continue\r\n\r\n" + answer()],
    "success on a last connection": [answer(connection="close")],
    "lost to a record": [_lost(Item=_item(THEIRS))],
    "lost to nothing": [_lost()],
    "lost to a damaged item": [_lost(Item={**_item(THEIRS), "status": {"S": "DONE"}})],
    "lost to an item with a list": [_lost(Item={**_item(THEIRS), "status": {"L": [{"S": "a"}]}})],
    "refusal that quotes a lost condition": [refusal("ValidationException", "ConditionalCheckFailedException")],
    "no table": [refusal("ResourceNotFoundException")],
    "no permission": [refusal("AccessDeniedException")],
    "wrong credentials": [refusal("UnrecognizedClientException")],
    "wrong signature": [refusal("InvalidSignatureException")],
    "old credentials": [refusal("ExpiredTokenException")],
    "another key": [refusal("ValidationException", "Missing the key pk in the item")],
    "too large": [refusal("ValidationException", "Item size has exceeded the maximum allowed size")],
    "unusable": [refusal("ValidationException", "One or more parameter values were invalid")],
    "capital message": [answer(400, b'{"__type":"x#ValidationException","Message":"of size"}')],
    "throttled once": [refusal("ProvisionedThroughputExceededException"), answer()],
    "throttled": [refusal("ThrottlingException")],
    "over the limit": [refusal("RequestLimitExceeded")],
    "in progress": [refusal("TransactionInProgressException")],
    "out of order once": [refusal("InternalServerError", status=500), answer()],
    "out of order": [refusal("InternalServerError", status=500)],
    "a page": [answer(503, b"<html>later</html>", x_amz_crc32="")],
    "a page that does not pass": [answer(403, b"<html>no</html>", x_amz_crc32="")],
    "moved": [answer(302, b"", location="http://elsewhere/")],
    "closed once": [CLOSE, answer()],
    "closed": [CLOSE],
    "no HTTP": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    "torn once": [answer()[:40], answer()],
    "wrong checksum of a refusal": [answer(400, b'{"__type":"x#ValidationException"}', x_amz_crc32="1"), answer()],
}


@pytest.mark.parametrize("is_first", [True, False], ids=["new connection", "used connection"])
@pytest.mark.parametrize("script", ANSWERS.values(), ids=ANSWERS)
def test_both_paths_make_the_same_of_an_answer(server: ScriptedServer, script: list[bytes], is_first: bool) -> None:
    """The same result or error, by the same cause, with the same clock; what is unusual, boto3 has the last word on."""
    outcomes = []
    for path in PATHS:
        store = opened(server, path, local_clock=lambda: 1_795_334_400_000)
        if not is_first:
            store.verify()
        server.asked.clear()
        server.script[:] = [*script, *script[-1:] * 3]
        try:
            told: tuple[object, ...] = (store.swap(DONE, "a"),)
        except (StoreUnavailable, RecordTooLarge) as error:
            told = type(error), _steady(error), _classes(error.__cause__), _steady(error.__cause__)
        outcomes.append((told, store.now()))
        server.script.clear()

    assert outcomes[0] == outcomes[1]


def _classes(error: object) -> list[str]:
    """Of an error, by name: every client has classes of its own."""
    return [each.__qualname__ for each in type(error).__mro__]


def _steady(error: object) -> str:
    """An error's text without the numbers of the moment."""
    return re.sub(r"0x[0-9a-f]+|port=\d+|'\S+ \S+ \S+ OK'", "", str(error))


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ([answer(200, b"<html>hello</html>", x_amz_crc32="")], "ResponseParserError"),
        ([answer(200, b"[]")], "ResponseParserError"),
        ([answer(x_amz_crc32="1")], "ChecksumError"),
        ([answer(202)], "ResponseParserError"),
        ([answer(204, b"")], "ResponseParserError"),
        ([refusal("ConditionalCheckFailedException", status=200)], "ResponseParserError"),
    ],
    ids=["no JSON", "no object", "wrong checksum", "accepted", "empty", "error"],
)
def test_a_success_that_cannot_be_read_is_none(server: ScriptedServer, script: list[bytes], cause: str) -> None:
    """Most of these boto3 takes for a success in the end; the direct path says that there is no certain answer."""
    store = opened(server, "direct")
    store.verify()
    server.script += script

    with pytest.raises(StoreUnavailable) as raised:
        store.swap(RECORD, None)

    assert type(raised.value.__cause__).__name__ == cause
    assert server.script == []


def test_reply_after_an_interim_one_is_nobody_elses(server: ScriptedServer) -> None:
    """A hint is no success, and the refusal behind it, however late, is not read as the next request's answer."""
    store = opened(server, "direct")
    store.verify()
    server.script.append(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    with pytest.raises(StoreUnavailable):
        store.swap(RECORD, None)

    assert store.swap(RECORD, None) == RECORD
    assert [each.connection for each in server.asked] == [0, 0, 1]


def test_a_torn_success_is_none(server: ScriptedServer) -> None:
    """What is there of it could be anything."""
    store = opened(server, "direct")
    store.verify()
    server.script += [answer(200, b"{", content_length="2", connection="close", x_amz_crc32="")]

    with pytest.raises(StoreUnavailable):
        store.swap(RECORD, None)


# -- tries


def test_write_without_an_answer_is_boto3s_to_try_again(server: ScriptedServer, pauses: list[float]) -> None:
    """The first try is one more than boto3's own, and boto3 says how long to wait before each of its next ones."""
    server.script += [refusal("ThrottlingException"), CLOSE, refusal("InternalServerError", status=500), answer()]

    assert opened(server, "direct").swap(RECORD, None) == RECORD

    numbers = [re.findall(r"attempt=(\d)", each.headers["amz-sdk-request"])[0] for each in server.asked]
    assert numbers == ["1", "1", "2", "3"]
    assert len(pauses) == 2


# -- connections


def test_a_connection_that_the_server_closed_is_replaced(server: ScriptedServer, pauses: list[float]) -> None:
    """Servers close idle connections; that is no failure, and costs no try."""
    store = opened(server, "direct")
    store.swap(RECORD, None)
    store.swap(RECORD, None)
    server.hang_up()

    store.swap(RECORD, None)

    assert [each.connection for each in server.asked] == [0, 0, 1]
    assert pauses == []


def test_a_last_reply_ends_its_connection(server: ScriptedServer) -> None:
    """The server says so, and the next request goes on another, even if the server leaves it to us to close it."""
    store = opened(server, "direct")
    store.swap(RECORD, None)
    server.script.append(answer(connection="Close"))
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    assert [each.connection for each in server.asked] == [0, 0, 1]


@pytest.mark.parametrize("path", PATHS)
def test_silence_on_a_used_connection_is_an_outage(server: ScriptedServer, path: str) -> None:
    """After the read timeout of the configuration; what comes late on that connection is nobody's answer."""
    store = opened(server, path, config=Config(read_timeout=0.2, retries={"total_max_attempts": 1}))
    store.verify()
    silent = PATHS.index("boto3") - PATHS.index(path) + 1  # the direct path's first try, and boto3's one
    server.script += [SILENCE] * silent

    with pytest.raises(StoreUnavailable, match="Read timeout"):
        store.swap(RECORD, None)

    assert store.swap(RECORD, None) == RECORD
    assert [each.connection for each in server.asked] == [0, *range(silent), silent]


def test_a_signal_leaves_no_lock_behind(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft time limit that raises while Python code takes a lock leaves it taken, and what comes later waits for
    ever: so none is taken, neither for a used connection, nor where the session is asked."""
    store = opened(server, "direct")
    store.verify()
    enter = threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        enter(condition)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)

    assert store.swap(RECORD, None) == RECORD
    assert store.get("a") is None


def test_no_more_connections_are_kept_than_configured(server: ScriptedServer) -> None:
    """Those that were needed at once, and are too many now, are closed; what they answered counts."""
    store = opened(server, "direct", config=Config(max_pool_connections=1))
    store.verify()
    pool = store._direct()._way()[1]._pool
    kept = pool._get_conn()

    assert store.swap(RECORD, None) == RECORD
    pool._put_conn(kept)
    assert pool.num_connections == 2
    assert pool.pool.qsize() == 1
    assert kept.is_closed
    assert store.swap(RECORD, None) == RECORD
    assert [each.connection for each in server.asked] == [0, 1, 1]


def test_both_ways_share_connections(server: ScriptedServer) -> None:
    """What is rare goes through the client, over the same connections, before and after the direct path."""
    store = opened(server, "direct")
    store.swap(RECORD, None)
    store.swap(RECORD, None)
    assert store.get("a") is None
    store.swap(RECORD, None)

    assert [each.connection for each in server.asked] == [0, 0, 0, 0]


def test_a_store_closed_by_another_thread_connects_again(server: ScriptedServer) -> None:
    """What is under way then makes its request all the same."""
    store = opened(server, "direct")
    store.swap(RECORD, None)
    path = store._direct()
    store.close()
    path._way()[1]._pool.close()  # as an older urllib3 does by itself

    path.put({"TableName": "orders", "Item": {}})

    assert [each.connection for each in server.asked] == [0, 1]


@pytest.mark.parametrize(
    "inside",
    ["botocore.httpsession.URLLib3Session._get_request_target", "urllib3.connectionpool.HTTPConnectionPool._put_conn"],
)
def test_a_botocore_with_other_insides_is_used_from_outside(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """Where the session keeps its pool elsewhere, requests go through the session."""
    monkeypatch.delattr(inside)
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", lambda session, request: _Empty())

    assert opened(server, "direct").swap(RECORD, None) == RECORD


def test_a_botocore_without_a_session_is_used_as_a_whole(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even that is found, everything goes through the client."""
    store = opened(server, "direct")
    client: Any = store._connected()
    monkeypatch.setattr(client, "_endpoint", SimpleNamespace(make_request=client._endpoint.make_request))

    assert store.swap(RECORD, None) == RECORD
    assert "elsewhere" in store.way


class _Empty:
    status_code = 200
    headers: Mapping[str, str] = {}
    content = b"{}"


def test_a_tunnel_through_a_proxy_has_tls_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy, bundle of authorities and client certificate are botocore's; the second request goes at once."""
    files = new_certificates(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(files.authority))
    with ScriptedServer(tls=files.for_server(asks_clients=True)) as server:
        proxy = f"http://127.0.0.1:{server.port}"
        shown = Config(proxies={"https": proxy}, client_cert=(str(files.certificate), str(files.key)))
        store = opened(server, "direct", config=shown)
        used = Watched(monkeypatch)
        store.swap(RECORD, None)
        store.swap(RECORD, None)

        assert server.tunnels == [f"127.0.0.1:{server.port}"]
        assert [(each.target, each.connection) for each in server.asked] == [("/", 0), ("/", 0)]
        assert used.session == 1

        stranger = opened(server, "direct", config=Config(retries={"total_max_attempts": 1}))
        with pytest.raises(StoreUnavailable):
            stranger.swap(RECORD, None)


def test_a_proxy_that_is_no_tunnel_is_asked_by_botocore(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must be told the whole address, and perhaps a password."""
    proxy = f"http://me:secret@127.0.0.1:{server.port}"
    store = opened(server, "direct", endpoint_url="http://dynamodb.example", config=Config(proxies={"http": proxy}))
    used = Watched(monkeypatch)
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    assert [each.target for each in server.asked] == ["http://dynamodb.example/"] * 2
    assert all("proxy-authorization" in each.headers for each in server.asked)
    assert used.session == 2


class Watched:
    """Counts the requests that go through botocore's session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = 0
        send = URLLib3Session.send

        def counted(session: URLLib3Session, request: Any) -> Any:
            self.session += 1
            return send(session, request)

        monkeypatch.setattr(URLLib3Session, "send", counted)


# -- credentials


def test_refreshed_credentials_are_used_at_once(server: ScriptedServer) -> None:
    """Assumed roles end within the hour; each request is signed with what the session has then."""
    keys = iter("ABCD")

    def refreshed() -> dict[str, str]:
        key = next(keys)
        expiry = (datetime.now(UTC) + timedelta(seconds=expires.pop(0))).isoformat()
        return {"access_key": f"key{key}", "secret_key": "s", "token": f"token{key}", "expiry_time": expiry}

    expires = [3600.0, 3600.0]
    botocores = get_session()
    botocores._credentials = RefreshableCredentials.create_from_metadata(refreshed(), refreshed, "test")  # type: ignore[attr-defined]
    store = opened(server, "direct", session=boto3.session.Session(botocore_session=botocores))
    store.swap(RECORD, None)
    store.swap(RECORD, None)
    botocores._credentials._expiry_time = datetime.now(UTC)  # type: ignore[attr-defined]
    store.swap(RECORD, None)

    assert [each.headers["x-amz-security-token"] for each in server.asked] == ["tokenA", "tokenA", "tokenB"]
    assert ["Credential=keyA/" in each.headers["authorization"] for each in server.asked] == [True, True, False]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["token\n", "token\r", "token\r\nX-Other: 1"])
def test_line_break_in_a_credential_is_refused(server: ScriptedServer, path: str, token: str) -> None:
    """A new token with a line break would end the headers there, and what follows would be another header or
    request."""
    botocores = get_session()
    botocores._credentials = Credentials("AKID", SECRET, "token")  # type: ignore[attr-defined]
    store = opened(server, path, session=boto3.session.Session(botocore_session=botocores))
    store.verify()
    botocores._credentials.token = token  # type: ignore[attr-defined]

    with pytest.raises(StoreUnavailable, match="Invalid header value"):
        store.swap(RECORD, None)

    assert len(server.asked) == 1


# -- who is not bypassed


def test_who_answers_in_the_servers_place_still_does(server: ScriptedServer) -> None:
    """moto does it by a hook: a direct path around it would reach the real AWS."""
    store = opened(server, "direct")
    seen: list[Any] = []

    def mock(request: Any, **_: Any) -> AWSResponse:
        seen.append(json.loads(request.body))
        return AWSResponse(request.url, 200, cast(Any, {}), cast(Any, _Raw()))

    store._connected().meta.events.register("before-send.dynamodb.PutItem", cast(Any, mock))
    store.swap(RECORD, None)
    store.swap(DONE, "a")

    assert server.asked == []
    _, claim, completion = seen  # the first was the look for such hooks, which changes nothing
    assert (claim["Item"]["revision"], completion["Item"]["revision"]) == ({"S": RECORD.revision}, {"S": "b"})


def test_requests_are_shown_to_nobody_where_nobody_looks(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make one as hooks know it takes longer than to send it."""
    store = opened(server, "direct")
    events = store._connected().meta.events
    events.unregister(
        "before-send", cast(Any, botocore_stubber)
    )  # moto hooks every client of a process that has imported it
    store.swap(RECORD, None)  # the first write looks for hooks
    shown: list[Any] = []
    monkeypatch.setattr(direct, "prepared", lambda *request: shown.append(request))

    store.swap(RECORD, None)

    assert (len(server.asked), shown) == (2, [])


def test_who_looks_at_requests_still_does(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the session's may add a header that is not signed; the path remains the direct one."""
    store = opened(server, "direct")
    seen: list[str] = []

    def trace(request: Any, **_: Any) -> None:
        seen.append(request.headers["X-Amz-Target"].decode())  # bytes, as boto3 shows them
        request.headers["X-Trace"] = "root"

    store._connected().meta.events.register("before-send.dynamodb", trace)
    used = Watched(monkeypatch)
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    assert seen == ["DynamoDB_20120810.PutItem"] * 3
    assert [each.headers["x-trace"] for each in server.asked] == ["root", "root"]
    assert [each.names.count("content-length") for each in server.asked] == [1, 1]
    assert used.session == 1


class _Raw:
    def stream(self) -> list[bytes]:
        return [b"{}"]


@pytest.mark.parametrize(
    "config", [Config(signature_version=UNSIGNED), Config(retries={"mode": "adaptive"})], ids=["unsigned", "adaptive"]
)
def test_what_the_direct_path_cannot_do_boto3_does(server: ScriptedServer, config: Config) -> None:
    """A limit of the rate, and requests that are not signed."""
    store = opened(server, "direct", config=config)

    assert store.swap(RECORD, None) == RECORD
    assert store._indirect_for


@pytest.mark.parametrize("is_known", [False, True])
def test_discovered_endpoints_are_left_to_boto3(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """botocore asks for the endpoint first. That request in the place of a write would win every swap and keep
    nothing."""
    endpoint = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_DISCOVERY_ENABLED", "true")
    store = opened(server, "direct", endpoint_url=None)
    found = json.dumps({"Endpoints": [{"Address": endpoint, "CachePeriodInMinutes": 60}]}).encode()
    server.script.append(answer(200, found))
    if is_known:
        store.get("a")

    store.swap(RECORD, None)
    store.swap_with(DONE, "a", WRITES)

    operations = [each.headers["x-amz-target"].partition(".")[2] for each in server.asked]
    assert operations[0] == "DescribeEndpoints"
    assert operations[-2:] == ["PutItem", "TransactWriteItems"]
    assert "discovered" in store.way


def test_a_stubbed_client_keeps_its_stubs(server: ScriptedServer) -> None:
    """botocore's Stubber answers before a request is made."""
    store = opened(server, "direct")
    with Stubber(store._connected()) as stubber:
        for _ in range(2):
            stubber.add_response("put_item", {})
        store.swap(RECORD, None)

    assert store._indirect_for
    assert server.asked == []


def test_session_and_client_of_the_user_keep_to_boto3(server: ScriptedServer) -> None:
    """Their events are the user's; a session whose events do not matter may say so."""
    endpoint = f"http://127.0.0.1:{server.port}"
    session = _session(None)
    hooked = DynamoDBStore("orders", session=session, region="eu-west-1", endpoint_url=endpoint)
    client = DynamoDBStore(
        "orders", client=lambda: session.client("dynamodb", region_name="eu-west-1", endpoint_url=endpoint)
    )
    named = DynamoDBStore("orders", session=session, region="eu-west-1", endpoint_url=endpoint, transport="direct")

    for store in (hooked, client, named):
        store.verify()

    assert [bool(each._indirect_for) for each in (hooked, client, named)] == [True, True, False]


@pytest.mark.parametrize(
    ("path", "told"), [("direct", "on the direct path"), ("boto3", r"through boto3 \(so configured\)")]
)
def test_check_says_which_path_it_is(server: ScriptedServer, path: str, told: str) -> None:
    """So that whoever misses a hook's events, or the speed, can see why."""
    app = Celery("paths", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=opened(server, path), task_acks_late=True, task_reject_on_worker_lost=True)
    app.task(name="charge", base=IdempotentTask, shared=False)(print)

    done = CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=app))

    assert re.search(f"/orders answers and can be used {told}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("options", [{"transport": "fast"}, {"transport": "direct", "client": lambda: None}])
def test_transport_that_cannot_be_is_refused(options: Any) -> None:
    """A client of the user's is boto3's."""
    with pytest.raises(PolicyError, match="transport"):
        DynamoDBStore("orders", **options)
