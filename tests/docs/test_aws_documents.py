"""docs/aws: the template makes the table that ``provision`` makes, and the policies grant what the code calls.

moto is no proof of what AWS does; it is one of what is in the documents. Nothing here runs concurrently.
"""
# mypy: allow-untyped-decorators

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from celery import Celery
from click.testing import CliRunner
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count

from celery_idempotent import IdempotentTask, Policy, Status, StoreUnavailable, current_attempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores import dynamodb
from celery_idempotent.stores.dynamodb import DynamoDBStore
from tests.support.deliveries import an_app, deliver
from tests.support.documents import DOCS, table
from tests.support.operator import operate, refused

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

REGION = "eu-west-1"
DOCUMENTS = ("worker", "operator", "operator-indexes", "provision", "provision-indexes")
INDEXES: dict[str, Any] = {"unknown_index": "in-doubt", "label_index": "labels"}
TABLE = "idempotency"
TEMPLATE = (DOCS / "aws" / "table.yaml").read_text()


def _actions_of(name: str) -> set[str]:
    """The actions that a policy document grants, without their prefix."""
    statements = json.loads((DOCS / "aws" / f"iam-{name}.json").read_text())["Statement"]
    assert {each["Effect"] for each in statements} == {"Allow"}
    return {action.removeprefix("dynamodb:") for each in statements for action in each["Action"]}


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_DYNAMODB", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        yield


@pytest.fixture
def called() -> set[str]:
    """The operations that any client of :func:`store` has called."""
    return set()


@pytest.fixture
def client(called: set[str]) -> Callable[[], "DynamoDBClient"]:
    def make() -> "DynamoDBClient":
        made = boto3.client("dynamodb", region_name=REGION)
        made.meta.events.register("before-call.dynamodb", lambda model, **_: called.add(model.name))
        return made

    return make


@pytest.fixture
def store(client: Callable[[], "DynamoDBClient"], called: set[str]) -> DynamoDBStore:
    store = DynamoDBStore(TABLE, client=client)
    store.provision()
    called.clear()
    return store


@pytest.fixture
def app(store: DynamoDBStore) -> Celery:
    app = an_app()
    app.conf.idempotency_store = store
    return app


# -- the template


def _deploy(**parameters: str) -> None:
    boto3.client("cloudformation", region_name=REGION).create_stack(
        StackName="idempotency",
        TemplateBody=TEMPLATE,
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
    )


class _Template(yaml.SafeLoader):
    """Reads CloudFormation's short forms, such as ``!Ref x``, as plain values."""


def _short_form(loader: Any, function: str, node: Any) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return f"!{function} {node.value}"
    return {function: loader.construct_sequence(node, deep=True)}


_Template.add_multi_constructor("!", _short_form)


def _properties() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(TEMPLATE, _Template)["Resources"]["Table"]["Properties"]
    return found


def test_template_makes_the_table_that_provision_makes() -> None:
    """Key schema, attributes and billing are the same, whichever way the table was made."""
    _deploy(TableName="by-template")
    DynamoDBStore("by-provision", region=REGION).provision()

    one, other = (
        boto3.client("dynamodb", region_name=REGION).describe_table(TableName=name)["Table"]
        for name in ("by-template", "by-provision")
    )
    for each in ("KeySchema", "AttributeDefinitions"):
        assert one[each] == other[each]
    assert one["BillingModeSummary"]["BillingMode"] == other["BillingModeSummary"]["BillingMode"]
    assert one["KeySchema"] == [{"AttributeName": "idempotencyKey", "KeyType": "HASH"}]


@pytest.mark.parametrize("names", [INDEXES, {}])
def test_template_makes_the_indexes_that_provision_makes(names: dict[str, Any]) -> None:
    """By a parameter, with the attributes that they are about, under the names in the page."""
    _deploy(TableName="by-template", Indexes="true" if names else "false")
    DynamoDBStore("by-provision", region=REGION, **names).provision()

    one, other = (
        boto3.client("dynamodb", region_name=REGION).describe_table(TableName=name)["Table"]
        for name in ("by-template", "by-provision")
    )
    assert one["AttributeDefinitions"] == other["AttributeDefinitions"]
    found, made = (
        [{part: index[part] for part in ("IndexName", "KeySchema", "Projection")} for index in each]
        for each in (one.get("GlobalSecondaryIndexes", []), other.get("GlobalSecondaryIndexes", []))
    )
    assert found == made
    assert [each["IndexName"] for each in made] == list(names.values())
    assert "?unknown_index=in-doubt&label_index=labels" in (DOCS / "how-to/dynamodb.md").read_text()


