"""docs/aws: the templates make what the pages ask for, and the policies grant what the code calls.

moto is no proof of what AWS does; it is one of what is in the documents. Of what it leaves out, the templates are read.
"""
# mypy: allow-untyped-decorators

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import boto3
import pytest
from cfnlint.api import lint_file
from cfnlint.decode import decode
from moto import mock_aws

from celery_idempotent import IdempotentTask, Policy, Status, current_attempt, forget
from celery_idempotent.stores import dynamodb
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, open_large_results
from celery_idempotent.stores.objects.s3 import S3Objects
from celery_idempotent.stores.wrappers import Offloading
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app, deliver
from tests.support.documents import DOCS, table
from tests.support.operator import operate, refused
from tests.support.packages import needs, program

AWS = DOCS / "aws"
INDEXES: dict[str, Any] = {"unknown_index": "in-doubt", "label_index": "labels"}


def actions(name: str) -> set[str]:
    """The actions that a policy grants, without their service."""
    statements = json.loads((AWS / f"iam-{name}.json").read_text())["Statement"]
    return {action.partition(":")[2] for each in statements for action in each["Action"]}


def resources(template: Path, kind: str) -> dict[str, Any]:
    """The properties of a template's resources of one type, by name, with functions in their long form."""
    found = decode(str(template))[0]["Resources"].items()
    return {name: each["Properties"] for name, each in found if each["Type"] == f"AWS::{kind}"}


def deploy(client: Any, name: str, template: str, **parameters: str) -> dict[str, str]:
    """The outputs of a new stack."""
    given = [{"ParameterKey": each, "ParameterValue": value} for each, value in parameters.items()]
    client.create_stack(StackName=name, TemplateBody=template, Parameters=given)
    client.get_waiter("stack_create_complete").wait(StackName=name)
    (stack,) = client.describe_stacks(StackName=name)["Stacks"]
    return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}


def test_templates_are_free_of_lint() -> None:
    """By AWS's own linter, with SAM's transform."""
    assert [problem for path in AWS.glob("*.yaml") for problem in lint_file(path)] == []


@pytest.mark.parametrize(
    ("page", "column", "cell"), [("dynamodb", "who", "actions"), ("large-results", "role", "grants")]
)
def test_documented_actions_are_those_of_the_policies(page: str, column: str, cell: str) -> None:
    """The table of permissions lists what the files grant."""
    rows = table(DOCS / f"how-to/{page}.md", column)
    named = {found[1]: row for row in rows if (found := re.search(r"iam-([\w-]+)\.json", row["policy"]))}
    assert len(named) in (2, 5)
    for name, row in named.items():
        listed = row[cell].partition("A transaction needs")[0]
        assert set(re.findall(r"`(?:dynamodb|s3):(\w+)`", listed)) == actions(name), name


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_DYNAMODB", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        yield


class Calls(set[str]):
    """The operations that clients have called."""

    def of(self, service: str) -> Callable[[], Any]:
        def client() -> Any:
            made: Any = boto3.client(service)  # type: ignore[call-overload]
            made.meta.events.register(f"before-call.{service}", lambda model, **_: self.add(model.name))
            return made

        return client

    def during(self, act: Callable[[], Any]) -> set[str]:
        self.clear()
        act()
        return {*self}


def work(store: DynamoDBStore) -> None:
    """All paths of a worker: its start, and every transition that a delivery can make."""
    store.verify()

    def body(task: Any, order_id: int) -> str:
        match order_id:
            case 2:
                raise ValueError
            case 3:
                current_attempt().renew()  # type: ignore[attr-defined]  # as a heartbeat does
            case 4:
                assert deliver(charge, 4).state == "RETRY"
            case 5:
                raise SystemExit
        return "x" * (500_000 if order_id == 6 else 1)

    policy = Policy(key="order_id", on_takeover="refuse", remember=(ValueError,))
    app = an_app(idempotency_store=store)
    charge = app.task(base=IdempotentTask, bind=True, shared=False, name="charge", idempotent=policy)(body)
    charge.idempotency_key_for(1)
    for order_id in (1, 1, 2, 2, 3, 4, 6, 6):
        deliver(charge, order_id)
    with pytest.raises(SystemExit):
        deliver(charge, 5)
    deliver(charge, 5)


def test_everybody_needs_only_what_a_policy_grants(aws: None) -> None:
    """Whoever provisions, a worker and an operator; a worker only puts, whatever a delivery does."""
    calls = Calls()
    store = DynamoDBStore("idempotency", client=calls.of("dynamodb"))
    assert calls.during(store.provision) == actions("provision")
    assert calls.during(lambda: work(store)) == actions("worker") == {"PutItem"}
    assert {record.status for record in store.scan()} == {Status.COMPLETED, Status.FAILED, Status.UNKNOWN}
    ours = DynamoDBStore("idempotency")
    assert calls.during(lambda: refused(operate(store, ours)) and pytest.fail("refused")) == actions("operator")

    indexed = DynamoDBStore("idempotency", client=calls.of("dynamodb"), **INDEXES)
    provisions = actions("provision") | actions("provision-indexes")
    assert calls.during(indexed.provision) | {"UpdateTimeToLive"} == provisions  # of a table without an expiry
    assert calls.during(lambda: indexed.swap(a_record(), None)) == actions("worker")
    assert calls.during(lambda: list(indexed.scan(status=Status.UNKNOWN))) == actions("operator-indexes")


