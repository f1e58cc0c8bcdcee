"""The direct path to DynamoDB beside boto3's: what they send, and what they make of every answer."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
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
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import RecordUnreadable
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing.contract import a_record
from tests.support.certificates import new_certificates
from tests.support.commands import run
from tests.support.deliveries import an_app
from tests.support.scripted_http import CLOSE, SILENCE, Asked, ScriptedServer, answer, refusal

PATHS = ("direct", "boto3")
SECRET = "wJalrXUtnFEMI/K7MDENG"
ONE_TRY = Config(retries={"total_max_attempts": 1})
THEN = 1_795_334_400_000
"""The date of the server's answers."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before tries, which nobody waits for."""
    taken: list[float] = []
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=taken.append))
    return taken


@pytest.fixture
def by_session(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of the requests that go through botocore's session, in which a direct one is only the first."""
    sent: list[str] = []
    send = URLLib3Session.send

    def noted(session: URLLib3Session, request: Any) -> Any:
        sent.append(request.url)
        return send(session, request)

    monkeypatch.setattr(URLLib3Session, "send", noted)
    return sent


def opened(server: ScriptedServer, path: str | None = "direct", token: str | None = None, **given: Any) -> Any:
    """A store on one of the paths."""
    scheme = "https" if server.tls else "http"
    usual = {"endpoint_url": f"{scheme}://127.0.0.1:{server.port}", "region": "eu-west-1", "session": _session(token)}
    return DynamoDBStore("orders", transport=path, **{**usual, **given})


@cache
def _session(token: str | None) -> boto3.session.Session:
    """One for all tests: each reads the models of AWS's services anew."""
    return boto3.session.Session("AKID", SECRET, token)


def _with_credentials(credentials: Any) -> boto3.session.Session:
    botocores = get_session()
    botocores._credentials = credentials  # type: ignore[attr-defined]
    return boto3.session.Session(botocore_session=botocores)


def connections(server: ScriptedServer) -> list[int]:
    return [each.connection for each in server.asked]


RECORD = replace(a_record(), process="host/1/2#abc", steps={"a": {"ü": 1}}, lease_until=1_800_000_000_000)
DONE = replace(RECORD, revision="b", result="☃ 'quoted' \"twice\"", content_type="application/json")
WRITES = [{"Delete": {"TableName": "stock", "Key": {"sku": "a"}}}]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token": "Fwo+Gq/token=="},
        {"config": Config(user_agent="mine", user_agent_extra="more/2", retries={"mode": "legacy"})},
    ],
    ids=["plain", "temporary credentials", "configured"],
)
def test_both_paths_send_the_same(server: ScriptedServer, options: Any) -> None:
    """Byte by byte, but for what is made for each request: claims, ends and the check, on a new connection or not."""
    for path in PATHS:
        store = opened(server, path, **options)
        store.swap(RECORD, None)
        store.swap(DONE, "a")
        store.verify()
        store.close()

    told = [_steady_part(each) for each in server.asked]
    assert told[:3] == told[3:]
    assert connections(server) == [0, 0, 0, 1, 1, 1]
    assert len({each.headers["amz-sdk-invocation-id"] for each in server.asked}) == 6


def _steady_part(asked: Asked) -> tuple[object, ...]:
    """Of a request, what two that say the same have in common."""
    signed = re.fullmatch(
        r"(AWS4-HMAC-SHA256 Credential=AKID/)\d{8}(/eu-west-1/dynamodb/aws4_request, SignedHeaders=\S+, "
        r"Signature=)[0-9a-f]{64}",
        asked.headers["authorization"],
    )
    assert signed
    once = dict.fromkeys(("x-amz-date", "amz-sdk-invocation-id", "authorization"), "")
    return asked.method, asked.target, sorted({**asked.headers, **once}.items()), signed.groups(), asked.body


def test_what_is_sent_is_signed(server: ScriptedServer) -> None:
    """A server that computes the signature from what came over the wire finds the same."""
    prefixed = f"http://127.0.0.1:{server.port}/prefix/of~ours/"
    opened(server, token="token", endpoint_url=prefixed).swap(RECORD, None)

    (asked,) = server.asked
    names = re.findall(r"SignedHeaders=([^,]+)", asked.headers["authorization"])[0].split(";")
    assert {"host", "x-amz-date", "x-amz-security-token", "x-amz-target"} <= set(names)
    headers = {name: asked.headers[name] for name in names}
    request = AWSRequest(asked.method, f"http://{headers['host']}{asked.target}", headers, asked.body)
    request.context["timestamp"] = headers["x-amz-date"]
    signer = SigV4Auth(Credentials("AKID", SECRET), "dynamodb", "eu-west-1")
    signature = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    assert asked.headers["authorization"].endswith(f"Signature={signature}")


