"""Who comes in to the page, and what nobody can make a logged-in person's browser do."""

import asyncio
import sys
import time
from typing import Any
from unittest.mock import AsyncMock

import pytest
from celery import Celery
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from celery_idempotent import PolicyError, Status
from celery_idempotent.contrib.web import create_app
from celery_idempotent.contrib.web.guard import Sessions
from tests.support import web
from tests.support.web import BEARER, TOKEN, a_browser, a_page, a_shop, a_verdict, a_written, form_token_in, now_of

PAGES = ("/", "/records", "/record?key=k", "/judge", "/metrics", "/nowhere")
OTHER = "another token, longer"


@pytest.fixture
def app() -> Celery:
    return a_shop()


@pytest.fixture
def stranger(app: Celery) -> TestClient:
    return TestClient(a_page(app), follow_redirects=False)


@pytest.mark.parametrize("path", PAGES)
def test_nobody_sees_anything_without_the_token(app: Celery, stranger: TestClient, path: str) -> None:
    """Not even which pages there are; the answer asks for the token, and links, which lose strict cookies, anew."""
    record = a_written(app)
    again = stranger.get("/records", params={"label": '"><b>'})
    assert 'href="?label=%22%3E%3Cb%3E">open it again' in again.text
    answer = stranger.get(path)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert (record.label in answer.text, 'name="token"' in answer.text) == (False, True)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        *((each, 200) for each in (f"Bearer {TOKEN}", f"BEARER  {TOKEN} ")),
        *((f"Bearer {each}", 401) for each in ("", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "ü" * 20, "x" * 5000)),
        *((each, 401) for each in ("Bearer", f"Basic {TOKEN}", TOKEN)),
    ],
)
def test_program_comes_in_by_the_token_alone(stranger: TestClient, header: str, status: int) -> None:
    """The name of a scheme has no case; not the beginning of a token, no other scheme, nothing that is not ASCII."""
    assert stranger.get("/", headers=[(b"Authorization", header.encode())]).status_code == status


def _ago(hours: float, token: str = TOKEN) -> str:
    return Sessions(token, lambda: time.time() - hours * 3600).begin()


TIME, NONCE, SIGNATURE = _ago(0).split(".")


@pytest.mark.parametrize(
    ("cookie", "status"),
    [
        (_ago(11), 200),
        (_ago(12.01), 401),
        (_ago(0, OTHER), 401),
        *((each, 401) for each in ("", "x", f"{TIME}.{NONCE}.", f"{TIME}.{'0' * 32}.{SIGNATURE}", "x" * 3000)),
        *((each, 401) for each in (f"{int(TIME, 16) + 9:x}.{NONCE}.{SIGNATURE}", TOKEN.replace(" ", "+"), "1.2.\xfc")),
        (Sessions(TOKEN).form_token(f"{TIME}.{NONCE}.{SIGNATURE}"), 401),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",  # cookies differ in each process
)
def test_cookie_that_this_app_has_signed_comes_in_for_hours(stranger: TestClient, cookie: str, status: int) -> None:
    """None that is forged, expired, or of another token."""
    header = f"{Sessions(TOKEN).cookie}={cookie}".encode("latin-1")
    assert stranger.get("/", headers=[(b"Cookie", header)]).status_code == status


@pytest.mark.parametrize(("scheme", "is_secure"), [("http", False), ("https", True)])
def test_printed_link_becomes_a_cookie(app: Celery, scheme: str, is_secure: bool) -> None:
    """By an address without the token; no script, no other site, no other shop, and no plain HTTP gets the cookie."""
    stranger = TestClient(a_page(app), base_url=f"{scheme}://testserver", follow_redirects=False)
    answer = stranger.get("/records", params={"status": "UNKNOWN", "token": TOKEN, "label": "ä&b"})

    assert (answer.status_code, answer.headers["location"]) == (303, "/records?status=UNKNOWN&label=%C3%A4%26b")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} < set(cookie.split("; "))
    assert ("Secure" in cookie.split("; "), TOKEN in cookie) == (is_secure, False)
    assert stranger.get("/records").status_code == 200
    assert Sessions(TOKEN).cookie != Sessions(OTHER).cookie


