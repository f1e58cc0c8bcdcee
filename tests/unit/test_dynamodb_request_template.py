"""Where the direct path sends requests, and how it signs them: what botocore finds out from all that it is given."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import RequestTemplate

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


def _template(**options: Any) -> RequestTemplate:
    session = boto3.session.Session(profile_name=options.pop("profile", None))
    session._session.register_component("data_loader", _models())
    store = DynamoDBStore(**{"table": "orders", "session": session, "transport": "direct", **options})
    return store._direct()._way()[0]


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
def test_endpoint_and_region_are_botocores(
    options: dict[str, Any],
    environ: Mapping[str, str],
    url: str,
    region: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By parameter, environment, profile, partition, FIPS, dual stack and account."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    template = _template(**options)

    assert template.url == url
    headers = template.headers(b"{}")
    assert f"/{region}/dynamodb/aws4_request, " in headers["Authorization"]
    assert headers["X-Amz-Target"] == "DynamoDB_20120810.PutItem"


def test_credentials_are_of_the_profile() -> None:
    """As boto3 looks for them."""
    assert "Credential=PROFILE/" in _template(profile="shop").headers(b"{}")["Authorization"]


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that report errors show the variables on the way to them."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret-token")

    template = _template(region="eu-west-1")

    assert template.headers(b"{}")["X-Amz-Security-Token"] == "secret-token"
    assert "secret" not in repr(template)


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

    assert [store._direct()._way()[0].url] == seen
