"""Where the benchmarks run: the server, and everything a reader needs to judge the figures."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import boto3

from lab.embedded import REGION
from lab.versions import versions

OTHER_DYNAMODB = os.environ.get("BENCH_DYNAMODB_ENDPOINT")
"""The endpoint of another DynamoDB than the embedded one, such as dynoxide or DynamoDB Local."""


@dataclass(frozen=True, slots=True)
class DynamoDB:
    """DynamoDB, in a process of its own."""

    endpoint: str

    def session(self) -> boto3.session.Session:
        """A new session; hooks on its events reach every client made from it."""
        return boto3.session.Session("test", "test", region_name=REGION)

    def store_url(self, table: str) -> str:
        host = self.endpoint.removeprefix("http://").rstrip("/")
        return f"dynamodb://test:test@{host}/{table}?region={REGION}"


def describe(*, quick: bool) -> dict[str, str]:
    told = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", told.read_text()) if told.exists() else None
    return {
        "CPU": f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores",
        "System": f"{platform.system()} {platform.release()}",
        "DynamoDB": OTHER_DYNAMODB or "MiniStack, embedded",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "Run": "quick: too few rounds to quote" if quick else "full",
    }
