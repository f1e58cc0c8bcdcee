"""Servers that several kinds of test share."""

import os
from collections.abc import Iterator

import pytest

from example_project.embedded import EmbeddedAws


@pytest.fixture(scope="session")
def dynamodb_endpoint() -> Iterator[str]:
    """A DynamoDB over HTTP: the embedded one, or another by TEST_DYNAMODB_ENDPOINT."""
    given = os.environ.get("TEST_DYNAMODB_ENDPOINT")
    if given:
        yield given
        return
    with EmbeddedAws() as aws:
        yield aws.endpoint
