"""What an ``Idempotency-Key`` means, without framework, clock or I/O.

Sections are those of draft-ietf-httpapi-idempotency-key-header-06.
"""

import inspect
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from math import ceil
from typing import Any, Literal, TypedDict
from urllib.parse import quote
from uuid import UUID

from celery_idempotent.errors import (
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    PolicyError,
    ResultLost,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.integration.task.guard import check_policy
from celery_idempotent.protocol.keys import WHOLE_CALL, CallSignature
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import bounded
from celery_idempotent.troubleshooting import link

REPLAYED = ("Idempotent-Replayed", "true")
"""Stripe's header of an answer that was recorded by an earlier request."""

LONGEST_KEY = 255
"""Characters, as for Stripe's."""

_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}
_NOT_APPLIED = {401, 408, 409, 425, 429}
"""By these an application says that it did nothing, and that the same request may succeed (RFC 9110, section 15.5)."""

_NEVER_KEPT = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "date", "server", "set-cookie"),
}
"""What is about one connection, one message or one client, and no part of the outcome."""

_WITHOUT_CONTENT = {204, 205, 304}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
"""RFC 9110, section 5.5; what is no ASCII is sent as Latin-1."""

_STRING = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
"""RFC 9651, section 3.3.3."""

_BARE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z:/=@-]+")
"""A token, and what else clients send without quotes. No comma: by one a server joins two header lines."""

_URL = re.compile(r"https?://[!$-;=?-\[\]-~]+")
_IN_PATHS = "/:@!$&'()*+,;=~"
"""RFC 3986, section 3.3; anything else that a client has put into a path is no text for a record."""