THEIRS = replace(a_record(), revision="theirs", result=b"\0\xff", content_type="application/x-python-serialize")
ITEM: Any = {**DynamoDBStore("orders")._item(THEIRS), "resultData": {"B": "AP8="}}


def lost(**more: Any) -> bytes:
    return refusal("ConditionalCheckFailedException", "The conditional request failed", **more)


WRONG, AWAY = StoreMisconfigured, StoreUnavailable
PAGE, BROKEN = b"<html>later</html>", refusal("InternalServerError", status=500)
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
QUOTED = refusal("ValidationException", "ConditionalCheckFailedException")

ANSWERS: dict[str, tuple[Any, ...]] = {
    "success": (DONE, answer()),
    "success in chunks": (DONE, CHUNKS),
    "lost to a record": (THEIRS, lost(Item=ITEM)),
    "lost to nothing": (None, lost()),
    "lost to a damaged item": ((RecordUnreadable, "damaged"), lost(Item={**ITEM, "status": {"S": "DONE"}})),
    "refusal that quotes a lost condition": ((AWAY, "Conditional"), QUOTED),
    "no table": ((WRONG, "idempotency provision"), refusal("ResourceNotFoundException")),
    "throttled": ((AWAY, "Throttling"), refusal("ThrottlingException")),
    "out of order once": (DONE, BROKEN, answer()),
    "a page": ((AWAY, "503"), answer(503, PAGE, x_amz_crc32="")),
    "closed": ((AWAY, "closed"), CLOSE),
    "closed once": (DONE, CLOSE, answer()),
    "wrong checksum": (DONE, answer(400, b'{"__type":"x#ValidationException"}', x_amz_crc32="1"), answer()),
}


@pytest.mark.parametrize(("expected", "script"), [(each[0], [*each[1:]]) for each in ANSWERS.values()], ids=ANSWERS)
def test_both_paths_make_the_same_of_an_answer(server: ScriptedServer, expected: Any, script: list[bytes]) -> None:
    """The same result or error, by the same cause, with the same clock; what is unusual, boto3 has the last word on."""
    outcomes = []
    for path in PATHS:
        store = opened(server, path, local_clock=lambda: THEN - 60_000)
        store.verify()
        server.script[:] = [*script, *script[-1:] * 3]
        try:
            told: tuple[object, ...] = (store.swap(DONE, "a"),)
        except StoreUnavailable as error:
            told = type(error), _steady(error), _classes(error.__cause__), _steady(error.__cause__)
        outcomes.append((told, store.now()))
        server.script.clear()

    assert outcomes[0] == outcomes[1]
    (kind, *texts), now = outcomes[0]
    wanted, word = expected if isinstance(expected, tuple) else (expected, "")
    assert (kind, word in str(texts), now) == (wanted, True, THEN), texts


def _classes(error: object) -> list[str]:
    """Of an error, by name: every client has classes of its own."""
    return [each.__qualname__ for each in type(error).__mro__]


def _steady(error: object) -> str:
    """An error's text without the numbers of the moment."""
    return re.sub(r"0x[0-9a-f]+|port=\d+|'\S+ \S+ \S+ OK'", "", str(error))


UNREADABLE = {
    "no JSON": answer(200, PAGE, x_amz_crc32=""),
    "wrong checksum": answer(x_amz_crc32="1"),
    "error": refusal("ConditionalCheckFailedException", status=200),
    "torn": answer(200, b"{", content_length="2", connection="close", x_amz_crc32=""),
}


@pytest.mark.parametrize("reply", UNREADABLE.values(), ids=UNREADABLE)
def test_a_success_that_cannot_be_read_is_none(server: ScriptedServer, reply: bytes) -> None:
    """Most of these boto3 takes for a success in the end; the direct path says that there is no certain answer."""
    store = opened(server)
    store.verify()
    server.script.append(reply)

    with pytest.raises(StoreUnavailable):
        store.swap(RECORD, None)

    assert server.script == []


