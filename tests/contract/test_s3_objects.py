"""Large results in a bucket: over HTTP against an emulator of S3, and with answers that it would not give."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

from celery_idempotent import IdempotentTask, Policy, ResultLost, StoreMisconfigured, StoreUnavailable, current_attempt
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.contents import OBJECT
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, ObjectMissing, open_large_results
from celery_idempotent.stores.objects.s3 import S3Objects
from celery_idempotent.stores.wrappers import Offloading, innermost
from lab.embedded import EmbeddedAws
from tests.support.deliveries import an_app, deliver
from tests.support.scripted_http import CLOSE, ScriptedServer, answer

LARGE = "x" * 300_000


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture
def client(aws: EmbeddedAws) -> Any:
    session = boto3.session.Session("test", "test")
    return session.client("s3", endpoint_url=aws.endpoint, region_name="us-east-1")


@pytest.fixture
def bucket(client: Any) -> str:
    name = f"results-{uuid4().hex}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def large(aws: EmbeddedAws, bucket: str) -> LargeResults:
    return open_large_results(aws.bucket_url(f"{bucket}/shop"))


def _names(client: Any, bucket: str) -> list[str]:
    return [each["Key"] for each in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


class TestBucket:
    """What S3 is asked."""

    def test_it_keeps_what_it_is_given(self, large: LargeResults) -> None:
        """Whole, as often as it is written, until it is deleted."""
        data = os.urandom(3_000_000)
        for _ in range(2):
            large.objects.put("shop/a/b", data)
        assert large.objects.get("shop/a/b") == data
        large.objects.delete("shop/a/b")
        large.objects.delete("shop/a/b")
        with pytest.raises(ObjectMissing, match="has no object 'shop/a/b'"):
            large.objects.get("shop/a/b")

    def test_it_is_checked_by_what_a_task_will_do(self, large: LargeResults, client: Any, bucket: str) -> None:
        """Below the prefix, which may be all that is granted."""
        Offloading(MemoryStore(), large).verify()
        assert _names(client, bucket) == ["shop/celery-idempotent-check"]

    def test_a_bucket_that_is_missing_is_told(self, aws: EmbeddedAws) -> None:
        """With what makes one."""
        large = open_large_results(aws.bucket_url(f"missing-{uuid4().hex}"))
        with pytest.raises(StoreMisconfigured, match=r"PutObject failed: the bucket does not exist; create it"):
            Offloading(MemoryStore(), large).verify()
        with pytest.raises(StoreMisconfigured, match="the bucket does not exist"):
            large.objects.get("a")

    def test_nobody_there_is_an_outage(self, bucket: str) -> None:
        """It may come back."""
        large = open_large_results(f"s3://test:test@{bucket}?endpoint=http://127.0.0.1:1&region=us-east-1")
        with pytest.raises(StoreUnavailable) as told:
            large.objects.get("a")
        assert not isinstance(told.value, StoreMisconfigured)
        assert isinstance(told.value.__cause__, EndpointConnectionError)

    def test_the_environment_names_an_endpoint_as_for_every_client(
        self, aws: EmbeddedAws, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Credentials as well."""
        for name, value in (("ENDPOINT_URL", aws.endpoint), ("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test")):
            monkeypatch.setenv(f"AWS_{name}", value)
        Offloading(MemoryStore(), open_large_results(f"s3://{bucket}?region=us-east-1")).verify()

    def test_a_client_of_ones_own_is_used(self, client: Any, bucket: str) -> None:
        """Made when it is needed, once in each process."""
        made: list[Any] = []

        def make() -> Any:
            made.append(client)
            return client

        objects = S3Objects(bucket, client=make)
        assert made == []
        for _ in range(2):
            objects.put("a", b"1")
        assert len(made) == 1


def _error(code: str, status: int) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message></Error>".encode()
    return answer(status, body, content_type="application/xml", x_amz_crc32="")


def _asked(server: ScriptedServer) -> S3Objects:
    session = boto3.session.Session("test", "test")
    url = f"http://127.0.0.1:{server.port}"
    return S3Objects("results", region="us-east-1", endpoint_url=url, session=session)