@pytest.mark.parametrize("path", ["//evil.example/", "/%2F/evil.example/", "/\\evil.example/", "/x%09%20X-Evil:1"])
def test_link_leads_to_this_host_alone(stranger: TestClient, path: str) -> None:
    """Whatever the path is: no other host, and no header of somebody else's."""
    answer = stranger.get(f"http://testserver{path}?token={TOKEN.replace(' ', '+')}")
    location = answer.headers["location"]
    assert (answer.status_code, location[0], location[1] in "/\\") == (303, "/", False)
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize("token", ["", f"{TOKEN} ", "\udcff"])
def test_wrong_link_does_not_come_in(stranger: TestClient, token: str) -> None:
    """And no cookie is set, nor is the link offered again."""
    answer = stranger.get("/", params={"token": token.encode(errors="surrogateescape")})
    told = (answer.status_code, "set-cookie" in answer.headers, "open it again" in answer.text)
    assert told == (401, False, False)


@pytest.mark.parametrize(
    ("token", "site", "status"),
    [("wrong", "same-origin", 401), (TOKEN, "same-origin", 303), (TOKEN, "cross-site", 403)],
)
def test_token_is_written_into_a_form(stranger: TestClient, token: str, site: str, status: int) -> None:
    """Links stand in logs of proxies; and who could log others in would read what they then write."""
    answer = stranger.post("/", data={"token": token}, headers={"Sec-Fetch-Site": site})
    assert (answer.status_code, answer.headers.get("location")) == (status, "/" if status == 303 else None)
    assert stranger.get("/").status_code == (200 if status == 303 else 401)


OURS = {"Sec-Fetch-Site": "same-origin", "Origin": "http://testserver"}


@pytest.mark.parametrize(
    ("headers", "token", "status"),
    [
        *((each, "OWN", 200) for each in (OURS, {}, {"Sec-Fetch-Site": "none"})),
        *((OURS, each, 403) for each in (None, "ü", "0" * 64, "ANOTHER")),
        *(({"Sec-Fetch-Site": each}, "OWN", 403) for each in ("cross-site", "same-site", "")),
        *(({"Origin": each}, "OWN", 403) for each in ("http://testserver.evil", "http://testserver:1", "[", "null")),
    ],
)
def test_form_is_of_page_and_session(app: Celery, headers: dict[str, str], token: str | None, status: int) -> None:
    """Without the session's token, or from elsewhere, nothing is changed, however good the cookie is."""
    record, page = a_written(app), a_page(app)
    tokens = {"OWN": (browser := a_browser(page)), "ANOTHER": a_browser(page)}
    given = form_token_in(tokens[token].get("/records").text) if token in tokens else token
    answer = browser.post("/judge", data={**a_verdict(record), "form_token": given}, headers=headers)
    assert (answer.status_code, now_of(app, record) == record) == (status, status == 403)


@pytest.mark.parametrize(("write", "status"), [(True, 200), (False, 403)])
def test_program_needs_no_token_of_a_form_where_verdicts_are_given(app: Celery, write: bool, status: int) -> None:
    """No site can make a browser send its header; where people only look, nobody finds a form."""
    record, program = a_written(app), web.a_program(a_page(app, write=write))
    pages = [program.get(page).text for page in ("/records", f"/record?key={record.key}")]
    assert ['<form method="post"' in each for each in pages] == [write, write]
    assert ("checkbox" in pages[0]) is write
    assert program.post("/judge", data=a_verdict(record)).status_code == status
    assert now_of(app, record).status is (Status.COMPLETED if write else Status.UNKNOWN)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("PUT", "/", b"", 405),
        ("POST", "/judge", b"x=" + b"y" * 2**20, 413),
        ("POST", "/judge", b"&".join([b"x=1"] * 300), 400),
        ("POST", "/judge", b"\xff=\xfe", 400),
        ("GET", f"/records?label={'x' * 9000}", b"", 414),
        *(("GET", f"/static/{each}", b"", 404) for each in ("", "../pages.py", "%2e%2e/pages.py", "..%2f..%2fp.py")),
        *(("GET", each, b"", 404) for each in ("/record/../../etc/passwd", "/%00", "//record")),
        ("GET", "/judge", b"", 405),
        ("GET", "/static/style.css", b"", 200),
    ],
    ids=lambda value: str(value)[:24],
)
def test_request_leads_to_a_page_or_nowhere(
    stranger: TestClient, method: str, path: str, content: bytes, status: int
) -> None:
    """A page is read or sent; no form is too large to keep, and no path names a file."""
    answer = stranger.request(method, f"http://testserver{path}", content=content, headers=BEARER)
    assert answer.status_code == status


