"""Large results in a bucket: over HTTP against an emulator of S3, and with answers that it would not give."""

import os
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

from celery_idempotent import Policy, ResultLost, StoreMisconfigured, StoreUnavailable, current_attempt
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, ObjectMissing, open_large_results
from celery_idempotent.stores.objects.s3 import S3Objects
from celery_idempotent.stores.wrappers import Offloading
from lab.embedded import EmbeddedAws
from tests.support.deliveries import Shop
from tests.support.scripted_http import CLOSE, ScriptedServer, answer

LARGE = "x" * 300_000


class Bucket:
    """A new bucket, as its owner sees it."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.name = f"results-{uuid4().hex}"
        session = boto3.session.Session("test", "test")
        self.client = session.client("s3", endpoint_url=aws.endpoint, region_name="us-east-1")
        self.client.create_bucket(Bucket=self.name)
        self.large = open_large_results(aws.bucket_url(f"{self.name}/shop", "over=1MB"))

    @property
    def names(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])]

    @property
    def unreachable(self) -> LargeResults:
        return open_large_results(f"s3://test:test@{self.name}?endpoint=http://127.0.0.1:1&region=us-east-1")


@pytest.fixture
def bucket(aws: EmbeddedAws) -> Bucket:
    return Bucket(aws)


def test_bucket_keeps_what_it_is_given(bucket: Bucket) -> None:
    """Whole, as often as it is written, until it is deleted."""
    data, objects = os.urandom(3_000_000), bucket.large.objects
    for _ in range(2):
        objects.put("shop/a/b", data)
    assert objects.get("shop/a/b") == data
    for _ in range(2):
        objects.delete("shop/a/b")
    with pytest.raises(ObjectMissing, match="has no object 'shop/a/b'"):
        objects.get("shop/a/b")


def test_bucket_is_checked_as_a_task_uses_it(aws: EmbeddedAws, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the prefix, which may be all that is granted; the environment names endpoint and login as elsewhere."""
    Offloading(MemoryStore(), bucket.large).verify()
    assert bucket.names == ["shop/celery-idempotent-check"]
    for name, value in (("ENDPOINT_URL", aws.endpoint), ("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(f"AWS_{name}", value)
    Offloading(MemoryStore(), open_large_results(f"s3://{bucket.name}?region=us-east-1")).verify()


def test_missing_bucket_is_told_and_nobody_there_is_an_outage(aws: EmbeddedAws, bucket: Bucket) -> None:
    """One needs somebody to make it, the other may come back."""
    missing = open_large_results(aws.bucket_url(f"missing-{uuid4().hex}"))
    for ask in (Offloading(MemoryStore(), missing).verify, lambda: missing.objects.get("a")):
        with pytest.raises(StoreMisconfigured, match="the bucket does not exist; create it"):
            ask()
    with pytest.raises(StoreUnavailable) as told:
        bucket.unreachable.objects.get("a")
    assert (type(told.value), type(told.value.__cause__)) == (StoreUnavailable, EndpointConnectionError)


def _error(code: str, status: int) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message></Error>".encode()
    return answer(status, body, content_type="application/xml", x_amz_crc32="")


def _page(status: int) -> bytes:
    return answer(status, b"<html>log in, or a bad gateway</html>", content_type="text/html", x_amz_crc32="")


_HALF = answer(200, b"half", etag='"e"', content_length="8", connection="close", x_amz_crc32="")


@pytest.mark.parametrize(
    ("ask", "script", "told", "words"),
    [
        # What stays so says what to change: neither an outage nor a lost result.
        ("put", _error("AccessDenied", 403), StoreMisconfigured, "the IAM action s3:PutObject is not granted"),
        ("get", _error("AccessDenied", 403), StoreMisconfigured, "without s3:ListBucket, S3 says the same"),
        ("put", _error("InvalidAccessKeyId", 403), StoreMisconfigured, "does not accept the credentials"),
        ("put", _error("AuthorizationHeaderMalformed", 400), StoreMisconfigured, "in another Region; name it"),
        ("get", _error("InvalidObjectState", 403), StoreMisconfigured, "the object is archived"),
        # What may pass is an outage, after the tries of boto3.
        ("put", _error("SlowDown", 503), StoreUnavailable, None),
        ("get", CLOSE, StoreUnavailable, None),
        ("get", _page(502), StoreUnavailable, None),
        ("put", _page(200), StoreUnavailable, "it is not S3's"),  # or a record would point to nothing
        ("put", _error("NoSuchKey", 404), StoreUnavailable, "NoSuchKey"),  # of a put, no object can be missing
        ("get", _HALF, StoreUnavailable, "GetObject"),  # half of a result is none
    ],
)
def test_answer_of_s3_says_whether_to_wait_or_what_to_change(
    ask: str, script: Any, told: type[Exception], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that a result is lost, which none of these does."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
    with ScriptedServer([script] * 3) as server, pytest.raises(told, match=words) as raised:
        _ask(server, ask)
    assert type(raised.value) is told
    assert len(server.asked) == (1 if words else 3)


def _ask(server: ScriptedServer, ask: str) -> None:
    url, session = f"http://127.0.0.1:{server.port}", boto3.session.Session("test", "test")
    objects = S3Objects("results", region="us-east-1", endpoint_url=url, session=session)
    objects.put("a/b", b"data") if ask == "put" else objects.get("a/b")


def test_what_is_sent_has_its_digest() -> None:
    """S3 refuses what was changed on the way."""
    with ScriptedServer([answer(200, b"", etag='"e"', x_amz_crc32="")]) as server:
        _ask(server, "put")
    (asked,) = server.asked
    digest = {name.lower(): value for name, value in asked.headers.items()}["x-amz-checksum-sha256"]
    assert (asked.method, asked.target.partition("?")[0]) == ("PUT", "/results/a/b")
    assert digest == "Om6weQ85rIfJTzhWst0sXREOaBFgImGpqSPTuyOtyLc="


@pytest.mark.parametrize("commits", [False, True], ids=["returned", "committed"])
def test_result_that_an_item_has_no_room_for_is_an_object(aws: EmbeddedAws, bucket: Bucket, commits: bool) -> None:
    """DynamoDB refuses more than 400 KB, whatever ``over`` says; for what somebody deleted nothing runs again."""
    value, name = "x" * 500_000, f"idempotency-{uuid4().hex}"
    write = {"Put": {"TableName": name, "Item": {"idempotencyKey": "mine"}}}

    def does() -> Any:
        return current_attempt().commit(value, writes=[write]) if commits else value

    settings = {"idempotency_store": aws.store_url(name), "idempotency_large_results": bucket.large}
    shop = Shop(Policy("order_id"), **settings)
    runtime_of(shop.app).store.provision()
    shop.does = lambda order_id, cents: does()
    assert [shop.deliver("may").value for _ in range(2)] == [value] * 2
    (kept,) = bucket.names

    bucket.client.delete_object(Bucket=bucket.name, Key=kept)
    ended = shop.deliver("may")
    assert isinstance(ended.value, ResultLost)
    assert kept in ended.value.reason
    assert shop.runs == ["may"]