def test_template_asks_for_the_expiry_and_backups_that_provision_sets() -> None:
    """TTL attribute and point-in-time recovery, which moto's CloudFormation leaves out, are read from the template."""
    DynamoDBStore(TABLE, region=REGION).provision()

    dynamodb = boto3.client("dynamodb", region_name=REGION)
    ttl = dynamodb.describe_time_to_live(TableName=TABLE)["TimeToLiveDescription"]
    backups = dynamodb.describe_continuous_backups(TableName=TABLE)["ContinuousBackupsDescription"]
    assert (ttl["TimeToLiveStatus"], backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"]) == (
        "ENABLED",
        "ENABLED",
    )
    assert _properties()["TimeToLiveSpecification"] == {"AttributeName": ttl["AttributeName"], "Enabled": True}
    assert yaml.load(TEMPLATE, _Template)["Parameters"]["PointInTimeRecovery"]["Default"] == "true"
    recovery = _properties()["PointInTimeRecoverySpecification"]["PointInTimeRecoveryEnabled"]
    assert recovery == "!Ref PointInTimeRecovery"


def test_template_protects_and_encrypts_the_table() -> None:
    """Deletion protection and KMS are on by default, and the table outlives its stack."""
    _deploy()

    made = boto3.client("dynamodb", region_name=REGION).describe_table(TableName=TABLE)["Table"]
    assert str(made["DeletionProtectionEnabled"]).lower() == "true"
    assert _properties()["SSESpecification"]["SSEEnabled"] is True
    assert len(re.findall(r"(DeletionPolicy|UpdateReplacePolicy): Retain", TEMPLATE)) == 2


def test_parameters_of_the_template_are_used() -> None:
    """Deletion protection can be off and the key one's own."""
    _deploy(TableName="other", DeletionProtection="false", KmsKeyArn="arn:aws:kms:eu-west-1:1:key/k")

    made = boto3.client("dynamodb", region_name=REGION).describe_table(TableName="other")["Table"]
    assert str(made["DeletionProtectionEnabled"]).lower() == "false"
    # moto's CloudFormation drops the encryption.
    assert _properties()["SSESpecification"]["KMSMasterKeyId"]["If"][:2] == ["HasOwnKey", "!Ref KmsKeyArn"]


def test_store_works_on_the_table_of_the_template() -> None:
    """Provisioning a table that the template made changes nothing and finds nothing wrong; the URL is an output."""
    _deploy()
    DynamoDBStore(TABLE, region=REGION).provision()

    (stack,) = boto3.client("cloudformation", region_name=REGION).describe_stacks()["Stacks"]
    outputs = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
    assert outputs["StoreUrl"] == f"dynamodb://@{REGION}/{TABLE}"
    assert outputs["TableArn"].endswith(f":table/{TABLE}")


# -- the policies


def _work(app: Celery, store: DynamoDBStore) -> None:
    """All paths of a worker: its start, and every transition that a delivery can make."""
    store.verify()

    def body(task: Any, order_id: int) -> str:
        if order_id == 2:
            raise ValueError
        if order_id == 3:
            current_attempt().renew()  # type: ignore[attr-defined]  # as a heartbeat does
        if order_id == 4:
            assert deliver(charge, 4).state == "RETRY"
        if order_id == 5:
            raise SystemExit
        return "x" * (500_000 if order_id == 6 else 1)

    policy = Policy(key="order_id", on_takeover="refuse", remember=(ValueError,))
    charge = app.task(base=IdempotentTask, bind=True, shared=False, name="charge", idempotent=policy)(body)
    for order_id in (1, 1, 2, 2, 3, 4, 6, 6):
        deliver(charge, order_id)
    with pytest.raises(SystemExit):
        deliver(charge, 5)
    deliver(charge, 5)


def test_worker_needs_only_what_its_policy_grants(app: Celery, store: DynamoDBStore, called: set[str]) -> None:
    """Start, claim, renewal, completion, failure, replay, conflict and giving up are PutItem, and nothing else."""
    _work(app, store)

    assert called == _actions_of("worker") == {"PutItem"}
    called.clear()  # what follows is the test looking, not the worker
    statuses = {record.status for record in store.scan()}
    assert statuses == {Status.COMPLETED, Status.FAILED, Status.UNKNOWN}


def test_publisher_needs_nothing(app: Celery, called: set[str]) -> None:
    """Publishing asks the store nothing, so a publisher needs no permission on the table."""

    @app.task(base=IdempotentTask, shared=False, name="charge")
    def charge() -> None: ...

    charge.delay()
    assert charge.idempotency_key_for()
    assert called == set()


def _invoke(app: Celery, *arguments: str) -> None:
    result = CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=app))
    assert result.exit_code == 0, result.output


def test_operator_needs_only_what_its_policy_grants(store: DynamoDBStore, called: set[str]) -> None:
    """Every command but ``provision`` calls what the operator's policy lists, and nothing else."""
    ours = DynamoDBStore(TABLE, region=REGION)

    assert refused(operate(store, ours)) == set()

    assert called == _actions_of("operator")


