"""SQS, DynamoDB and S3 on this machine, without Docker: `with EmbeddedAws() as aws: aws.endpoint`.

MiniStack serves all over HTTP from one process on one port. It was chosen over moto because its conditional
writes are atomic and because, like SQS, it does not delete a message on an expired receipt handle: a server
that is kinder than AWS would hide the duplicates this project is about.
"""

import json
import subprocess
import tempfile
import urllib.request
import uuid

from lab import tether
from lab.embedded.server import HOST, Server, package

REGION = "us-east-1"


class EmbeddedAws(Server):
    """A private SQS, DynamoDB and S3. The state is in memory: every instance and every restart begins empty."""

    def __init__(self, port: int | None = None) -> None:
        super().__init__(port)
        self._name = uuid.uuid4().hex

    @staticmethod
    def missing() -> str | None:
        return package("ministack")

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def broker_url(self) -> str:
        return f"sqs://test:test@{HOST}:{self.port}//"

    def store_url(self, table: str) -> str:
        return f"dynamodb://test:test@{HOST}:{self.port}/{table}?region={REGION}"

    def bucket_url(self, bucket: str, options: str = "over=100KB") -> str:
        return f"s3://test:test@{bucket}?endpoint={self.endpoint}&region={REGION}&{options}"

    def launch(self) -> subprocess.Popen[bytes]:
        return tether.start(
            "ministack",
            env={
                "GATEWAY_PORT": str(self.port),
                "BIND_HOST": HOST,  # its default is every interface
                "SERVICES": "cloudformation,dynamodb,kms,s3,sns,sqs",
                "LOG_LEVEL": "WARNING",
                "MINISTACK_EDITION": self._name,  # its health page shows this: proof that the answer is ours
                "PERSIST_STATE": "0",
                "USE_SSL": "0",
                "TMPDIR": tempfile.gettempdir(),
                "DOCKER_HOST": "unix:///nonexistent",  # it removes its own old containers otherwise
            },
        )

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/_ministack/health", timeout=5) as reply:
                return bool(json.load(reply)["edition"] == self._name)
        except (OSError, ValueError, KeyError):
            return False
