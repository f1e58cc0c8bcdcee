"""docs/aws/sns*: what the templates make lets the topic's wanted messages in, and nothing else.

An emulator is no proof of what AWS does; it is one of what is in the documents. Of what it leaves out, the templates
are read.
"""
# mypy: allow-untyped-decorators

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from cfnlint.api import lint_file
from cfnlint.decode import decode

from lab.embedded import EmbeddedAws
from lab.embedded.aws import REGION
from tests.support.documents import DOCS
from tests.support.packages import needs
from tests.support.waiting import wait_until

TOPIC = DOCS / "aws" / "sns-topic.yaml"
QUEUE = DOCS / "aws" / "sns-queue.yaml"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture
def client(server: EmbeddedAws) -> Callable[[str], Any]:
    """Of a service of the emulator, in an account that no other test has."""
    account = f"{random.randrange(10**12):012}"
    session = boto3.session.Session(account, "test", region_name=REGION)
    return lambda service: session.client(service, endpoint_url=server.endpoint)  # type: ignore[call-overload]


Client = Callable[[str], Any]


def _deploy(client: Client, name: str, template: str, **parameters: str) -> dict[str, str]:
    """The outputs of a new stack."""
    cloudformation = client("cloudformation")
    given = [{"ParameterKey": each, "ParameterValue": value} for each, value in parameters.items()]
    cloudformation.create_stack(StackName=name, TemplateBody=template, Parameters=given)

    def made() -> Any:
        (stack,) = cloudformation.describe_stacks(StackName=name)["Stacks"]
        return stack if stack["StackStatus"] == "CREATE_COMPLETE" else None

    stack = wait_until(made, "the stack is complete")
    return {each["OutputKey"]: each["OutputValue"] for each in stack.get("Outputs", [])}


def _publish(client: Client, topic: str, event: str) -> None:
    fifo = {"MessageGroupId": "g", "MessageDeduplicationId": event} if topic.endswith(".fifo") else {}
    attributes = {"event": {"DataType": "String", "StringValue": event}}
    client("sns").publish(TopicArn=topic, Message=f'"{event}"', MessageAttributes=attributes, **fifo)


def _bodies(client: Client, queue: str) -> list[str]:
    answer = client("sqs").receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=0)
    return [each["Body"] for each in answer.get("Messages", [])]


def _resources(template: Path, kind: str) -> dict[str, Any]:
    """The properties of a template's resources of one type, by name, with functions in their long form."""
    content, _ = decode(str(template))
    found = content["Resources"].items()
    return {name: each["Properties"] for name, each in found if each["Type"] == f"AWS::{kind}"}


def _check_policies(template: Path, topic: dict[str, str]) -> None:
    """To every queue, whatever is a dead letter's included, its topic alone may send, and by TLS alone."""
    queues = set(_resources(template, "SQS::Queue"))
    senders, by_tls = set(), set()
    for each in _resources(template, "SQS::QueuePolicy").values():
        for statement in each["PolicyDocument"]["Statement"]:
            resources = statement["Resource"]
            named = {one["Fn::GetAtt"][0] for one in (resources if isinstance(resources, list) else [resources])}
            assert named == {one["Ref"] for one in each["Queues"]}
            if statement["Effect"] == "Allow":
                assert statement["Principal"] == {"Service": "sns.amazonaws.com"}
                assert statement["Action"] == "sqs:SendMessage"
                assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": topic}}
                senders |= named
            else:
                assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
                by_tls |= named
    assert senders == by_tls == queues


@pytest.mark.parametrize("fifo", ["false", "true"])
@pytest.mark.parametrize("raw", ["false", "true"])
def test_wanted_messages_of_the_topic_come_into_the_queue(client: Client, fifo: str, raw: str) -> None:
    """Those whose attribute is named, with an envelope or without; by the queue's policy from nowhere else."""
    topic = _deploy(client, "topic", TOPIC.read_text(), TopicName="orders", Fifo=fifo)["TopicArn"]
    assert topic.endswith("orders.fifo" if fifo == "true" else "orders")
    stack = {"TopicArn": topic, "QueueName": "billing", "Fifo": fifo, "Raw": raw, "Events": "placed,paid"}
    made = _deploy(client, "queue", QUEUE.read_text(), **stack)
    assert made["QueueArn"].endswith("billing.fifo" if fifo == "true" else "billing")

    for event in ("placed", "seen"):
        _publish(client, topic, event)

    (body,) = _bodies(client, made["QueueUrl"])
    assert (body if raw == "true" else json.loads(body)["Message"]) == '"placed"'
    policy = client("sqs").get_queue_attributes(QueueUrl=made["QueueUrl"], AttributeNames=["Policy"])
    allowed, _ = json.loads(policy["Attributes"]["Policy"])["Statement"]
    assert allowed["Condition"] == {"ArnEquals": {"aws:SourceArn": topic}}


