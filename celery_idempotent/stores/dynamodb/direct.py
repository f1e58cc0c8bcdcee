"""The direct path: PutItem and TransactWriteItems without what boto3 does around each.

It sends what botocore would send, and leaves to botocore what not every call needs: its parsers read errors, which are
raised as its classes, and its handlers, with their quota and delays, decide about retries. What is left out are the
models of parameters, the events of a call, and the generic reading of answers that always have the same form.
"""

import time
from base64 import b64decode, b64encode
from binascii import crc32
from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONEncoder, dumps, loads
from typing import Any
from uuid import uuid4

from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ChecksumError
from botocore.hooks import first_non_none_response
from botocore.parsers import ResponseParserError, create_parser
from botocore.serialize import create_serializer

from celery_idempotent.stores.dynamodb.rehearsal import Part, prepare, rehearse
from celery_idempotent.stores.dynamodb.wire import HttpReply

_LOST = "ConditionalCheckFailedException"


@dataclass(frozen=True, slots=True)
class _Try:
    """What became of one try."""

    reply: HttpReply | None = None
    parsed: Any = None
    error: Exception | None = None
    #: Nothing that botocore could want to try again.
    is_usual: bool = False


class DirectPath:
    """The direct path of one process.

    Args:
        client: What would do it otherwise; its handlers, errors and HTTP session are used.
        credentials: What the client signs with.
        harmless: By operation, parameters of a call that changes nothing.
    """

    def __init__(self, client: Any, credentials: Credentials | None, harmless: Mapping[str, Mapping[str, Any]]) -> None:
        self._client = client
        self._credentials = credentials
        self._harmless = harmless
        self._parts: dict[str, Part] = {}
        self._parser = create_parser("json")
        self._serializer = create_serializer("json", include_validation=False)
        self._has_retried = False
        prepare(client)

    def __call__(self, operation: str, parameters: Mapping[str, Any]) -> Any:
        """The reply, as the client's method returns it, as far as the store looks at it.

        Raises:
            Unfit: This operation must go by the client.
            ClientError: The server refuses.
            BotoCoreError: There is no certain answer.
            ResponseParserError: The answer cannot be read.
        """
        part, body, call = self._part(operation), self._body(operation, parameters), str(uuid4())
        retries: dict[str, Any] = {"invocation-id": call}
        context = {"retries": retries}
        number, counter = 1, part.counter
        while True:
            outcome = self._tried(operation, part, body, call, counter)
            delay = None if outcome.is_usual else self._delay(operation, outcome, number, context)
            if delay is None:
                return self._conclusion(operation, outcome, number, context)
            self._has_retried = True
            time.sleep(delay)
            number += 1
            counter = f"attempt={number}; max={retries.get('max')}"  # which botocore's handlers have filled in

    def _part(self, operation: str) -> Part:
        credentials = self._credentials.get_frozen_credentials() if self._credentials else None
        part = self._parts.get(operation)
        if part is None or part.credentials != credentials:
            part = rehearse(self._client, operation, self._harmless[operation], credentials)
            self._parts[operation] = part
        return part

    def _body(self, operation: str, parameters: Mapping[str, Any]) -> bytes:
        if operation == "PutItem":
            return _ENCODER.encode(parameters).encode()
        # A user's writes may have all that botocore takes; the token is what it adds by itself.
        complete = {**parameters, "ClientRequestToken": str(uuid4())}
        body: bytes = self._serializer.serialize_to_request(complete, self._model(operation))["body"]
        return body

    def _tried(self, operation: str, part: Part, body: bytes, call: str, counter: str) -> _Try:
        try:
            reply = part.send(body, call, counter)
        except BotoCoreError as error:
            return _Try(error=error)
        promised, actual = reply.headers.get("x-amz-crc32"), str(crc32(reply.content))
        if promised not in {None, actual}:
            damage = ChecksumError(checksum_type="crc32", expected_checksum=promised, actual_checksum=actual)
            return _Try(reply, {}, damage)
        usual = _usual(reply)
        if usual is not None:
            return _Try(reply, usual, is_usual=True)
        return _Try(reply, self._parsed(operation, reply))

    def _parsed(self, operation: str, reply: HttpReply) -> Any:
        """A refusal, as botocore reads it."""
        answer = {
            "headers": reply.headers,
            "status_code": reply.status_code,
            "body": _legible(reply.content),
            "context": {"operation_name": operation},
        }
        parsed = self._parser.parse(answer, self._model(operation).output_shape)
        shape = self._client.meta.service_model.shape_for_error_code(parsed.get("Error", {}).get("Code"))
        return {**parsed, **self._parser.parse(answer, shape)} if shape else parsed

    def _delay(self, operation: str, outcome: _Try, number: int, context: dict[str, Any]) -> float | None:
        """Seconds after which botocore would try again; None if it would not."""
        has_reply = outcome.reply is not None
        responses = self._client.meta.events.emit(
            f"needs-retry.dynamodb.{operation}",
            response=(outcome.reply, outcome.parsed) if has_reply else None,
            endpoint=self._client._endpoint,
            operation=self._model(operation),
            attempts=number,
            caught_exception=None if has_reply else outcome.error,
            request_dict={"context": context},
        )
        delay = first_non_none_response(responses)
        return None if delay is None or delay is False else float(delay)

    def _conclusion(self, operation: str, outcome: _Try, number: int, context: dict[str, Any]) -> Any:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.reply is not None
        outcome.parsed["ResponseMetadata"]["RetryAttempts"] = number - 1
        if outcome.reply.status_code >= 300:
            code = outcome.parsed.get("Error", {}).get("Code")
            raise self._client.exceptions.from_code(code)(outcome.parsed, operation)
        if self._has_retried:
            # A success gives back what retries have taken from the quota.
            self._client.meta.events.emit(
                f"after-call.dynamodb.{operation}",
                http_response=outcome.reply,
                parsed=outcome.parsed,
                model=self._model(operation),
                context=context,
            )
        return outcome.parsed

    def _model(self, operation: str) -> Any:
        return self._client.meta.service_model.operation_model(operation)


