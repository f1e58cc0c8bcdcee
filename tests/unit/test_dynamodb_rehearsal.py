"""Where the direct path sends requests, and how it signs them: what botocore finds out from all that it is given."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.rehearsal import Part

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = tmp_path / "config"
    profile.write_text("[profile shop]\nregion = ap-south-1\naws_access_key_id = PROFILE\naws_secret_access_key = s\n")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_DYNAMODB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKID",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": str(profile),
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)


@cache
def _models() -> Any:
    """botocore's models of its services, which take long to read."""
    return boto3.session.Session()._session.get_component("data_loader")


def _part(operation: str = "PutItem", **options: Any) -> Part:
    session = boto3.session.Session(profile_name=options.pop("profile", None))
    session._session.register_component("data_loader", _models())
    store = DynamoDBStore(**{"table": "orders", "session": session, "transport": "direct", **options})
    return store._direct()._part(operation)


@pytest.mark.parametrize(
    ("options", "environ", "url", "region"),
    [
        ({"region": "eu-west-1"}, {}, "https://dynamodb.eu-west-1.amazonaws.com/", "eu-west-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-north-1"}, "https://dynamodb.eu-north-1.amazonaws.com/", "eu-north-1"),
        ({"profile": "shop"}, {}, "https://dynamodb.ap-south-1.amazonaws.com/", "ap-south-1"),
        ({"region": "cn-north-1"}, {}, "https://dynamodb.cn-north-1.amazonaws.com.cn/", "cn-north-1"),
        (
            {"region": "us-east-1", "config": Config(use_fips_endpoint=True)},
            {},
            "https://dynamodb-fips.us-east-1.amazonaws.com/",
            "us-east-1",
        ),
        (
            {"region": "us-east-1"},
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://dynamodb.us-east-1.api.aws/",
            "us-east-1",
        ),
        (
            {"region": "eu-west-1"},
            {"AWS_ENDPOINT_URL": "https://vpce.example:8443/x"},
            "https://vpce.example:8443/x",
            "eu-west-1",
        ),
        (
            {"region": "eu-west-1"},
            {"AWS_ENDPOINT_URL": "https://all.example", "AWS_ENDPOINT_URL_DYNAMODB": "https://one.example"},
            "https://one.example/",
            "eu-west-1",
        ),
        (
            {"region": "eu-west-1"},
            {"AWS_ACCOUNT_ID": "210987654321"},
            "https://210987654321.ddb.eu-west-1.amazonaws.com/",
            "eu-west-1",
        ),
    ],
)
@pytest.mark.parametrize("operation", ["PutItem", "TransactWriteItems"])
def test_endpoint_and_region_are_botocores(
    operation: str,
    options: dict[str, Any],
    environ: Mapping[str, str],
    url: str,
    region: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By parameter, environment, profile, partition, FIPS, dual stack and account."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    part = _part(operation, **options)

    assert part.wire._url == url
    assert f"/{region}/dynamodb/aws4_request, " in part.signature.headers(b"{}")[1]
    assert part.headers["X-Amz-Target"] == f"DynamoDB_20120810.{operation}"


def test_credentials_are_of_the_profile() -> None:
    """As boto3 looks for them."""
    assert "Credential=PROFILE/" in _part(profile="shop").signature.headers(b"{}")[1]


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that report errors show the variables on the way to them."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret-token")

    part = _part(region="eu-west-1")

    assert part.headers["X-Amz-Security-Token"] == "secret-token"
    assert "secret" not in repr(part)


def test_endpoint_of_a_table_that_is_named_by_its_arn() -> None:
    """Its account is part of the name, and so may be of the endpoint."""
    session = boto3.session.Session("AKID", "secret", aws_account_id="210987654321")
    client = session.client("dynamodb", region_name="eu-west-1")
    seen: list[str] = []

    def refuse(request: Any, **_: Any) -> None:
        seen.append(request.url)
        raise InterruptedError

    client.meta.events.register("before-send", refuse)
    with pytest.raises(InterruptedError):
        client.put_item(TableName=ARN, Item={})

    store = DynamoDBStore(ARN, region="eu-west-1", session=session, transport="direct")

    assert [store._direct()._part("PutItem").wire._url] == seen


class _Line:
    """A wire that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Mapping[str, str], bytes]] = []

    def exchange(self, headers: Mapping[str, str], body: bytes) -> str:
        """Keep it, and answer."""
        self.sent.append((headers, body))
        return "answered"


def test_request_that_nobody_hooks_goes_straight_to_the_wire() -> None:
    """To show each of them would make up what hooks see, and read it again."""
    line: Any = _Line()
    part = replace(_part(region="eu-west-1"), wire=line, show=None)

    answer: Any = part.send(b"{}", "call", "attempt=1")
    assert answer == "answered"
    ((headers, body),) = line.sent
    assert (headers["amz-sdk-invocation-id"], headers["amz-sdk-request"], body) == ("call", "attempt=1", b"{}")