def test_every_message_is_wanted_unless_events_are_named(client: Client) -> None:
    """The parameter may be left out, and an own key may be asked for."""
    topic = _deploy(client, "topic", TOPIC.read_text(), TopicName="orders")["TopicArn"]
    queue = _deploy(client, "queue", QUEUE.read_text(), TopicArn=topic, QueueName="billing", OwnKey="true")["QueueUrl"]

    for event in ("placed", "seen"):
        _publish(client, topic, event)

    assert len(_bodies(client, queue)) == 2


def test_what_cannot_be_delivered_or_called_is_kept() -> None:
    """Dead letters of the queue and of its subscription have one place, for two weeks, which has no other source."""
    (subscription,) = _resources(QUEUE, "SNS::Subscription").values()
    queue, letters = (_resources(QUEUE, "SQS::Queue")[name] for name in ("Queue", "DeadLetters"))
    place = {"Fn::GetAtt": ["DeadLetters", "Arn"]}
    assert queue["RedrivePolicy"] == {"deadLetterTargetArn": place, "maxReceiveCount": {"Ref": "MaxReceiveCount"}}
    assert subscription["RedrivePolicy"] == {"deadLetterTargetArn": place}
    assert letters["MessageRetentionPeriod"] == 14 * 86_400
    assert letters["FifoQueue"] == queue["FifoQueue"]
    allowed = letters["RedriveAllowPolicy"]
    assert allowed["redrivePermission"] == "byQueue"
    (source,) = allowed["sourceQueueArns"]
    assert source["Fn::Sub"][1]["Name"] == queue["QueueName"]


def test_only_the_topic_can_send() -> None:
    """By the policy of both queues, which stands for a signature."""
    _check_policies(QUEUE, {"Ref": "TopicArn"})


def test_queues_are_encrypted_by_a_key_that_sns_can_use() -> None:
    """That of SQS, which asks for nothing; or an own one that lets the topic."""
    for each in _resources(QUEUE, "SQS::Queue").values():
        assert each["SqsManagedSseEnabled"]["Fn::If"] == ["HasOwnKey", {"Ref": "AWS::NoValue"}, True]
        assert each["KmsMasterKeyId"]["Fn::If"][1] == {"Fn::GetAtt": ["Key", "Arn"]}
    (key,) = _resources(QUEUE, "KMS::Key").values()
    (topic,) = (each for each in key["KeyPolicy"]["Statement"] if "Service" in each["Principal"])
    assert topic["Principal"] == {"Service": "sns.amazonaws.com"}
    assert topic["Action"] == ["kms:GenerateDataKey*", "kms:Decrypt"]
    assert topic["Condition"] == {"ArnEquals": {"aws:SourceArn": {"Ref": "TopicArn"}}}


@pytest.mark.parametrize("template", [TOPIC, QUEUE], ids=lambda path: path.name)
def test_templates_are_without_fault(template: Path) -> None:
    """By the linter of CloudFormation's own makers, which knows every type's schema."""
    assert lint_file(template) == []


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


@pytest.fixture(scope="module")
def synthesised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By stack, the template that the CDK makes of docs/aws/sns_cdk.py."""
    if shutil.which("node") is None:
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict("the CDK needs node")
    out = tmp_path_factory.mktemp("cdk")
    subprocess.run([sys.executable, "-c", SYNTHESISE, str(out), str(DOCS / "aws")], check=True)
    return {name: out / f"{name}.template.json" for name in ("orders", "ordered")}


@needs("aws_cdk")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stack", "ending"), [("orders", ""), ("ordered", ".fifo")])
def test_cdk_makes_what_the_templates_make(
    client: Client, synthesised: dict[str, Path], stack: str, ending: str
) -> None:
    """One topic and three queues, each with its policy, filter and dead letters."""
    template = synthesised[stack]
    assert lint_file(template) == []
    content = json.loads(template.read_text())
    for name in ("Parameters", "Rules"):  # they ask whether the account is bootstrapped
        content.pop(name, None)
    _deploy(client, stack, json.dumps(content))
    (topic,) = (each["TopicArn"] for each in client("sns").list_topics()["Topics"])
    for event in ("placed", "seen"):
        _publish(client, topic, event)

    for service in ("billing", "stock", "mail"):
        queue = client("sqs").get_queue_url(QueueName=f"{service}-orders{ending}")["QueueUrl"]
        (body,) = _bodies(client, queue)
        assert json.loads(body)["Message"] == '"placed"'
    (name,) = _resources(template, "SNS::Topic")
    _check_policies(template, {"Ref": name})
    queues = _resources(template, "SQS::Queue")
    assert len(queues) == 6
    assert all(each["SqsManagedSseEnabled"] for each in queues.values())
    assert sum("RedrivePolicy" in each for each in queues.values()) == 3
    assert all("RedrivePolicy" in each for each in _resources(template, "SNS::Subscription").values())