class Problem(Enum):
    """Why a request is not answered by the application: the end of its type's URI, status, title, what to do."""

    KEY_MISSING = (
        *("key-missing", 400, "Idempotency-Key is missing"),
        "This operation requires an Idempotency-Key. Nothing was done.",
    )
    KEY_MALFORMED = (
        *("key-malformed", 400, "Idempotency-Key is malformed"),
        f"It is one header line with one string of 1 to {LONGEST_KEY} characters, such as a UUID in double quotes. "
        "Nothing was done.",
    )
    BODY_MALFORMED = ("body-malformed", 400, "Content-Length is wrong", "Nothing was done.")
    CALLER_UNKNOWN = (
        *("caller-unknown", 403, "The caller is unknown"),
        "A request with an Idempotency-Key has to be authenticated here. Nothing was done.",
    )
    IN_FLIGHT = (
        *("in-flight", 409, "A request is outstanding for this Idempotency-Key"),
        "Send the same request with the same key again later. It is done once.",
    )
    BODY_TOO_LARGE = (
        *("body-too-large", 413, "The request is too large"),
        "An idempotent request is read before it is processed, up to a limit. Nothing was done.",
    )
    KEY_REUSED = (
        *("key-reused", 422, "Idempotency-Key is already used"),
        "It belongs to a request with another payload. Nothing was done. Use a new key for a new request.",
    )
    OUTCOME_UNKNOWN = (
        *("outcome-unknown", 500, "The outcome is unknown"),
        "An earlier request with this key ended without an outcome, and a person has to find out what it did. Do not "
        "send it with another key. With the same key nothing is done until then.",
    )
    RESPONSE_LOST = (
        *("response-lost", 500, "The response was not kept"),
        "The request was processed and will not be processed again; its response could not be kept. Do not send it "
        "with another key.",
    )
    STORE_UNAVAILABLE = (
        *("store-unavailable", 503, "The request cannot be recorded"),
        "Nothing was done. Send the same request with the same key again later.",
    )
    UNCONFIRMED = (
        *("unconfirmed", 503, "The outcome is not confirmed"),
        "The request may have been processed. Send it with the same key again later: it is done once.",
    )


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole response."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def answer(status: int, content: Any = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A response as it is recorded, for a view that commits its outcome itself::

        with current_attempt().transaction() as tx:
            tx.execute(...)
            return tx.done(answer(201, {"order": order_id}))

    What is committed is what this request and every repetition are answered with, whatever else the view returns.

    Args:
        status: The status code.
        content: Text or bytes; anything else is made JSON. None: no content.
        headers: Further headers. Text is ``text/plain`` unless they say otherwise.

    Raises:
        PolicyError: No server can send it: committed, it would fail each repetition for good.
    """
    if not (isinstance(status, int) and 200 <= status <= 599):
        raise PolicyError("status", repr(status), "must be a number from 200 to 599")
    match content:
        case None:
            kind, body = "", b""
        case bytes():
            kind, body = "application/octet-stream", content
        case str():
            kind, body = "text/plain; charset=utf-8", content.encode()
        case _:
            kind, body = "application/json", json.dumps(content, default=str).encode()
    if body and status in _WITHOUT_CONTENT:
        raise PolicyError("status", repr(status), "such a response has no content")
    given = dict(headers or {})
    about = "must be one line of Latin-1 text, without blanks around it"
    for name, value in given.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise PolicyError("headers", repr(name), "is no name of a header")
        if not (isinstance(value, str) and _VALUE.fullmatch(value)):
            raise PolicyError("headers", f"{name}: {value!r}", about)
    named = {name.lower() for name in given}
    first = (("content-type", kind),) if kind and "content-type" not in named else ()
    return record_of(HttpAnswer(status, (*first, *given.items()), body))


def record_of(given: HttpAnswer, chosen: Iterable[str] | None = None) -> dict[str, Any]:
    """The response as every serialiser can keep it, with the ``chosen`` headers; default: all that can be kept."""
    named = [(each, each[0].lower()) for each in given.headers]
    headers = [list(each) for each, name in named if name not in _NEVER_KEPT and (chosen is None or name in chosen)]
    try:
        body = {"text": given.body.decode()}
    except UnicodeDecodeError:
        body = {"base64": b64encode(given.body).decode()}
    return {"http": 1, "status": given.status, "headers": headers, **body}


def answer_of(value: Any) -> HttpAnswer:
    """The response that a recorded result is.

    A result that is none, of a view that committed something else or of a person who resolved the operation, is sent as
    JSON; where nothing was kept, there is no content.
    """
    match value:
        case {"http": 1, "status": int(status), "headers": [*headers], "text": str(text)}:
            return HttpAnswer(status, tuple((name, kept) for name, kept in headers), text.encode())
        case {"http": 1, "status": int(status), "headers": [*headers], "base64": str(text)}:
            return HttpAnswer(status, tuple((name, kept) for name, kept in headers), b64decode(text))
        case None:
            return HttpAnswer(204)
        case _:
            kind, body = "application/json", json.dumps(value, default=str).encode()
            return HttpAnswer(200, (("content-type", kind),), body)


def key_of(lines: Sequence[str]) -> str | Problem:
    """The key in the ``Idempotency-Key`` header lines of a request (section 2.1); ``"k"`` and ``k`` are the same."""
    if not lines:
        return Problem.KEY_MISSING
    line = lines[0].strip(" \t")
    quoted = _STRING.fullmatch(line)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else line
    fits = len(lines) == 1 and 0 < len(key) <= LONGEST_KEY and (quoted or _BARE.fullmatch(line))
    return key if fits else Problem.KEY_MALFORMED


def caller_of(value: Any) -> str | Problem:
    """Who calls, by what a function of the author's says; an empty header names nobody."""
    if value is None or isinstance(value, str):
        return value or Problem.CALLER_UNKNOWN
    if isinstance(value, int | UUID) and not isinstance(value, bool):
        return str(value)
    raise PolicyError("caller", repr(type(value)), "it must return text, a number, a UUID or None")


def require_function(option: str, value: object) -> None:
    """Refuse what is given for a function of the request and is none."""
    if value is not None and not callable(value):
        raise PolicyError(option, repr(value), "must be a function of the request")


