"""What botocore would send for a PutItem: it is asked once, and later requests differ in their date and body alone.

Endpoint, Region, user agent, target and what is signed are botocore's: by parameters, environment, profile, partition,
FIPS, dual stack, account, and whatever it comes to know later. What is left for each request is hashing.
"""

import hmac
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

_OWN = frozenset(
    {
        "accept-encoding",
        "authorization",
        "content-length",
        "host",
        "x-amz-date",
        "x-amz-security-token",
        "amz-sdk-invocation-id",
        "x-amzn-trace-id",
    }
)
"""Headers that each request has of its own, that HTTP gives it, or, the last one, that a Lambda invocation gives."""

_SCHEME = "AWS4-HMAC-SHA256 Credential="
_CONTENT = "application/x-amz-json-1.0"
_DATE = "the-date-of-the-request"
_DIGEST = 64
"""Characters of a SHA-256 in hexadecimal, with which a canonical request ends."""


class Unfit(Exception):
    """The direct path would not send what botocore sends, or somebody would miss it; the reason for people."""


class _Created(Exception):
    """botocore has made the request; it stops here."""

    def __init__(self, request: Any) -> None:
        self.request = request


_asks_for_request: ContextVar[bool] = ContextVar("asks_for_request", default=False)


class Signature:
    """Signature Version 4 of requests to ``url`` by POST, in the form that botocore gives it.

    Args:
        url: Where they go.
        headers: Those of their headers that are signed, without date and token.
        credentials: By whom.
        region: Of the signature.
        service: Of the signature.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], credentials: ReadOnlyCredentials, region: str, service: str
    ) -> None:
        #: The header with the token of temporary credentials, if they are.
        self.token = {"X-Amz-Security-Token": credentials.token} if credentials.token else {}
        botocores = SigV4Auth(credentials, service, region)
        request = AWSRequest("POST", url, {**headers, **self.token, "X-Amz-Date": _DATE})
        canonical = botocores.canonical_request(request)
        self._before, self._between = canonical[:-_DIGEST].split(_DATE)
        #: The ``Host`` header that is signed.
        self.host = next(line for line in canonical.splitlines() if line.startswith("host:")).removeprefix("host:")
        self._scope = f"{region}/{service}/aws4_request"
        self._credential = f"{_SCHEME}{credentials.access_key}"
        self._headers = botocores.signed_headers(botocores.headers_to_sign(request))
        self._secret = f"AWS4{credentials.secret_key}"
        self._key_of_a_day = "", b""

    def headers(self, body: bytes) -> dict[str, str]:
        """``X-Amz-Date`` and ``Authorization`` of a request that leaves now."""
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        day = date[:8]
        known, key = self._key_of_a_day
        if known != day:
            key = self._secret.encode()
            for each in (day, *self._scope.split("/")):
                key = hmac.digest(key, each.encode(), "sha256")
            self._key_of_a_day = day, key
        canonical = f"{self._before}{date}{self._between}{sha256(body).hexdigest()}"
        text = f"AWS4-HMAC-SHA256\n{date}\n{day}/{self._scope}\n{sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        signed = f"{self._credential}/{day}/{self._scope}, SignedHeaders={self._headers}, Signature={signature}"
        return {"X-Amz-Date": date, "Authorization": signed}


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What all PutItem requests with some credentials have in common."""

    url: str
    #: Not shown, as the token among the headers is not: traces of errors show what variables hold.
    credentials: ReadOnlyCredentials = field(repr=False)
    lasting: Mapping[str, str] = field(repr=False)
    signature: Signature
    #: Whether somebody hooks ``before-send``: to answer in the server's place, as moto does, or to see every request.
    is_hooked: bool

    def headers(self, body: bytes) -> dict[str, str]:
        """The headers of a request that leaves now."""
        return {**self.lasting, **self.signature.headers(body), "amz-sdk-invocation-id": str(uuid4())}


def prepare(client: Any) -> None:
    """Make ``client`` ready for :func:`template_of`."""
    client.meta.events.register_last("request-created", _stop)


def template_of(client: Any, parameters: Mapping[str, Any], credentials: ReadOnlyCredentials | None) -> RequestTemplate:
    """Learn how ``client`` would send a PutItem, without sending it.

    ``parameters`` must do no harm: whoever answers requests in the server's place may get to see them.

    Raises:
        Unfit: The client's requests cannot be repeated in this way.
    """
    if (client.meta.config.retries or {}).get("mode") == "adaptive":
        raise Unfit("adaptive retries learn from every answer")
    request = _request_of(client, parameters)
    headers = {name: value.decode() if isinstance(value, bytes) else value for name, value in request.headers.items()}
    is_hooked = bool(
        client.meta.events.emit("before-send.dynamodb.PutItem", request=prepared(request.url, headers, request.body))
    )
    authorization = headers.get("Authorization", "")
    if credentials is None or not authorization.startswith(_SCHEME) or headers.get("Content-Type") != _CONTENT:
        raise Unfit("the client does not sign JSON by Signature Version 4")
    scope, signed_headers = authorization.removeprefix(_SCHEME).split(", ")[:2]
    _, _, region, service, _ = scope.rsplit("/", 4)
    lasting = {name: value for name, value in headers.items() if name.lower() not in _OWN}
    signed = signed_headers.removeprefix("SignedHeaders=").split(";")
    signature = Signature(
        request.url,
        {name: value for name, value in lasting.items() if name.lower() in signed},
        credentials,
        region,
        service,
    )
    return RequestTemplate(request.url, credentials, {**lasting, **signature.token}, signature, is_hooked)


def prepared(url: str, headers: Mapping[str, str], body: bytes) -> Any:
    """A request as hooks know it: with bytes for the values of headers."""
    return AWSRequest("POST", url, {name: value.encode() for name, value in headers.items()}, body).prepare()


def _request_of(client: Any, parameters: Mapping[str, Any]) -> Any:
    token = _asks_for_request.set(True)
    try:
        client.put_item(**parameters)
    except _Created as created:
        return created.request
    finally:
        _asks_for_request.reset(token)
    raise Unfit("calls of the client are intercepted")


def _stop(request: Any, operation_name: str, **_: Any) -> None:
    if not _asks_for_request.get():
        return
    # Before it, botocore asks for an endpoint: that request, repeated, would succeed and write nothing.
    if operation_name != "PutItem" or "discovery" in request.context:
        raise Unfit("endpoints are discovered, and change")
    raise _Created(request)
