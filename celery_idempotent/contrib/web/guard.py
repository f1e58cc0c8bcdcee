"""Who gets to see a page: whoever knows the token, as a bearer or by a cookie that only this app can have signed.

A cookie is sent by browsers whoever has written the form. So what it may do also takes a token that stands in the
page's own forms, and a request that comes from the page itself.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from urllib.parse import parse_qs, quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer, under which browsers call the origin of the page's own forms null.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_SESSION = 12 * 3600
"""Seconds for which a cookie counts."""

_LONGEST_QUERY = 8192
"""Bytes; a key has up to 2048, each of which may be written as three."""

_STRANGER = "A session lasts twelve hours, and then asks again."

_LARGEST_BODY = 2**20
_LARGEST_LOGIN = 2**13
_MOST_FIELDS = 200


def with_headers(app: ASGIApp) -> ASGIApp:
    """``app``, with the headers of every answer by which browsers refuse what nobody here has written."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await app(scope, receive, send_with_headers)

    return guarded


@dataclass(frozen=True, slots=True)
class Sessions:
    """Cookies that stand for the token, and what is signed with it."""

    token: str = field(repr=False)
    clock: Callable[[], float] = time.time

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers share cookies between the ports of a machine, and another shop has another."""
        return f"idempotency_{self._sign('name')[:8]}"

    def knows(self, token: str) -> bool:
        return _equal(token, self.token)

    def begin(self) -> str:
        """The cookie of a new session."""
        session = f"{int(self.clock()):x}.{secrets.token_hex(16)}"
        return f"{session}.{self._sign('session', session)}"

    def is_valid(self, cookie: str) -> bool:
        session, _, signature = cookie.rpartition(".")
        is_signed = _equal(signature, self._sign("session", session))
        return is_signed and self.clock() - int(session.partition(".")[0], 16) < _SESSION

    def form_token(self, cookie: str) -> str:
        return self._sign("form", cookie)

    def _sign(self, *what: str) -> str:
        return hmac.new(sha256(_bytes(self.token)).digest(), _bytes(":".join(what)), sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _equal(given: str, right: str) -> bool:
    """Compared in a time that does not tell how much of it is right."""
    return hmac.compare_digest(_bytes(given), _bytes(right))


class Denied(HTTPException):
    """The request is answered with an error, and a sentence that says why."""


class PageAccess:
    """Lets a request through to ``app`` if it may come; the form of one that writes is in its ``state``."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of what is no request the app knows nothing, and closes it.
        answer = await self._admit(Request(scope, receive)) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    async def _admit(self, request: Request) -> Response | None:
        """None if ``request`` may go on; a redirect if it had to bring its token first."""
        query, is_post = request.query_params, request.method == "POST"
        if len(request.scope["query_string"]) > _LONGEST_QUERY:
            raise Denied(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        if request.method not in ("GET", "HEAD", "POST"):
            raise Denied(HTTPStatus.METHOD_NOT_ALLOWED, "A page is read or sent, and nothing else.")
        if not is_post and "token" in query:
            rest = [(name, value) for name, value in query.multi_items() if name != "token"]
            return self._enter(request, query["token"], request.scope["path"], rest)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        cookie = request.cookies.get(self._sessions.cookie, "")
        form_token = None  # what forms must carry: nothing of a bearer, whom no other site can make send anything
        if scheme.lower() == "bearer":
            form_token = "" if self._sessions.knows(bearer.strip()) else None
        elif self._sessions.is_valid(cookie):
            form_token = self._sessions.form_token(cookie)
        form = await _form_of(request, is_known=form_token is not None) if is_post else {}
        if "token" in form:
            return self._enter(request, form["token"][-1], f"{request.scope['root_path']}/", [])
        if form_token is None:
            raise Denied(HTTPStatus.UNAUTHORIZED, _STRANGER)
        request.state.form, request.state.form_token = form, form_token
        if is_post and not _equal(form.get("form_token", [""])[-1], form_token):
            raise Denied(HTTPStatus.FORBIDDEN, "This form is of another session. Load its page again, and repeat.")
        return None

    def _enter(self, request: Request, token: str, path: str, query: list[tuple[str, str]]) -> Response:
        """To the page that was asked for, by an address that can be shown to others, with a cookie."""
        if not self._sessions.knows(token):
            raise Denied(HTTPStatus.UNAUTHORIZED, "This is not the token.")
        # Of several slashes at the beginning, browsers would take what follows for another host.
        address = f"/{quote(path.lstrip('/'))}{f'?{urlencode(query)}' if query else ''}"
        answer = RedirectResponse(address, HTTPStatus.SEE_OTHER)
        set_cookie(request, answer, self._sessions.cookie, self._sessions.begin())
        return answer


async def _form_of(request: Request, *, is_known: bool) -> Mapping[str, list[str]]:
    """What was sent: of a stranger no more than the form with the token, or he could fill the memory."""
    # A browser says whose form it is; a program says nothing, and has no cookie either.
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_ours = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if not (is_ours if site is None else site in ("same-origin", "none")):
        raise Denied(HTTPStatus.FORBIDDEN, "Another site has sent this form.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if not is_known and len(body) > _LARGEST_LOGIN:
            raise Denied(HTTPStatus.UNAUTHORIZED, _STRANGER)
        if len(body) > _LARGEST_BODY:
            raise Denied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The form is too large.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise Denied(HTTPStatus.BAD_REQUEST, "The form cannot be read.") from error


def set_cookie(request: Request, answer: Response, name: str, value: str) -> None:
    """A cookie that no script reads, and that browsers send to this app from its own pages alone."""
    answer.set_cookie(
        name,
        value,
        max_age=_SESSION,
        path=request.scope["root_path"] or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
