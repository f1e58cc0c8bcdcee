"""The DynamoDB store without a server: what it makes of rare answers, where its direct path sends and how it signs.

botocore's own Stubber stands where the server would; everything above it is real.
"""

import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials
from botocore.stub import Stubber
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import WriteFailed
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import RequestTemplate, Signature
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record

LOGIN: Any = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


@pytest.fixture
def server() -> Iterator[Stubber]:
    config = Config(retries={"total_max_attempts": 1})
    with Stubber(boto3.client("dynamodb", region_name="eu-west-1", config=config, **LOGIN)) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def store(server: Stubber) -> DynamoDBStore:
    client: Any = server.client
    return DynamoDBStore("t", client=client, local_clock=lambda: 0)


def test_missing_credentials_and_region_are_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boto3 cannot find is named by boto3's own message, and needs a person."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for store, missing in ((DynamoDBStore("t", region="eu-west-1"), "credentials"), (DynamoDBStore("t"), "region")):
        with pytest.raises(StoreMisconfigured, match=missing):
            store.swap(a_record(), None)


def test_scan_reads_every_page(server: Stubber, store: DynamoDBStore) -> None:
    """A table larger than one page is read to its end, with the filter on every page."""
    records = [a_record() for _ in range(3)]
    items = [store._item(each) for each in records]
    filtered: dict[str, Any] = {
        "TableName": "t",
        "ConsistentRead": True,
        "FilterExpression": "#f0 = :f0",
        "ExpressionAttributeNames": {"#f0": "status"},
        "ExpressionAttributeValues": {":f0": {"S": "IN_PROGRESS"}},
    }
    keys = [{"idempotencyKey": {"S": name}} for name in "xy"]
    for found, last, first in ((items[:2], keys[0], None), ([], keys[1], keys[0]), (items[2:], None, keys[1])):
        page = {"Items": found, **({"LastEvaluatedKey": last} if last else {})}
        server.add_response("scan", page, {**filtered, **({"ExclusiveStartKey": first} if first else {})})
    assert list(store.scan(status=Status.IN_PROGRESS)) == records


NOT_READY = "ContinuousBackupsUnavailableException"


@pytest.mark.parametrize(
    ("states", "ttl", "backups", "seconds"),
    [
        (["ACTIVE"], "ENABLED", [""], 0),
        (["CREATING", "CREATING", "UPDATING"], "ENABLING", [""], 1),
        (["ACTIVE"], "DISABLING", ["UnknownOperationException"], 0),  # of servers that imitate DynamoDB
        (["ACTIVE"], "ENABLED", [NOT_READY] * 3 + [""], 6),  # of a table of AWS's that is minutes old
        (["ACTIVE"], "ENABLED", [NOT_READY] * 301, None),
    ],
)
def test_provisioning_waits_and_completes_what_is_missing(
    server: Stubber, store: Any, states: list[str], ttl: str, backups: Any, seconds: Any, monkeypatch: Any
) -> None:
    """For the table; TTL that is on is left on; and for backups, but not for ever: to provision again is safe."""
    backed_up = {"TableName": "t", "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True}}
    server.add_client_error("create_table", "ResourceInUseException")
    for state in states:
        key = {"AttributeName": "idempotencyKey", "KeyType": "HASH"}
        server.add_response("describe_table", {"Table": {"TableStatus": state, "KeySchema": [key]}})
    server.add_response("describe_time_to_live", {"TimeToLiveDescription": {"TimeToLiveStatus": ttl}})
    if ttl.startswith("DISABL"):
        wanted: Any = {"Enabled": True, "AttributeName": "expiryTimestamp"}
        server.add_response("update_time_to_live", {}, {"TableName": "t", "TimeToLiveSpecification": wanted})
    for error in backups:
        if error:
            server.add_client_error("update_continuous_backups", error)
        else:
            server.add_response("update_continuous_backups", {}, backed_up)
    clock = FakeClock()
    began = clock.monotonic()
    ours = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time", ours)
    if seconds is None:
        with pytest.raises(StoreUnavailable, match="provision it again"):
            store.provision()
        return
    server.add_client_error("put_item", "ConditionalCheckFailedException")
    store.provision()
    assert clock.monotonic() - began == pytest.approx(seconds)


NOTHING, CONFLICT, FAILED = {"Code": "None"}, {"Code": "TransactionConflict"}, {"Code": "ConditionalCheckFailed"}
IN_THE_WAY = ("TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded")
INVALID = {"Code": "ValidationError", "Message": "empty attribute"}
THEIRS = a_record()
WRITES = [
    {"Put": {"TableName": "stock", "Item": {"sku": "a"}}},
    {"Delete": {"TableName": "stock", "Key": {"sku": "b"}}},
]


def _outcome(store: DynamoDBStore) -> Any:
    try:
        return store.swap_with(a_record(), "expected", WRITES)
    except WriteFailed as error:
        return error.position, error.reason
    except StoreUnavailable as error:
        return type(error), str(error)


PASSING = object()


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        # Whatever is in the way, of the record or of a write, passes by itself; nobody's condition has failed.
        *(([NOTHING] * at + [{"Code": code}, NOTHING, NOTHING], PASSING) for at, code in enumerate(IN_THE_WAY)),
        ([NOTHING, CONFLICT, INVALID], (1, "ValidationError: empty attribute")),
        ([NOTHING, FAILED, FAILED], (0, "ConditionalCheckFailed")),
        # A zombie's writes fail for its successor's effects; what it must learn is that there is a successor.
        ([{**FAILED, "Item": DynamoDBStore("t")._item(THEIRS)}, FAILED, NOTHING], THEIRS),
        ([FAILED, NOTHING, NOTHING], None),
    ],
)
def test_lost_claim_comes_before_a_refusal_and_that_before_contention(
    server: Stubber, store: DynamoDBStore, reasons: list[Any], outcome: object
) -> None:
    """Of several reasons the one that says most is told."""
    fields = {"CancellationReasons": reasons[:3]}
    server.add_client_error("transact_write_items", "TransactionCanceledException", "why", modeled_fields=fields)
    told = _outcome(store)
    if outcome is PASSING:
        assert (told[0], "conflicts with another transaction" in told[1]) == (StoreUnavailable, True)
    else:
        assert told == outcome


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        ("TransactionInProgressException", "later", StoreUnavailable),  # it may have happened, or may happen still
        ("AccessDeniedException", "not authorized to perform: dynamodb:DeleteItem on stock", StoreMisconfigured),
    ],
)
def test_commit_without_a_certain_answer_is_an_outage(
    server: Stubber, store: DynamoDBStore, code: str, message: str, error: type[Exception]
) -> None:
    """Asking again tells; and of a transaction, which has no IAM action of its own, only AWS knows what it needs."""
    server.add_client_error("transact_write_items", code, message)
    kind, text = _outcome(store)
    assert (kind, message in text, "dynamodb:TransactWriteItems" in text) == (error, True, False)


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
    """What a store reads of AWS's services, which takes long."""
    return DynamoDBStore("orders")._new_session().get_component("data_loader")


