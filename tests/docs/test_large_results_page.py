"""how-to/large-results.md: its program runs as it stands, its bucket is the template's, its permissions are enough."""
# mypy: allow-untyped-decorators

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest
import yaml
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count

from celery_idempotent import IdempotentTask, StoreMisconfigured, forget
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults, open_large_results
from celery_idempotent.stores.objects.s3 import S3Objects
from celery_idempotent.stores.wrappers import Offloading
from lab.embedded import EmbeddedAws
from tests.docs.test_aws_documents import _Template
from tests.support.deliveries import an_app, deliver
from tests.support.documents import DOCS, ROOT, code, table

PAGE = DOCS / "how-to/large-results.md"
REGION = "eu-west-1"
TEMPLATE = (DOCS / "aws" / "large-results.yaml").read_text()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A machine with the page's bucket, and nothing else."""
    with EmbeddedAws() as aws:
        session = boto3.session.Session("test", "test", region_name=REGION)
        session.client("s3", endpoint_url=aws.endpoint).create_bucket(
            Bucket="shop-results", CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            "AWS_ENDPOINT_URL": aws.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        }


def test_program_runs_as_it_stands(environment: dict[str, str], tmp_path: Path) -> None:
    """By the commands of the page, and prints what it says; the second time nothing is read again."""
    (_, program), *_ = code(PAGE, "python")
    assert len(program.splitlines()) < 60
    (tmp_path / "report.py").write_text(program)

    def ran(*command: str) -> str:
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    ((_, shell),) = code(PAGE, "sh")
    commands = [line.split() for line in shell.splitlines() if line.startswith("celery")]
    assert [each[-1] for each in commands] == ["provision", "check"]
    for command in commands:
        ran("-m", *command)
    ((_, printed),) = code(PAGE, "text")
    assert ran("report.py") == printed
    assert ran("report.py") == printed.replace("reading the orders of 2026-10\n", "")