def by_authorization(header: str | None) -> str | None:
    """Who calls, by a hash of the ``Authorization`` header."""
    return sha256(header.encode("utf-8", "surrogatepass")).hexdigest() if header else None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """All of a request that its identity depends on; ``route`` is what people call it."""

    method: str
    path: str
    query: str
    content_type: str
    body: bytes
    key: str
    caller: str
    route: str | None

    @property
    def name(self) -> str:
        """In records, logs and metrics, such as ``POST /orders/{order_id}``."""
        return bounded(f"{self.method} {self.route or quote(self.path, _IN_PATHS, errors='backslashreplace')}")

    def arguments(self) -> dict[str, Any]:
        """What a policy's ``fingerprint`` and ``label`` can name."""
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            body = self.body.decode("utf-8", "backslashreplace")
        return {
            "method": self.method,
            "path": self.path,
            "caller": self.caller,
            "key": self.key,
            "query": self.query,
            "content_type": self.content_type.partition(";")[0].strip().lower(),
            "digest": sha256(self.body).hexdigest(),
            "body": body,
        }


SIGNATURE = CallSignature(inspect.signature(lambda method, path, caller, key, query, content_type, digest, body: None))
"""What a request is to a policy."""

Caller = Callable[..., Any] | Literal["authorization", "anybody"]


class HttpOptions(TypedDict, total=False):
    """What can be chosen, alike for all frameworks; see :class:`HttpRules`."""

    policy: Policy
    required: bool
    methods: Iterable[str]
    outcomes: Callable[[int], bool]
    headers: Iterable[str]
    max_request: int
    max_response: int
    documentation: str