def test_reply_after_an_interim_one_is_nobody_elses(server: ScriptedServer) -> None:
    """A hint is no success, and the refusal behind it, however late, is not read as the next request's answer."""
    store = opened(server)
    store.verify()
    server.script.append(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    with pytest.raises(StoreUnavailable):
        store.swap(RECORD, None)

    assert store.swap(RECORD, None) == RECORD
    assert connections(server) == [0, 0, 1]


def test_write_without_an_answer_is_boto3s_to_try_again(server: ScriptedServer, pauses: list[float]) -> None:
    """The first try is one more than boto3's own, and boto3 says how long to wait before each of its next ones."""
    server.script += [refusal("ThrottlingException"), CLOSE, BROKEN, answer()]

    assert opened(server).swap(RECORD, None) == RECORD

    numbers = [re.findall(r"attempt=(\d)", each.headers["amz-sdk-request"])[0] for each in server.asked]
    assert (numbers, len(pauses)) == (["1", "1", "2", "3"], 2)


def test_connections_are_shared_by_both_ways_and_replaced(server: ScriptedServer, pauses: list[float]) -> None:
    """Servers close idle connections, or say that a reply is the last; that is no failure, and costs no try."""
    store = opened(server)
    store.swap(RECORD, None)
    store.swap(RECORD, None)
    assert store.get("a") is None
    server.hang_up()
    store.swap(RECORD, None)
    server.script.append(answer(connection="Close"))  # and leaves it to us to close it
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    assert (connections(server), pauses) == ([0, 0, 0, 1, 1, 2], [])


@pytest.mark.parametrize("path", PATHS)
def test_silence_on_a_used_connection_is_an_outage(server: ScriptedServer, path: str) -> None:
    """After the read timeout of the configuration; what comes late on that connection is nobody's answer."""
    store = opened(server, path, config=ONE_TRY.merge(Config(read_timeout=0.2)))
    store.verify()
    silent = 2 if path == "direct" else 1  # the direct path's first try, and boto3's one
    server.script += [SILENCE] * silent

    with pytest.raises(StoreUnavailable, match="Read timeout"):
        store.swap(RECORD, None)

    assert store.swap(RECORD, None) == RECORD
    assert connections(server) == [0, *range(silent), silent]


def test_a_signal_leaves_no_lock_behind(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft time limit that strikes while Python code takes a lock leaves it taken for ever: so none is taken."""
    store = opened(server)
    store.verify()
    enter = threading.Condition.__enter__

    def interrupted(condition: threading.Condition) -> bool:
        enter(condition)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)

    assert store.swap(RECORD, None) == RECORD
    assert store.get("a") is None


def test_a_store_closed_by_another_thread_connects_again(server: ScriptedServer) -> None:
    """What is under way then makes its request all the same."""
    store = opened(server)
    store.swap(RECORD, None)
    path = store._direct()
    store.close()
    path._way()[1]._pool.close()  # as an older urllib3 does by itself

    path.put({"TableName": "orders", "Item": {}})

    assert connections(server) == [0, 1]


def test_botocore_changed_inside_is_used_from_outside(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the session keeps its pool elsewhere, requests go through the session."""
    monkeypatch.delattr("urllib3.connectionpool.HTTPConnectionPool._put_conn")
    empty = SimpleNamespace(status_code=200, headers={}, content=b"{}")
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", lambda session, request: empty)

    assert opened(server).swap(RECORD, None) == RECORD


def test_a_tunnel_through_a_proxy_has_tls_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_session: list[str]
) -> None:
    """Proxy, bundle of authorities and client certificate are botocore's; the second request goes at once."""
    files = new_certificates(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(files.authority))
    with ScriptedServer(tls=files.for_server(asks_clients=True)) as server:
        proxies = {"https": f"http://127.0.0.1:{server.port}"}
        shown = Config(proxies=proxies, client_cert=(str(files.certificate), str(files.key)))
        store = opened(server, config=shown)
        store.swap(RECORD, None)
        store.swap(RECORD, None)

        assert server.tunnels == [f"127.0.0.1:{server.port}"]
        assert [(each.target, each.connection) for each in server.asked] == [("/", 0), ("/", 0)]
        assert len(by_session) == 1
        with pytest.raises(StoreUnavailable):
            opened(server, config=ONE_TRY).swap(RECORD, None)


def test_a_proxy_that_is_no_tunnel_is_asked_by_botocore(server: ScriptedServer, by_session: list[str]) -> None:
    """It must be told the whole address, and perhaps a password."""
    proxies = {"http": f"http://me:secret@127.0.0.1:{server.port}"}
    store = opened(server, endpoint_url="http://dynamodb.example", config=Config(proxies=proxies))
    store.swap(RECORD, None)
    store.swap(RECORD, None)

    asked = [(each.target, "proxy-authorization" in each.headers) for each in server.asked]
    assert (asked, len(by_session)) == ([("http://dynamodb.example/", True)] * 2, 2)


def test_refreshed_credentials_are_used_at_once(server: ScriptedServer) -> None:
    """Assumed roles end within the hour; each request is signed with what the session has then."""
    keys = iter("AB")

    def refreshed() -> dict[str, str]:
        key, expiry = next(keys), (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        return {"access_key": f"key{key}", "secret_key": "s", "token": f"token{key}", "expiry_time": expiry}

    credentials: Any = RefreshableCredentials.create_from_metadata(refreshed(), refreshed, "test")
    store = opened(server, session=_with_credentials(credentials))
    store.swap(RECORD, None)
    store.swap(RECORD, None)
    credentials._expiry_time = datetime.now(UTC)
    store.swap(RECORD, None)

    assert [each.headers["x-amz-security-token"] for each in server.asked] == ["tokenA", "tokenA", "tokenB"]
    assert ["Credential=keyA/" in each.headers["authorization"] for each in server.asked] == [True, True, False]


def test_line_break_in_a_credential_is_refused(server: ScriptedServer) -> None:
    """A new token with a line break would end the headers there, and begin another header or request."""
    credentials = Credentials("AKID", SECRET, "token")
    store = opened(server, session=_with_credentials(credentials))
    store.verify()
    credentials.token = "token\r\nX-Other: 1"

    with pytest.raises(StoreUnavailable, match="Invalid header value"):
        store.swap(RECORD, None)

    assert len(server.asked) == 1


def test_who_answers_in_the_servers_place_still_does(server: ScriptedServer) -> None:
    """moto does it by a hook: a direct path around it would reach the real AWS."""
    store = opened(server)
    seen: list[Any] = []

    def mock(request: Any, **_: Any) -> AWSResponse:
        seen.append(json.loads(request.body)["Item"].get("revision"))
        return AWSResponse(request.url, 200, cast(Any, {}), cast(Any, SimpleNamespace(stream=lambda: [b"{}"])))

    store._connected().meta.events.register("before-send.dynamodb.PutItem", mock)
    store.swap(RECORD, None)
    store.swap(DONE, "a")

    assert server.asked == []
    assert seen == [None, {"S": RECORD.revision}, {"S": "b"}]  # the first looks for such hooks, and changes nothing
    assert "through boto3 (a hook" in store.way


def test_discovered_endpoints_are_left_to_boto3(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore asks for the endpoint first: in the place of a write, that would win every swap and keep nothing."""
    endpoint = f"http://127.0.0.1:{server.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_DISCOVERY_ENABLED", "true")
    store = opened(server, endpoint_url=None)
    found = json.dumps({"Endpoints": [{"Address": endpoint, "CachePeriodInMinutes": 60}]}).encode()
    server.script.append(answer(200, found))

    store.swap(RECORD, None)
    store.swap_with(DONE, "a", WRITES)

    operations = [each.headers["x-amz-target"].partition(".")[2] for each in server.asked]
    assert operations == ["DescribeEndpoints", "PutItem", "TransactWriteItems"]
    assert "discovered" in store.way


def test_check_says_which_path_it_is_and_why(server: ScriptedServer) -> None:
    """What the direct path cannot do, boto3 does; whoever misses a hook's events, or the speed, can see why."""
    for way, store in (
        ("on the direct path", opened(server)),
        ("through boto3 (so configured)", opened(server, "boto3")),
        ("through boto3 (so configured)", DynamoDBStore("orders", client=opened(server)._connected())),
        ("through boto3 (the client does not sign", opened(server, config=Config(signature_version=UNSIGNED))),
        ("through boto3 (adaptive", opened(server, config=Config(retries={"mode": "adaptive"}))),
    ):
        app = an_app(idempotency_store=store)
        app.task(name="charge", base=IdempotentTask, shared=False)(print)
        assert f"/orders answers and can be used {way}" in run(app, "check").stdout
        assert store.swap(RECORD, None) == RECORD