class TestTemplate:
    """docs/aws/large-results.yaml."""

    @pytest.fixture(autouse=True)
    def _aws(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with _moto(monkeypatch):
            yield

    def _bucket(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.load(TEMPLATE, _Template)["Resources"]["Bucket"]
        return found

    @pytest.mark.filterwarnings("ignore:Tried to parse AWS..S3..BucketPolicy:UserWarning")
    def test_it_makes_a_bucket_that_can_be_used(self) -> None:
        """The setting is an output, and names the prefix of the rule."""
        parameters = {"BucketName": "shop-results", "Prefix": "reports/"}
        formation = boto3.client("cloudformation", region_name=REGION)
        formation.create_stack(
            StackName="results",
            TemplateBody=TEMPLATE,
            Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
        )
        (stack,) = formation.describe_stacks()["Stacks"]
        outputs = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
        large = open_large_results(outputs["Setting"])
        assert (large.prefix, large.over) == ("reports/", 102_400)
        Offloading(MemoryStore(), large).verify()

    def test_objects_outlive_what_points_to_them(self) -> None:
        """With the default of the rule and that of a policy."""
        (rule,) = self._bucket()["Properties"]["LifecycleConfiguration"]["Rules"]
        assert (rule["Status"], rule["Prefix"], rule["ExpirationInDays"]) == (
            "Enabled",
            "!Ref Prefix",
            "!Ref DeleteAfterDays",
        )
        days: int = yaml.load(TEMPLATE, _Template)["Parameters"]["DeleteAfterDays"]["Default"]
        assert days * 86_400_000 > Policy().retain_ms
        assert f"`DeleteAfterDays`, {days} by default" in PAGE.read_text()

    def test_nobody_else_can_read_them(self) -> None:
        """Not public, encrypted where they lie and on the way, and they outlive their stack."""
        properties = self._bucket()["Properties"]
        assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
        assert "BucketEncryption" in properties
        assert len(re.findall(r"(DeletionPolicy|UpdateReplacePolicy): Retain", TEMPLATE)) == 2
        policy = yaml.load(TEMPLATE, _Template)["Resources"]["OnlyEncrypted"]["Properties"]["PolicyDocument"]
        (statement,) = policy["Statement"]
        assert statement["Effect"] == "Deny"
        assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def _moto(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return mock_aws()


def _actions_of(name: str) -> set[str]:
    statements = json.loads((DOCS / "aws" / f"iam-{name}-large-results.json").read_text())["Statement"]
    assert {each["Effect"] for each in statements} == {"Allow"}
    for each in statements:
        is_of_bucket = each["Action"] == ["s3:ListBucket"]
        assert each["Resource"] == f"arn:aws:s3:::BUCKET{'' if is_of_bucket else '/PREFIX/*'}"
        assert each["Action"] == sorted(each["Action"])
    return {action.removeprefix("s3:") for each in statements for action in each["Action"]}


class TestPermissions:
    """docs/aws/iam-*-large-results.json."""

    @pytest.fixture(autouse=True)
    def _aws(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with _moto(monkeypatch):
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="results")
            yield

    def _work(self, large: LargeResults) -> Any:
        """All that a worker does: its start, a result, a replay, a lost one."""
        Offloading(MemoryStore(), large).verify()
        app = an_app(idempotency_large_results=large)

        def body(order_id: str) -> str:
            return "x" * 200

        task = app._task_from_fun(body, name="report", base=IdempotentTask, idempotent=Policy("order_id"), shared=False)
        return task, [deliver(task, "o").value for _ in range(2)]

    def test_worker_and_operator_call_what_is_granted(self) -> None:
        """And nothing else; that a missing object is told needs ListBucket, which is no call."""
        called: set[str] = set()

        def client() -> Any:
            made = boto3.client("s3", region_name="us-east-1")
            made.meta.events.register("before-call.s3", lambda model, **_: called.add(model.name))
            return made

        large = LargeResults(S3Objects("results", client=client), over=100, prefix="reports/")
        task, values = self._work(large)
        assert values == ["x" * 200] * 2
        assert called | {"ListBucket"} == _actions_of("worker")

        forget(task.idempotency_key_for("o"), by="ann", reason="gone", app=task.app)
        assert called | {"ListBucket"} == _actions_of("operator")

    @set_initial_no_auth_action_count(4)  # the bucket, and what makes a user
    def test_worker_works_under_its_policy_and_cannot_delete(self) -> None:
        """With IAM enforced; moto checks actions and sees no resources."""
        iam = boto3.client("iam", region_name="us-east-1")
        iam.create_user(UserName="worker")
        document = re.sub(r"arn:[^\"]+", "*", (DOCS / "aws" / "iam-worker-large-results.json").read_text())
        iam.put_user_policy(UserName="worker", PolicyName="worker", PolicyDocument=document)
        key = iam.create_access_key(UserName="worker")["AccessKey"]
        session = boto3.session.Session(key["AccessKeyId"], key["SecretAccessKey"], region_name="us-east-1")
        objects = S3Objects("results", session=session)
        _, values = self._work(LargeResults(objects, over=100))
        assert values == ["x" * 200] * 2
        with pytest.raises(StoreMisconfigured, match="the IAM action s3:DeleteObject is not granted"):
            objects.delete("anything")

    def test_documented_actions_are_those_of_the_policies(self) -> None:
        """The page's table lists what the files grant."""
        documented = {
            found[1]: set(re.findall(r"`s3:(\w+)`", row["grants"]))
            for row in table(PAGE, "role")
            if (found := re.search(r"iam-(\w+)-large-results\.json", row["policy"]))
        }
        assert documented == {name: _actions_of(name) for name in ("worker", "operator")}


def test_documented_urls_open(tmp_path: Path) -> None:
    """Each row of the page's first table, with the size that it says."""
    for row in table(DOCS / "how-to/large-results.md", "`idempotency_large_results`"):
        url = row["`idempotency_large_results`"].strip("`")
        if "://" in url:
            assert open_large_results(url).over in {102_400, 1_048_576}


def test_store_of_the_page_keeps_what_it_is_given() -> None:
    """The class as it stands there, behind a task."""
    _, (_, block) = code(PAGE, "python")
    app = an_app()
    names: dict[str, Any] = {"app": app}
    exec(compile(block, PAGE, "exec"), names)
    large: LargeResults = app.conf.idempotency_large_results
    assert (large.over, large.prefix) == (100_000, "reports/")
    Offloading(MemoryStore(), large).verify()
    name = f"reports/{uuid4().hex}"
    large.objects.put(name, b"1")
    assert large.objects.get(name) == b"1"
    large.objects.delete(name)
    with pytest.raises(names["ObjectMissing"]):
        large.objects.get(name)
