"""Objects in a bucket of Amazon S3, or of a server that speaks its protocol.

S3 is strongly consistent since December 2020: what a put has acknowledged is there for every get.
"""

from base64 import b64encode
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from typing import Any, Self
from urllib.parse import unquote

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError
from botocore.parsers import ResponseParserError

from celery_idempotent._version import __version__
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.stores.failures import Rule, failure, rule_of
from celery_idempotent.stores.forks import PerProcess
from celery_idempotent.stores.objects import Address, ObjectMissing

_CONFIG = Config(
    connect_timeout=2,
    read_timeout=10,
    retries={"mode": "standard", "total_max_attempts": 3},
    max_pool_connections=64,
    user_agent=f"celery-idempotent/{__version__} Boto3/{boto3.__version__}",
)
"""Seconds. botocore's defaults are 60 and 60."""

_MISSING = frozenset({"NoSuchKey", "NotFound", "404"})

_RULES = (
    Rule(
        codes=frozenset({"NoSuchBucket"}),
        remedy="the bucket does not exist; create it, as docs/aws/large-results.yaml does",
    ),
    Rule(
        codes=frozenset({"AccessDenied", "AllAccessDisabled", "403", "Forbidden"}),
        remedy="{action} is not granted, or not the use of the bucket's key; without s3:ListBucket, S3 says the same "
        "of an object that is not there",
    ),
    Rule(
        codes=frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}),
        remedy="S3 does not accept the credentials",
    ),
    Rule(
        codes=frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}),
        remedy="the bucket is in another Region; name it: s3://bucket/prefix?region=eu-west-1",
    ),
    Rule(
        codes=frozenset({"InvalidObjectState"}),
        remedy="the object is archived; let the lifecycle of the bucket delete objects, not move them",
    ),
    Rule(
        codes=frozenset({"EntityTooLarge", "InvalidBucketName", "KeyTooLongError", "MethodNotAllowed"}),
        errors=(NoCredentialsError, ParamValidationError),
    ),
)


class S3Objects:
    """Keeps each object in a bucket, under the name that it is given.

    Args:
        bucket: Its name.
        region: AWS Region; default: whatever boto3 finds.
        endpoint_url: Another endpoint, such as ``http://localhost:9000``.
        session: Your own boto3 session, for credentials and profile.
        client: A function that makes a client of S3, in place of all these.
    """

    def __init__(
        self,
        bucket: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        session: boto3.session.Session | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self._bucket = bucket
        # A bucket's name is no part of the host name where the server has none of AWS's domains.
        config = _CONFIG.merge(Config(s3={"addressing_style": "path"})) if endpoint_url else _CONFIG

        def new_client() -> Any:
            made = session or boto3.session.Session()
            return made.client("s3", region_name=region, endpoint_url=endpoint_url, config=config)

        self._client = PerProcess(client or new_client)

    @classmethod
    def at(cls, address: Address) -> Self:
        """The bucket that ``s3://[key:secret@]bucket/prefix`` names; options are ``region`` and ``endpoint``."""
        key, _, secret = map(unquote, address.login.partition(":"))
        session = boto3.session.Session(key, secret) if key else None
        options = address.options
        return cls(address.bucket, region=options.get("region"), endpoint_url=options.get("endpoint"), session=session)

    def __repr__(self) -> str:
        return f"s3://{self._bucket}"

    def put(self, name: str, data: bytes) -> None:
        """See :meth:`celery_idempotent.stores.objects.ObjectStore.put`; S3 compares the SHA-256, too."""
        digest = b64encode(sha256(data).digest()).decode()
        reply = self._ask("PutObject", "put_object", Key=name, Body=data, ChecksumSHA256=digest)
        if not reply.get("ETag"):
            # Who answers in S3's place may take anything for done.
            raise StoreUnavailable(repr(self), "PutObject", "the answer has no ETag, so it is not S3's")

    def get(self, name: str) -> bytes:

        def read(reply: Any) -> bytes:
            with closing(reply["Body"]) as body:
                data: bytes = body.read()
            return data

        found: bytes = self._ask("GetObject", "get_object", read, Key=name)
        return found

    def delete(self, name: str) -> None:
        self._ask("DeleteObject", "delete_object", Key=name)

    def _ask(
        self, action: str, method: str, read: Callable[[Any], Any] = lambda reply: reply, **parameters: Any
    ) -> Any:
        """What ``read`` makes of the server's reply; ``action`` is the IAM action."""
        try:
            return read(getattr(self._client(), method)(Bucket=self._bucket, **parameters))
        except (ClientError, BotoCoreError, ResponseParserError) as error:
            code, text = "", str(error)
            if isinstance(error, ClientError):
                code = str(error.response.get("Error", {}).get("Code", ""))
                text = f"{code}: {error.response.get('Error', {}).get('Message', '')}"
            if action == "GetObject" and code in _MISSING:
                raise ObjectMissing(f"{self!r} has no object {parameters['Key']!r}") from error
            raise failure(
                rule_of(_RULES, error, code, text), repr(self), action, text, action=f"the IAM action s3:{action}"
            ) from error