def test_provisioning_needs_only_what_its_policy_grants(
    client: Callable[[], "DynamoDBClient"], called: set[str]
) -> None:
    """Creating the table calls what the policy lists, and nothing else."""
    DynamoDBStore(TABLE, client=client).provision()

    assert called == _actions_of("provision")


def test_indexes_need_only_what_their_policies_grant(
    store: DynamoDBStore, client: Callable[[], "DynamoDBClient"], called: set[str]
) -> None:
    """Adding them to a table in use, and listing by them; a worker still needs PutItem alone."""
    indexed = DynamoDBStore(TABLE, client=client, **INDEXES)
    indexed.provision()
    called.add("UpdateTimeToLive")  # of a table that has no expiry yet
    assert called == _actions_of("provision") | _actions_of("provision-indexes")
    called.clear()

    indexed.swap(_record("a", Status.UNKNOWN), None)
    assert called == _actions_of("worker")
    called.clear()

    assert [each.key for each in indexed.scan(status=Status.UNKNOWN)] == ["a"]
    assert called == _actions_of("operator-indexes")


def test_every_call_of_the_store_is_granted_to_somebody() -> None:
    """What the store can call is in one of the documents.

    A TransactWriteItems needs no permission of its own: PutItem for the record, and on the user's tables what the
    user's writes are (Developer Guide, "Amazon DynamoDB Transactions: How it works").
    """
    granted = {action for name in DOCUMENTS for action in _actions_of(name)}
    (folder,) = dynamodb.__path__
    sources = "".join(each.read_text() for each in Path(folder).glob("*.py"))
    asked = set(re.findall(r'ask\(\s*"(\w+)"', sources))
    assert len(asked) == 13
    assert asked - granted == {"TransactWriteItems"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_policies_are_for_one_table(name: str) -> None:
    """Valid JSON of the current version, one table or its indexes, and no wildcard in an action."""
    document = json.loads((DOCS / "aws" / f"iam-{name}.json").read_text())
    assert document["Version"] == "2012-10-17"
    table = "arn:aws:dynamodb:REGION:ACCOUNT:table/idempotency"
    for each in document["Statement"]:
        assert each["Resource"] == (f"{table}/index/*" if each["Action"] == ["dynamodb:Query"] else table)
        assert "*" not in "".join(each["Action"])
        assert each["Action"] == sorted(each["Action"])


def test_documented_actions_are_those_of_the_policies() -> None:
    """The table of permissions lists what the files grant."""
    documented = {
        found.group(1): set(re.findall(r"`dynamodb:(\w+)`", row["actions"]))
        for row in table(DOCS / "how-to/dynamodb.md", "who")
        if (found := re.search(r"iam-([\w-]+)\.json", row["policy"]))
    }
    assert documented == {name: _actions_of(name) for name in DOCUMENTS}


def _allowed(name: str) -> DynamoDBStore:
    """The store for somebody who has the policy ``name`` and no other, on a new table."""
    iam = boto3.client("iam", region_name=REGION)
    iam.create_user(UserName=name)
    # moto checks actions and sees no resources.
    document = re.sub(r"arn:[^\"]+", "*", (DOCS / "aws" / f"iam-{name}.json").read_text())
    iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=document)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    boto3.client("dynamodb", region_name=REGION).create_table(
        TableName=TABLE,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "idempotencyKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "idempotencyKey", "KeyType": "HASH"}],
    )
    session = boto3.session.Session(key["AccessKeyId"], key["SecretAccessKey"], region_name=REGION)
    return DynamoDBStore(TABLE, session=session)


@set_initial_no_auth_action_count(4)  # the calls before the session of the worker
def test_worker_works_under_its_policy_and_cannot_read() -> None:
    """With IAM enforced, the worker's actions are enough for all its paths, and a scan is refused."""
    store = _allowed("worker")
    app = an_app()
    app.conf.idempotency_store = store

    _work(app, store)

    with pytest.raises(StoreUnavailable):
        list(store.scan())


@set_initial_no_auth_action_count(4)  # the calls before the session of the operator
def test_operator_works_under_its_policy() -> None:
    """With IAM enforced, the operator's actions are enough for every command."""
    store = _allowed("operator")

    assert refused(operate(store, store)) == set()


def _record(key: str, status: Status) -> Record:
    return Record(
        key=key,
        status=status,
        revision="r",
        owner="o",
        fencing_token=1,
        lease_until=1,
        fingerprint=None,
        attempts=1,
        created_at=1,
        updated_at=1,
        task="charge",
        task_id="t",
        worker="w",
    )


def test_attempts_renewal_is_a_write_of_the_hot_path(store: DynamoDBStore, called: set[str]) -> None:
    """A heartbeat costs one PutItem, so that a long body needs no further permission."""
    record = _record("a", Status.IN_PROGRESS)
    store.swap(record, None)
    called.clear()

    Claim(store, record, lease=60_000, retain=1, claimed_at=0).renew()

    assert called == {"PutItem"}
    assert store.get("a") != record
