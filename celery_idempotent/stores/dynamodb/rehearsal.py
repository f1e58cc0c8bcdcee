"""What botocore would send: it is asked once, and the answer is what the direct path repeats.

Endpoint, Region, user agent, target and what is signed are botocore's: by parameters, environment, profile, partition,
FIPS, dual stack, account, and whatever it comes to know later.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from botocore import xform_name
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.hooks import first_non_none_response

from celery_idempotent.stores.dynamodb.signature import Signature
from celery_idempotent.stores.dynamodb.wire import HttpReply, Wire

_OWN = frozenset(
    {
        "accept-encoding",
        "authorization",
        "content-length",
        "host",
        "x-amz-date",
        "x-amz-security-token",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "x-amzn-trace-id",
    }
)
"""Headers that each request has of its own, that HTTP gives it, or, the last one, that a Lambda invocation gives."""

_SCHEME = "AWS4-HMAC-SHA256 Credential="
_CONTENT = "application/x-amz-json-1.0"


class Unfit(Exception):
    """The direct path would not send what botocore sends, or somebody would miss it; the reason for people."""


class _Created(Exception):
    """botocore has made the request; it stops here."""

    def __init__(self, request: Any) -> None:
        self.request = request


_rehearsing: ContextVar[str | None] = ContextVar("rehearsing", default=None)
"""The operation whose request is looked for."""


@dataclass(frozen=True, slots=True)
class Part:
    """How requests to one operation are sent with some credentials."""

    #: Not shown, as the token among the headers is not: traces of errors show what variables hold.
    credentials: ReadOnlyCredentials = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    #: The header that counts tries, as it is on the first one.
    counter: str
    signature: Signature
    wire: Wire
    #: Shows a request to those who hook ``before-send``: their answer, if one of them has it, and the headers as they
    #: leave them. None if nobody does.
    show: Callable[[Mapping[str, str], bytes], tuple[HttpReply | None, Mapping[str, str]]] | None

    def send(self, body: bytes, call: str, counter: str) -> HttpReply:
        """Send ``body`` for the call that has this id; see :meth:`Wire.exchange`."""
        date, authorization = self.signature.headers(body)
        headers: Mapping[str, str] = {
            **self.headers,
            "X-Amz-Date": date,
            "Authorization": authorization,
            "amz-sdk-invocation-id": call,
            "amz-sdk-request": counter,
        }
        if self.show is not None:
            answer, headers = self.show(headers, body)
            if answer is not None:
                return answer
        return self.wire.exchange(headers, body)


def prepare(client: Any) -> None:
    """Make ``client`` ready for :func:`rehearse`."""
    client.meta.events.register_last("request-created", _stop)


def rehearse(
    client: Any, operation: str, parameters: Mapping[str, Any], credentials: ReadOnlyCredentials | None
) -> Part:
    """Learn how ``client`` would send ``operation``, without sending it.

    ``parameters`` must do no harm: whoever answers requests in the server's place may get to see them.

    Raises:
        Unfit: The client's requests cannot be repeated in this way.
    """
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    if session is None:
        raise Unfit("this botocore keeps its connections elsewhere")
    if (client.meta.config.retries or {}).get("mode") == "adaptive":
        raise Unfit("adaptive retries learn from every answer")
    request = _created(client, operation, parameters)
    headers = {name: _text(value) for name, value in request.headers.items()}
    shown = _prepared(request.url, headers, request.body)
    is_hooked = bool(client.meta.events.emit(f"before-send.dynamodb.{operation}", request=shown))
    authorization = request.headers.get("Authorization", "")
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
    return Part(
        credentials=credentials,
        headers={**lasting, **signature.token},
        counter=headers.get("amz-sdk-request", ""),
        signature=signature,
        wire=Wire(session, request.url, signature.host),
        show=partial(_shown, client, operation, request.url) if is_hooked else None,
    )


def _shown(
    client: Any, operation: str, url: str, headers: Mapping[str, str], body: bytes
) -> tuple[HttpReply | None, Mapping[str, str]]:
    request = _prepared(url, headers, body)
    answer = first_non_none_response(client.meta.events.emit(f"before-send.dynamodb.{operation}", request=request))
    if answer is not None:
        return HttpReply(answer.status_code, answer.headers, answer.content), headers
    return None, {name: _text(value) for name, value in request.headers.items() if name != "Content-Length"}


def _prepared(url: str, headers: Mapping[str, str], body: bytes) -> Any:
    """A request as hooks know it: with bytes for the values of headers."""
    return AWSRequest("POST", url, {name: value.encode() for name, value in headers.items()}, body).prepare()


def _created(client: Any, operation: str, parameters: Mapping[str, Any]) -> Any:
    token = _rehearsing.set(operation)
    try:
        getattr(client, xform_name(operation))(**parameters)
    except _Created as created:
        return created.request
    finally:
        _rehearsing.reset(token)
    raise Unfit("calls of the client are intercepted")


def _stop(request: Any, operation_name: str, **_: Any) -> None:
    wanted = _rehearsing.get()
    if wanted is None:
        return
    # Before it, botocore asks for an endpoint: that request, repeated, would succeed and write nothing.
    if operation_name != wanted or "discovery" in request.context:
        raise Unfit("endpoints are discovered, and change")
    raise _Created(request)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