def test_every_call_of_the_store_is_granted_to_somebody() -> None:
    """But for a transaction, which needs its writes' actions and none of its own (Developer Guide, "How it works")."""
    granted = {action for path in AWS.glob("iam-*.json") for action in actions(path.stem.removeprefix("iam-"))}
    sources = "".join(each.read_text() for each in Path(dynamodb.__path__[0]).glob("*.py"))
    assert set(re.findall(r'ask\(\s*"(\w+)"', sources)) - granted == {"TransactWriteItems"}


@pytest.mark.parametrize("names", [INDEXES, {}])
def test_template_makes_the_table_that_provision_makes(aws: None, names: dict[str, Any]) -> None:
    """Keys, attributes, billing and, by a parameter, indexes; provisioning it changes nothing. Its URL is an output."""
    template, client = AWS / "table.yaml", boto3.client("dynamodb")
    given = {"TableName": "by-template", "Indexes": "true" if names else "false"}
    made = deploy(boto3.client("cloudformation"), "table", template.read_text(), **given)
    tables = []
    for name in ("by-provision", "by-template"):
        DynamoDBStore(name, **names).provision()
        found: Any = client.describe_table(TableName=name)["Table"]
        indexes = [
            {part: index[part] for part in ("IndexName", "KeySchema", "Projection")}
            for index in found.get("GlobalSecondaryIndexes", [])
        ]
        billing = found["BillingModeSummary"]["BillingMode"]
        tables.append((found["KeySchema"], found["AttributeDefinitions"], billing, indexes))

    assert tables[0] == tables[1]
    assert [each["IndexName"] for each in indexes] == list(names.values())
    assert (billing, made["StoreUrl"]) == ("PAY_PER_REQUEST", "dynamodb://@us-east-1/by-template")
    assert found["DeletionProtectionEnabled"] in (True, "true")