_PUT: Callable[[S3Objects], object] = lambda objects: objects.put("a", b"data")  # noqa: E731
_GET: Callable[[S3Objects], object] = lambda objects: objects.get("a")  # noqa: E731


class TestAnswers:
    """What the emulator does not say."""

    @pytest.mark.parametrize(
        ("ask", "code", "status", "told"),
        [
            (_PUT, "AccessDenied", 403, "PutObject failed: the IAM action s3:PutObject is not granted"),
            (_GET, "AccessDenied", 403, "without s3:ListBucket, S3 says the same of an object that is not there"),
            (_PUT, "InvalidAccessKeyId", 403, "does not accept the credentials"),
            (_PUT, "AuthorizationHeaderMalformed", 400, "in another Region; name it"),
            (_GET, "InvalidObjectState", 403, "the object is archived"),
            (_PUT, "EntityTooLarge", 400, "EntityTooLarge: why"),
        ],
    )
    def test_what_stays_so_says_what_to_change(
        self, ask: Callable[[S3Objects], object], code: str, status: int, told: str
    ) -> None:
        """Neither an outage nor a lost result."""
        with ScriptedServer([_error(code, status)] * 3) as server, pytest.raises(StoreMisconfigured, match=told):
            ask(_asked(server))

    @pytest.mark.parametrize("ask", [_PUT, _GET])
    @pytest.mark.parametrize(
        "script",
        [
            [_error("SlowDown", 503)] * 3,
            [_error("InternalError", 500)] * 3,
            [CLOSE] * 3,
            [answer(502, b"<html>bad gateway</html>", content_type="text/html", x_amz_crc32="")] * 3,
        ],
    )
    def test_what_may_pass_is_an_outage(
        self, ask: Callable[[S3Objects], object], script: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the tries of boto3."""
        monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
        with ScriptedServer([*script]) as server, pytest.raises(StoreUnavailable) as told:
            ask(_asked(server))
        assert not isinstance(told.value, StoreMisconfigured)
        assert len(server.asked) == 3

    def test_a_success_that_is_not_s3s_is_none(self) -> None:
        """A page that asks for a login has status 200, too; a record would point to nothing."""
        page = answer(200, b"<html>log in</html>", content_type="text/html", x_amz_crc32="")
        with ScriptedServer([page]) as server, pytest.raises(StoreUnavailable, match="it is not S3's"):
            _asked(server).put("a", b"data")

    def test_a_missing_bucket_is_no_missing_object(self) -> None:
        """Of a put, nothing is missing but the bucket."""
        with ScriptedServer([_error("NoSuchKey", 404)]) as server, pytest.raises(StoreUnavailable):
            _asked(server).put("a", b"data")

    def test_an_answer_that_breaks_off_is_an_outage(self) -> None:
        """Half of a result is none."""
        reply = answer(200, b"half", etag='"e"', content_length="8", connection="close", x_amz_crc32="")
        with ScriptedServer([reply]) as server, pytest.raises(StoreUnavailable, match="GetObject"):
            _asked(server).get("a")

    def test_what_is_sent_has_its_digest(self) -> None:
        """S3 refuses what was changed on the way."""
        with ScriptedServer([answer(200, b"", etag='"e"', x_amz_crc32="")]) as server:
            _asked(server).put("a/b", b"data")
        (asked,) = server.asked
        headers = {name.lower(): value for name, value in asked.headers.items()}
        assert (asked.method, asked.target.partition("?")[0]) == ("PUT", "/results/a/b")
        assert (
            headers["x-amz-checksum-sha256"] == "Om6weQVQmQVnMZ0SvJ7vxkPS5BlBNbZfPFmcpQvHFPo="
            or len(headers["x-amz-checksum-sha256"]) == 44
        )


class TestTasks:
    """A task of an app, by Celery's own tracer, with records in a store over HTTP."""

    @pytest.fixture
    def app(self, aws: EmbeddedAws, bucket: str) -> Any:
        app = an_app(
            idempotency_store=aws.store_url(f"idempotency-{uuid4().hex}"),
            idempotency_large_results=aws.bucket_url(f"{bucket}/shop", "over=1MB"),
        )
        runtime_of(app).store.provision()
        return app

    def _task(self, app: Any, body: Callable[[Any], Any]) -> Any:
        def report(self: Any, month: str) -> Any:
            """Make something large."""
            return body(self)

        policy = Policy("month")
        return app._task_from_fun(
            report, name="report", bind=True, base=IdempotentTask, idempotent=policy, shared=False
        )

    def _record(self, task: Any) -> Any:
        return runtime_of(task.app).store.get(task.idempotency_key_for("may"))

    def test_a_result_that_an_item_has_no_room_for_is_an_object(self, app: Any, client: Any, bucket: str) -> None:
        """DynamoDB refuses an item of more than 400 KB, whatever ``over`` says."""
        value = "x" * 500_000
        task = self._task(app, lambda task: value)
        assert [deliver(task, "may").value for _ in range(2)] == [value] * 2
        assert self._record(task).content_type == OBJECT
        assert len(_names(client, bucket)) == 1

    def test_steps_that_an_item_has_no_room_for_are_objects(self, app: Any, client: Any, bucket: str) -> None:
        """Two of them fill it, and the third one has a place all the same."""
        calls: list[str] = []

        def call(step: Any) -> str:
            calls.append(step.name)
            return LARGE

        def body(task: Any) -> list[int]:
            values = [current_attempt().step(name, call) for name in "abc"]
            if current_attempt().number == 1:
                raise LookupError
            return [len(each) for each in values]

        task = self._task(app, body)
        assert deliver(task, "may").state == "FAILURE"
        assert deliver(task, "may").value == [300_000] * 3
        assert calls == ["a", "b", "c"]
        assert len(_names(client, bucket)) == 2

    def test_a_commit_points_to_an_object(self, app: Any, client: Any, bucket: str) -> None:
        """With the user's writes, in one transaction."""
        value = "x" * 500_000
        table = runtime_of(app).store.table  # type: ignore[attr-defined]
        write = {"Put": {"TableName": table, "Item": {"idempotencyKey": "mine"}}}
        task = self._task(app, lambda task: current_attempt().commit(value, writes=[write]))
        assert [deliver(task, "may").value for _ in range(2)] == [value] * 2
        assert self._record(task).content_type == OBJECT
        assert len(_names(client, bucket)) == 1

    def test_what_somebody_deleted_is_lost(self, app: Any, client: Any, bucket: str) -> None:
        """The task does not run again for it."""
        runs: list[int] = []

        def body(task: Any) -> str:
            runs.append(1)
            return "x" * 500_000

        task = self._task(app, body)
        deliver(task, "may")
        (name,) = _names(client, bucket)
        client.delete_object(Bucket=bucket, Key=name)
        ended = deliver(task, "may")
        assert isinstance(ended.value, ResultLost)
        assert name in ended.value.reason
        assert runs == [1]

    def test_a_transaction_points_to_an_object(
        self, aws: EmbeddedAws, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Which is there before the commit; one that gets no answer is undone."""
        app = an_app(
            idempotency_store=f"sqlite:///{tmp_path}/shop.sqlite",
            idempotency_large_results=aws.bucket_url(bucket),
        )
        runtime_of(app).store.provision()
        runs: list[int] = []

        def body(task: Any) -> Any:
            runs.append(1)
            with current_attempt().transaction() as tx:
                return tx.done(LARGE)

        task = self._task(app, body)
        runtime = runtime_of(app)
        away = open_large_results(f"s3://test:test@{bucket}?endpoint=http://127.0.0.1:1&region=us-east-1")
        with monkeypatch.context() as patched:
            unreachable = replace(runtime.opened, store=Offloading(innermost(runtime.store), away))
            patched.setattr(runtime, "_last_opened", unreachable)
            assert deliver(task, "may").state == "RETRY"
        assert [deliver(task, "may").value for _ in range(2)] == [LARGE] * 2
        assert runs == [1, 1]
        assert self._record(task).content_type == OBJECT