def test_stranger_can_send_no_more_than_a_token(app: Celery) -> None:
    """Hundreds of half-sent forms would otherwise stay in memory; who has logged out by time is told so."""
    receive = AsyncMock(return_value={"type": "http.request", "body": b"x" * 2**10, "more_body": True})
    headers = [(b"content-length", b"1000000")]
    asked = {"type": "http", "method": "POST", "path": "/judge", "query_string": b"", "headers": headers}
    asked |= {"root_path": "", "scheme": "http", "server": ("h", 80)}

    async def serve() -> Any:
        await a_page(app)(asked, receive, send := AsyncMock())
        return send.call_args_list[0].args[0]

    assert asyncio.run(serve())["status"] == 401
    assert receive.call_count <= 2**4


@pytest.mark.parametrize(
    ("path", "headers"), [*((path, BEARER) for path in PAGES), ("/", {}), ("/static/style.css", {})]
)
def test_every_answer_tells_browsers_what_to_refuse(
    app: Celery, stranger: TestClient, path: str, headers: dict[str, str]
) -> None:
    """Scripts, foreign frames and copies, whatever the answer is; and the pages need none of it."""
    a_written(app)
    answer = stranger.get(f"http://testserver{path}", headers=headers)
    policy, told = answer.headers["content-security-policy"], answer.headers
    assert [each in policy for each in ("default-src 'none'", "frame-ancestors 'none'")] == [True, True]
    assert [each in policy for each in ("script-src", "unsafe")] == [False, False]
    assert (told["x-frame-options"], told["referrer-policy"]) == ("DENY", "same-origin")
    assert (told["cache-control"], told["x-content-type-options"]) == ("no-store", "nosniff")
    assert [each for each in ("<script", "<style", " style=", " onclick=", " onload=") if each in answer.text] == []


def test_page_works_under_a_prefix(app: Celery) -> None:
    """Every link, form and redirect, and the cookie, stay below it."""
    record, prefix = a_written(app), "/a/b"
    browser = a_browser(Starlette(routes=[Mount(prefix, a_page(app))]), prefix)

    assert [cookie.path for cookie in browser.cookies.jar] == [prefix]
    for path in ("/", "/records", f"/record?key={record.key}", "/nowhere"):
        html = browser.get(prefix + path).text
        places = [each.partition('"')[0] for name in ("href", "action", "src") for each in html.split(f' {name}="')[1:]]
        assert [each for each in places if not each.startswith((f"{prefix}/", "#"))] == []
    token = form_token_in(browser.get(f"{prefix}/records").text)
    answer = browser.post(f"{prefix}/judge", data={**a_verdict(record), "form_token": token})
    assert (answer.status_code, browser.get(f"{prefix}/static/style.css").status_code) == (200, 200)


def test_what_is_missing_is_told_at_once(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that nobody guesses, which the error does not tell, the store, and the extra."""
    with pytest.raises(PolicyError, match=r"token='\.\.\.': must have at least 16 characters"):
        create_app(app, token="x" * 15)
    with pytest.raises(PolicyError, match="idempotency_store"):
        create_app(a_shop(idempotency_store=None), token=TOKEN)
    monkeypatch.delitem(sys.modules, "celery_idempotent.contrib.web.pages", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'pip install "celery-idempotent\[web\]"'):
        create_app(app, token=TOKEN)
