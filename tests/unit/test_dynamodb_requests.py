"""Where the direct path to DynamoDB sends requests, and how it signs them: as botocore does, given the same."""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import RequestTemplate, Signature

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    profile = tmp_path / "config"
    profile.write_text("[profile shop]\nregion = ap-south-1\naws_access_key_id = PROFILE\naws_secret_access_key = s\n")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_DYNAMODB"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("ACCESS_KEY_ID", "AKID"), ("SECRET_ACCESS_KEY", "secret"), ("CONFIG_FILE", str(profile))):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    return monkeypatch


@cache
def _models() -> Any:
    """botocore's models of its services, which take long to read."""
    return boto3.session.Session()._session.get_component("data_loader")


def _template(profile: str | None = None, **options: Any) -> RequestTemplate:
    session = boto3.session.Session(profile_name=profile)
    session._session.register_component("data_loader", _models())
    return DynamoDBStore("orders", session=session, transport="direct", **options)._direct()._way()[0]


EU, US = {"region": "eu-west-1"}, {"region": "us-east-1"}
BOTH = {"AWS_ENDPOINT_URL": "https://all.example", "AWS_ENDPOINT_URL_DYNAMODB": "https://one.example"}
FIPS = {**US, "config": Config(use_fips_endpoint=True)}


@pytest.mark.parametrize(
    ("options", "environ", "url", "region"),
    [
        (EU, {}, "dynamodb.eu-west-1.amazonaws.com/", "eu-west-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-north-1"}, "dynamodb.eu-north-1.amazonaws.com/", "eu-north-1"),
        ({"profile": "shop"}, {}, "dynamodb.ap-south-1.amazonaws.com/", "ap-south-1"),
        ({"region": "cn-north-1"}, {}, "dynamodb.cn-north-1.amazonaws.com.cn/", "cn-north-1"),
        (FIPS, {}, "dynamodb-fips.us-east-1.amazonaws.com/", "us-east-1"),
        (US, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "dynamodb.us-east-1.api.aws/", "us-east-1"),
        (EU, {"AWS_ENDPOINT_URL": "https://vpce.example:8443/x"}, "vpce.example:8443/x", "eu-west-1"),
        (EU, BOTH, "one.example/", "eu-west-1"),
        (EU, {"AWS_ACCOUNT_ID": "210987654321"}, "210987654321.ddb.eu-west-1.amazonaws.com/", "eu-west-1"),
    ],
)
def test_endpoint_region_and_credentials_are_botocores(
    options: dict[str, Any], environ: Mapping[str, str], url: str, region: str, environment: pytest.MonkeyPatch
) -> None:
    """By parameter, environment, profile, partition, FIPS, dual stack and account."""
    for name, value in environ.items():
        environment.setenv(name, value)

    template = _template(**options)

    headers = template.headers(b"{}")
    key = "PROFILE" if "profile" in options else "AKID"
    assert (template.url, headers["X-Amz-Target"]) == (f"https://{url}", "DynamoDB_20120810.PutItem")
    assert f"Credential={key}/" in headers["Authorization"]
    assert f"/{region}/dynamodb/aws4_request, " in headers["Authorization"]


def test_secrets_are_not_shown(environment: pytest.MonkeyPatch) -> None:
    """Tools that report errors show the variables on the way to them."""
    environment.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    environment.setenv("AWS_SESSION_TOKEN", "secret-token")

    template = _template(region="eu-west-1")

    assert template.headers(b"{}")["X-Amz-Security-Token"] == "secret-token"
    assert "secret" not in repr(template)


def test_endpoint_of_a_table_that_is_named_by_its_arn(environment: pytest.MonkeyPatch) -> None:
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


_WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
_PLACES = ("dynamodb.eu-west-1.amazonaws.com", "123456789012.ddb.us-east-1.amazonaws.com", "[::1]:8000", "x.aws:443")
_PATHS = st.from_regex(r"[a-zA-Z0-9 ~%/.+-]{0,12}", fullmatch=True)
_URLS = st.builds("{}://{}/{}".format, st.sampled_from(["http", "https"]), st.sampled_from(_PLACES), _PATHS)
_VALUES = st.lists(_WORDS, min_size=1, max_size=3).map("  ".join)
_REQUESTS = st.lists(st.tuples(st.integers(0, 4_102_444_800), st.binary(max_size=300)), min_size=1, max_size=4)


@given(
    url=_URLS,
    headers=st.dictionaries(st.sampled_from(["Content-Type", "X-Amz-Target", "X-Other"]), _VALUES),
    credentials=st.builds(ReadOnlyCredentials, _WORDS, _WORDS, st.none() | _WORDS),
    region=_WORDS.filter(lambda text: "/" not in text),
    requests=_REQUESTS,
)
def test_signature_is_botocores(
    url: str, headers: dict[str, str], credentials: Any, region: str, requests: list[tuple[int, bytes]]
) -> None:
    """Whatever is signed, whenever, by whom and how often with one key."""
    signature = Signature(url, headers, credentials, region, "dynamodb")
    auth: Any = SigV4Auth(credentials, "dynamodb", region)
    for at, body in requests:
        with pytest.MonkeyPatch.context() as patched:
            now = time.gmtime(at)
            patched.setattr("celery_idempotent.stores.dynamodb.direct.time.gmtime", lambda now=now: now)
            date, authorization = signature.headers(body).values()

        sent = AWSRequest("POST", url, {**headers, **signature.token, "X-Amz-Date": date}, body)
        sent.context["timestamp"] = date
        theirs = auth.signature(auth.string_to_sign(sent, auth.canonical_request(sent)), sent)
        auth._inject_signature_to_request(sent, theirs)
        assert (date, authorization) == (time.strftime("%Y%m%dT%H%M%SZ", now), sent.headers["Authorization"])