def _encoded(value: bytes) -> str:
    return b64encode(value).decode()


_ENCODER = JSONEncoder(default=_encoded)


def _usual(reply: HttpReply) -> dict[str, Any] | None:
    """A success, or a lost condition; None if it is something else."""
    if reply.status_code < 300:
        # DynamoDB has one way to say it; who answers in its place may have taken a request, or an error, for done.
        if reply.status_code != 200 or "__type" in _read(reply):
            raise ResponseParserError(f"no success: {reply.status_code} {reply.content[:200]!r}")
        return {"ResponseMetadata": _metadata(reply)}
    if reply.status_code != 400 or _LOST.encode() not in reply.content:
        return None
    body = _read(reply)
    if str(body.get("__type")).rpartition("#")[2] != _LOST:
        return None
    parsed = {"Error": {"Code": _LOST, "Message": body.get("message", "")}, "ResponseMetadata": _metadata(reply)}
    if body.get("Item"):
        parsed["Item"] = {name: _decoded(value) for name, value in body["Item"].items()}
    return parsed


def _legible(content: bytes) -> bytes:
    """A refusal that botocore can read: it takes a page for the message, but breaks on other text than UTF-8 and on
    JSON that is no object, as those have it who answer in DynamoDB's place."""
    text = content.decode(errors="replace")
    try:
        body = loads(text)
    except ValueError:
        return text.encode()
    return content if isinstance(body, dict) else dumps({"message": text}).encode()


def _read(reply: HttpReply) -> dict[str, Any]:
    try:
        body = loads(reply.content)
    except ValueError as error:
        raise ResponseParserError(f"no JSON: {reply.content[:200]!r}") from error
    if not isinstance(body, dict):
        raise ResponseParserError(f"no object: {reply.content[:200]!r}")
    return body


def _metadata(reply: HttpReply) -> dict[str, Any]:
    return {"HTTPStatusCode": reply.status_code, "HTTPHeaders": {"date": reply.headers.get("date", "")}}


def _decoded(value: dict[str, Any]) -> dict[str, Any]:
    return {"B": b64decode(value["B"])} if "B" in value else value