@dataclass(frozen=True, kw_only=True)
class HttpRules:
    """What is decided about requests.

    Args:
        caller: Who calls: a function of the request that returns the id of a user or tenant, or None where it cannot
            tell, and such a request is refused; ``"authorization"``: the ``Authorization`` header, so that a new token
            is another caller; ``"anybody"``: whoever knows or guesses a key sees its response. Default: that header;
            requests with neither header nor cookie are of one caller, and one with a cookie alone, which may be
            somebody's session, is refused; this warns, as it may be meant otherwise.
        policy: What is promised. Its ``key`` is always method, path, caller and ``Idempotency-Key``. ``fingerprint``
            and ``label`` can name these as ``method``, ``path``, ``caller`` and ``key``, and ``query``,
            ``content_type``, ``digest`` (of the body) and ``body``, parsed if it is JSON. Default fingerprint: query,
            content type and digest.
        required: Whether a request without key is refused; otherwise it runs unprotected.
        methods: Those that are protected.
        outcomes: Whether a status is an outcome, to be recorded and replayed; after any other the next request with the
            key runs. Default: all but 401, 408, 409, 425, 429 and 5xx. Under ``on_takeover="refuse"`` the default is
            all, as a failure may have begun; what you exclude there is your word that nothing has.
        headers: The names of response headers to keep. Default: all. Never kept are those about one connection or one
            client: ``Set-Cookie``, ``Date``, ``Server``, and hop-by-hop headers.
        max_request: Bytes of a body beyond which a request is refused, as it has to be read before it is processed.
        max_response: Bytes of a body beyond which a response is not kept: the operation is completed, this caller gets
            it, and a repetition is told that it is lost.
        documentation: URL of your page about all this, for the ``type`` and ``Link`` of problems (section 2.7).

    Raises:
        PolicyError: A value cannot work; the message says which and what to write instead.
    """

    caller: Caller | None = None
    policy: Policy = field(default_factory=Policy)
    required: bool = False
    methods: Iterable[str] = ("POST", "PATCH")
    outcomes: Callable[[int], bool] | None = None
    headers: Iterable[str] | None = None
    max_request: int = 1_000_000
    max_response: int = 300_000
    documentation: str | None = None

    def __post_init__(self) -> None:
        named = ("authorization", "anybody")
        is_caller = self.caller is None or callable(self.caller) or self.caller in named
        self._require("caller", is_caller, f"must be a function or one of {named}")
        self._require("required", isinstance(self.required, bool), "must be True or False")
        self._require("outcomes", self.outcomes is None or callable(self.outcomes), "must be a function of a status")
        for option in ("max_request", "max_response"):
            limit = getattr(self, option)
            self._require(option, type(limit) is int and limit > 0, "must be a number of bytes from 1")
        url = self.documentation
        is_url = url is None or (isinstance(url, str) and _URL.fullmatch(url) is not None)
        self._require("documentation", is_url, "must be an absolute URL in ASCII, without fragment")
        self._set("methods", self._names("methods", str.upper))
        self._require("methods", bool(self.methods), "must name at least one")
        safe = sorted(_SAFE.intersection(self.methods))
        self._require("methods", not safe, f"{', '.join(safe)} has no effect to protect; leave it out")
        if self.headers is not None:
            self._set("headers", self._names("headers", str.lower))
            never = sorted(_NEVER_KEPT.intersection(self.headers))
            self._require("headers", not never, f"{', '.join(never)} is never kept; leave it out")
        policy = self.policy
        self._require("policy", isinstance(policy, Policy), "must be a Policy(...)")
        if policy.key != WHOLE_CALL:
            raise PolicyError("key", repr(policy.key), "it is method, path, caller and Idempotency-Key; leave it out")
        fingerprint = ("query", "content_type", "digest") if policy.fingerprint == WHOLE_CALL else policy.fingerprint
        key = ("method", "path", "caller", "key")
        self._set("policy", replace(policy, key=key, fingerprint=fingerprint, scope=policy.scope or "http"))
        check_policy(self.policy, SIGNATURE.signature)

    def _require(self, option: str, holds: bool, remedy: str) -> None:
        if not holds:
            raise PolicyError(option, repr(getattr(self, option)), remedy)

    def _set(self, option: str, value: Any) -> None:
        object.__setattr__(self, option, value)

    def _names(self, option: str, spelt: Callable[[str], str]) -> frozenset[str]:
        given = getattr(self, option)
        fits = not isinstance(given, str) and isinstance(given, Iterable)
        names = list(given) if fits else []
        self._require(option, fits and all(isinstance(each, str) for each in names), "must be a tuple of names")
        return frozenset(map(spelt, names))

    @property
    def refuses(self) -> bool:
        """Whether what is wrong with a request is refused; a policy that is tried out, or off, lets it run."""
        return self.policy.mode == "enforce"

    def problem_of_length(self, declared: str | None) -> Problem | None:
        """What is wrong with a request of that ``Content-Length``."""
        if declared is None or declared == "":
            return None
        if not (declared.isascii() and declared.isdigit()):
            return Problem.BODY_MALFORMED
        # Its length first: Python converts no number of thousands of digits.
        digits = declared.lstrip("0")
        return Problem.BODY_TOO_LARGE if len(digits) > 18 or int(digits or "0") > self.max_request else None

    def is_outcome(self, status: int) -> bool:
        """Whether a response of the application's is recorded and replayed."""
        if self.outcomes is not None:
            return bool(self.outcomes(status))
        return self.policy.on_takeover == "refuse" or (status < 500 and status not in _NOT_APPLIED)

    def refusal(self, problem: Problem, retry_after: float | None = None) -> HttpAnswer:
        """The response that tells a problem, as RFC 9457 has it."""
        slug, status, title, detail = problem.value
        where = self.documentation
        kind = link(f"http#{slug}") if where is None else f"{where}#{slug}"
        body = json.dumps({"type": kind, "title": title, "status": status, "detail": detail}).encode()
        headers = [("content-type", "application/problem+json"), ("content-language", "en")]
        if where is not None:
            headers.append(("link", f'<{where}>; rel="describedby"; type="text/html"'))
        if retry_after is not None:
            headers.append(("retry-after", str(max(1, ceil(retry_after)))))
        return HttpAnswer(status, tuple(headers), body)

    def refusal_of(self, error: Exception, key: str, *, has_run: bool) -> HttpAnswer | None:
        """The response that tells of an error about the operation of that key; None where it is another's."""
        later = self.policy.backoff_ms / 1000
        match error:
            case StoreMisconfigured():
                return None  # it stays until somebody mends it, and he has to see why
            case StoreUnavailable():
                return self.refusal(Problem.UNCONFIRMED if has_run else Problem.STORE_UNAVAILABLE, later)
            case KeyReused(key=of) if of == key:
                return self.refusal(Problem.KEY_REUSED)
            case LeaseLost(key=of) if of == key:
                return self.refusal(Problem.IN_FLIGHT, later)
            case OutcomeUnknown(key=of) if of == key:
                return self.refusal(Problem.OUTCOME_UNKNOWN)
            case ResultLost(key=of) if of == key:
                return self.refusal(Problem.RESPONSE_LOST)
            case _:
                return None