def test_templates_keep_what_a_table_a_bucket_and_a_queue_hold() -> None:
    """Expiry, backups, encryption; they outlive their stacks; messages stay hidden long enough, and outcomes longer."""
    ((_, properties),) = resources(AWS / "table.yaml", "DynamoDB::Table").items()
    expiry = signature(DynamoDBStore).parameters["ttl_attr"].default
    assert properties["TimeToLiveSpecification"] == {"AttributeName": expiry, "Enabled": True}
    assert decode(str(AWS / "table.yaml"))[0]["Parameters"]["PointInTimeRecovery"]["Default"] == "true"
    assert properties["SSESpecification"]["SSEEnabled"] is True
    for name in ("table", "large-results"):
        text = (AWS / f"{name}.yaml").read_text()
        assert len(re.findall(r"(DeletionPolicy|UpdateReplacePolicy): Retain", text)) == 2

    template = decode(str(AWS / "lambda.yaml"))[0]
    function, queue = (template["Resources"][name]["Properties"] for name in ("Function", "Queue"))
    (source,), (policy,) = function["Events"].values(), function["Policies"]
    defaults = {name: each["Default"] for name, each in template["Parameters"].items()}
    assert source["Properties"]["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert defaults["VisibilityTimeout"] == 6 * defaults["FunctionTimeout"]
    assert queue["MessageRetentionPeriod"] * 1000 < Policy().retain_ms
    assert [each["Action"] for each in policy["Statement"]] == ["dynamodb:PutItem"]


def test_worker_and_operator_of_large_results_call_what_is_granted(aws: None) -> None:
    """And nothing else; that a missing object is told needs ListBucket, which is no call."""
    calls = Calls()
    boto3.client("s3").create_bucket(Bucket="results")
    large = LargeResults(S3Objects("results", client=calls.of("s3")), over=100, prefix="reports/")
    app = an_app(idempotency_large_results=large)

    @app.task(name="report", base=IdempotentTask, idempotent=Policy("order_id"), shared=False)
    def report(order_id: str) -> str:
        return "x" * 200

    def works() -> None:
        Offloading(MemoryStore(), large).verify()
        assert [deliver(report, "o").value for _ in range(2)] == ["x" * 200] * 2

    assert calls.during(works) | {"ListBucket"} == actions("worker-large-results")
    forget(report.idempotency_key_for("o"), by="ann", reason="gone", app=app)
    assert calls | {"ListBucket"} == actions("operator-large-results")


@pytest.mark.filterwarnings("ignore:Tried to parse AWS..S3..BucketPolicy:UserWarning")
def test_bucket_of_the_template_can_be_used(aws: None) -> None:
    """The setting is an output; objects are private, encrypted, and outlive the records that point to them."""
    template, given = AWS / "large-results.yaml", {"BucketName": "shop-results", "Prefix": "reports/"}
    large = open_large_results(
        deploy(boto3.client("cloudformation"), "results", template.read_text(), **given)["Setting"]
    )
    Offloading(MemoryStore(), large).verify()
    assert large.prefix == "reports/"

    ((_, bucket),), ((_, policy),) = (resources(template, f"S3::{kind}").items() for kind in ("Bucket", "BucketPolicy"))
    (rule,), (statement,) = bucket["LifecycleConfiguration"]["Rules"], policy["PolicyDocument"]["Statement"]
    assert (rule["Status"], rule["Prefix"]) == ("Enabled", {"Ref": "Prefix"})
    days = decode(str(template))[0]["Parameters"][rule["ExpirationInDays"]["Ref"]]["Default"]
    assert days * 86_400_000 > Policy().retain_ms
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert "BucketEncryption" in bucket
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


QUEUE = AWS / "sns-queue.yaml"


def check_policies(template: Path, topic: dict[str, str]) -> None:
    """To every queue, one of dead letters included, its topic alone may send, and by TLS alone."""
    queues, senders, by_tls = set(resources(template, "SQS::Queue")), set(), set()
    for each in resources(template, "SQS::QueuePolicy").values():
        for statement in each["PolicyDocument"]["Statement"]:
            named = statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
            about = {one["Fn::GetAtt"][0] for one in named}
            assert about == {one["Ref"] for one in each["Queues"]}
            if statement["Effect"] == "Allow":
                assert statement["Principal"] == {"Service": "sns.amazonaws.com"}
                assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": topic}}
                senders |= about
            else:
                assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
                by_tls |= about
    assert senders == by_tls == queues


def test_queue_of_the_template_is_its_topics_alone_and_keeps_what_fails() -> None:
    """Dead letters of queue and subscription have one place; both are encrypted, with a key that SNS can use."""
    check_policies(QUEUE, {"Ref": "TopicArn"})
    (subscription,), (key,) = (resources(QUEUE, kind).values() for kind in ("SNS::Subscription", "KMS::Key"))
    wanted = {"event": {"Fn::Split": [",", {"Ref": "Events"}]}}
    assert subscription["FilterPolicy"]["Fn::If"][:2] == ["IsFiltered", wanted]
    queues = resources(QUEUE, "SQS::Queue")
    place = {"Fn::GetAtt": ["DeadLetters", "Arn"]}
    assert queues["Queue"]["RedrivePolicy"]["deadLetterTargetArn"] == place
    assert subscription["RedrivePolicy"] == {"deadLetterTargetArn": place}
    assert queues["DeadLetters"]["MessageRetentionPeriod"] == 14 * 86_400
    for each in queues.values():
        assert each["SqsManagedSseEnabled"]["Fn::If"] == ["HasOwnKey", {"Ref": "AWS::NoValue"}, True]
        assert each["KmsMasterKeyId"]["Fn::If"][1] == {"Fn::GetAtt": ["Key", "Arn"]}
    (topic,) = (each for each in key["KeyPolicy"]["Statement"] if "Service" in each["Principal"])
    assert topic["Action"] == ["kms:GenerateDataKey*", "kms:Decrypt"]
    assert topic["Condition"] == {"ArnEquals": {"aws:SourceArn": {"Ref": "TopicArn"}}}


SYNTHESISE = """
import sys
sys.path.append(sys.argv[2])
from aws_cdk import App
from sns_cdk import Orders
app = App(outdir=sys.argv[1], analytics_reporting=False)
Orders(app, "orders")
Orders(app, "ordered", fifo=True)
app.synth()
"""


@pytest.mark.nightly
@needs("aws_cdk")
@pytest.mark.timeout(300)
def test_cdk_makes_what_the_templates_make(tmp_path: Path) -> None:
    """One topic and three queues, each with its policy, filter and dead letters."""
    assert program("node", "nodejs")
    subprocess.run([sys.executable, "-c", SYNTHESISE, str(tmp_path), str(AWS)], check=True)
    for stack, is_fifo in (("orders", False), ("ordered", True)):
        template = tmp_path / f"{stack}.template.json"
        assert lint_file(template) == []
        ((topic, about),) = resources(template, "SNS::Topic").items()
        check_policies(template, {"Ref": topic})
        queues, subscriptions = (resources(template, kind).values() for kind in ("SQS::Queue", "SNS::Subscription"))
        assert (len(queues), sum("RedrivePolicy" in each for each in queues), len(subscriptions)) == (6, 3, 3)
        assert all({"RedrivePolicy", "FilterPolicy"} <= each.keys() for each in subscriptions)
        assert {each.get("FifoTopic", each.get("FifoQueue", False)) for each in (about, *queues)} == {is_fifo}