def _template(**options: Any) -> RequestTemplate:
    store = DynamoDBStore("orders", **options)
    store._models = _models()
    return store._direct()._way()[0]


def test_what_is_read_of_aws_is_read_once_and_of_few_services() -> None:
    """Every process would hold it, and a child has it from its parent."""
    store = DynamoDBStore("orders")
    first, second = (store._new_session().get_component("data_loader") for _ in range(2))
    assert first is second
    partitions = first.load_data("endpoints")["partitions"]
    assert {"dynamodb", "sts"} <= {*partitions[0]["services"]} <= {"dynamodb", "oidc", "portal.sso", "signin", "sts"}


EU, US = {"region": "eu-west-1"}, {"region": "us-east-1"}
BOTH = {"AWS_ENDPOINT_URL": "https://all.example", "AWS_ENDPOINT_URL_DYNAMODB": "https://one.example"}
FIPS = {**US, "config": Config(use_fips_endpoint=True)}


@pytest.mark.parametrize(
    ("options", "environ", "url", "region"),
    [
        (EU, {}, "dynamodb.eu-west-1.amazonaws.com/", "eu-west-1"),
        ({}, {"AWS_DEFAULT_REGION": "eu-north-1"}, "dynamodb.eu-north-1.amazonaws.com/", "eu-north-1"),
        ({}, {"AWS_PROFILE": "shop", "AWS_ACCESS_KEY_ID": ""}, "dynamodb.ap-south-1.amazonaws.com/", "ap-south-1"),
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
    """By parameter, environment, profile, partition, FIPS, dual stack and account; reports show no secret."""
    for name, value in {**environ, "AWS_SESSION_TOKEN": "secret-token"}.items():
        environment.setenv(name, value)
    template = _template(**options)
    headers = template.headers(b"{}")
    key = "PROFILE" if "AWS_PROFILE" in environ else "AKID"
    assert (template.url, headers["X-Amz-Target"]) == (f"https://{url}", "DynamoDB_20120810.PutItem")
    assert f"Credential={key}/" in headers["Authorization"]
    assert headers.get("X-Amz-Security-Token") == (None if key == "PROFILE" else "secret-token")
    assert "secret" not in repr(template)
    assert f"/{region}/dynamodb/aws4_request, " in headers["Authorization"]


def test_endpoint_of_a_table_that_is_named_by_its_arn(environment: pytest.MonkeyPatch) -> None:
    """Its account is part of the name, and so may be of the endpoint."""
    session = boto3.session.Session("AKID", "secret", aws_account_id="210987654321")
    client = session.client("dynamodb", region_name="eu-west-1")
    send = Mock(side_effect=InterruptedError)
    client.meta.events.register("before-send", send)
    with pytest.raises(InterruptedError):
        client.put_item(TableName=ARN, Item={})
    store = DynamoDBStore(ARN, region="eu-west-1", session=session, transport="direct")
    assert [store._direct()._way()[0].url] == [send.call_args.kwargs["request"].url]


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
def test_signature_is_botocores(url: str, headers: Any, credentials: Any, region: str, requests: Any) -> None:
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
