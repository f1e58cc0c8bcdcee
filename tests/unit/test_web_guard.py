"""Who comes in to the page, and what nobody can make a logged-in person's browser do."""

import asyncio
import sys
import time
from typing import Any

import pytest
from celery import Celery
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from celery_idempotent import PolicyError, Status
from celery_idempotent.contrib.web import create_app
from celery_idempotent.contrib.web.guard import Sessions
from tests.support.web import (
    BEARER,
    TOKEN,
    a_browser,
    a_page,
    a_program,
    a_shop,
    a_verdict,
    a_written,
    form_token_in,
    now_of,
)

PAGES = ("/", "/records", "/record?key=k", "/judge", "/metrics", "/nowhere")
COOKIE = Sessions(TOKEN).cookie


@pytest.fixture
def app() -> Celery:
    return a_shop()


@pytest.fixture
def stranger(app: Celery) -> TestClient:
    """Somebody without the token."""
    return TestClient(a_page(app), follow_redirects=False)


# -- who comes in


@pytest.mark.parametrize("path", PAGES)
def test_nobody_sees_anything_without_the_token(app: Celery, stranger: TestClient, path: str) -> None:
    """Not even which pages there are; the answer asks for the token."""
    record = a_written(app)

    answer = stranger.get(path)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert record.label not in answer.text
    assert 'name="token"' in answer.text


@pytest.mark.parametrize(
    "header",
    [
        *(f"Bearer {each}" for each in ("", "x", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "ü" * 20, "x" * 5000)),
        *("Bearer", f"Basic {TOKEN}", TOKEN, f"Bearer Bearer {TOKEN}"),
    ],
)
def test_no_other_header_comes_in(stranger: TestClient, header: str) -> None:
    """Not the beginning of a token, no other scheme, and nothing that is not ASCII."""
    assert stranger.get("/", headers=[(b"Authorization", header.encode())]).status_code == 401


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_bearer_comes_in(stranger: TestClient, header: str) -> None:
    """The name of a scheme has no case."""
    assert stranger.get("/", headers={"Authorization": header}).status_code == 200


def test_printed_link_becomes_a_cookie(stranger: TestClient) -> None:
    """The browser is sent to the same page, by an address without the token; no script and no other site has the
    cookie."""
    answer = stranger.get("/records", params={"status": "UNKNOWN", "token": TOKEN, "label": "ä&b"})

    assert (answer.status_code, answer.headers["location"]) == (303, "/records?status=UNKNOWN&label=%C3%A4%26b")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} < set(cookie.split("; "))
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    assert stranger.get("/records").status_code == 200


def test_cookie_of_https_is_never_sent_in_clear(app: Celery) -> None:
    """Browsers keep it from plain HTTP."""
    answer = TestClient(a_page(app), base_url="https://testserver", follow_redirects=False).get(f"/?token={TOKEN}")
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("path", ["//evil.example/", "/%2F/evil.example/", "/\\evil.example/", "/x%09%20X-Evil:1"])
def test_link_leads_to_this_host_alone(app: Celery, path: str) -> None:
    """Whatever the path is: no other host, and no header of somebody else's."""
    stranger = TestClient(a_page(app), follow_redirects=False)
    answer = stranger.get(f"http://testserver{path}?token={TOKEN.replace(' ', '+')}")
    location = answer.headers["location"]
    assert answer.status_code == 303
    assert location.startswith("/")
    assert location[1] not in "/\\"
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize("token", ["", "wrong", f"{TOKEN} ", "\udcff", "x" * 5000])
def test_wrong_link_does_not_come_in(stranger: TestClient, token: str) -> None:
    """And no cookie is set, nor is the wrong token shown."""
    answer = stranger.get("/", params={"token": token.encode(errors="surrogateescape")})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "open it again" not in answer.text


def test_token_is_written_into_a_form(stranger: TestClient) -> None:
    """As links stand in logs of proxies, forms do not."""
    assert stranger.post("/", data={"token": "wrong"}).status_code == 401
    answer = stranger.post("/", data={"token": TOKEN}, headers={"Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert stranger.get("/").status_code == 200


def test_nobody_is_logged_in_by_another_site(stranger: TestClient) -> None:
    """Who could do that would read what somebody then writes."""
    answer = stranger.post("/", data={"token": TOKEN}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


def _forged() -> dict[str, str]:
    cookie = Sessions(TOKEN).begun()
    time_, nonce, signature = cookie.split(".")
    return {
        "empty": "",
        "garbage": "x",
        "no signature": f"{time_}.{nonce}.",
        "other nonce": f"{time_}.{'0' * 32}.{signature}",
        "later": f"{int(time_, 16) + 9:x}.{nonce}.{signature}",
        "other token": Sessions("another token, longer").begun(),
        "expired": Sessions(TOKEN, lambda: time.time() - 12 * 3600 - 5).begun(),
        "the form's": Sessions(TOKEN).form_token(cookie),
        "the token": TOKEN.replace(" ", "+"),
        "large": "x" * 3000,
        "not ASCII": "1.2.\xfc",
    }


@pytest.mark.parametrize("kind", sorted(_forged()))
def test_forged_or_expired_cookie_does_not_come_in(stranger: TestClient, kind: str) -> None:
    """Only what this app has signed, and not too long ago."""
    cookie = f"{COOKIE}={_forged()[kind]}"
    assert stranger.get("/", headers=[(b"Cookie", cookie.encode("latin-1"))]).status_code == 401


def test_cookie_counts_for_hours(stranger: TestClient) -> None:
    """The control of the test above."""
    cookie = Sessions(TOKEN, lambda: time.time() - 11 * 3600).begun()
    assert stranger.get("/", headers={"Cookie": f"{COOKIE}={cookie}"}).status_code == 200


def test_link_from_another_site_is_opened_again(stranger: TestClient) -> None:
    """Browsers bring no strict cookie from there, but do from here; the address is a page of this app."""
    answer = stranger.get("/records", params={"label": '"><b>'})
    assert 'href="?label=%22%3E%3Cb%3E">open it again' in answer.text


# -- what forms may do


def test_form_of_the_page_is_accepted(app: Celery) -> None:
    """As a browser sends it."""
    record = a_written(app)
    browser = a_browser(a_page(app))
    token = form_token_in(browser.get("/records").text)

    answer = browser.post(
        "/judge",
        data={**a_verdict(record), "form_token": token},
        headers={"Sec-Fetch-Site": "same-origin", "Origin": "http://testserver"},
    )

    assert answer.status_code == 200
    assert now_of(app, record).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("headers", "with_token"),
    [
        ({}, False),
        ({"Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Sec-Fetch-Site": ""}, True),
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "http://testserver.evil.example"}, True),
        ({"Origin": "http://testserver:81"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://["}, True),
        ({"Origin": ""}, True),
    ],
)
def test_form_of_another_site_is_refused(app: Celery, headers: dict[str, str], with_token: bool) -> None:
    """Without the session's token, or from elsewhere, nothing is changed, however well the cookie is."""
    record = a_written(app)
    browser = a_browser(a_page(app))
    token = form_token_in(browser.get("/records").text) if with_token else "0" * 64

    answer = browser.post("/judge", data={**a_verdict(record), "form_token": token}, headers=headers)

    assert answer.status_code == 403
    assert now_of(app, record) == record


@pytest.mark.parametrize("token", ["", "ü", "x" * 64])
def test_form_needs_the_token_of_its_own_session(app: Celery, token: str) -> None:
    """Neither none, nor another's."""
    record = a_written(app)
    page = a_page(app)
    browser, other = a_browser(page), a_browser(page)
    given = token.replace("x" * 64, form_token_in(other.get("/records").text))

    assert browser.post("/judge", data={**a_verdict(record), "form_token": given}).status_code == 403
    assert browser.post("/judge", data=a_verdict(record)).status_code == 403
    assert browser.post("/judge").status_code == 403
    assert now_of(app, record) == record


def test_program_needs_no_token_of_a_form(app: Celery) -> None:
    """No site can make a browser send its header."""
    record = a_written(app)
    assert a_program(a_page(app)).post("/judge", data=a_verdict(record)).status_code == 200
    assert now_of(app, record).status is Status.COMPLETED


def test_bad_bearer_is_not_mended_by_a_cookie(app: Celery) -> None:
    """Who says that he is a program is taken at his word."""
    browser = a_browser(a_page(app))
    assert browser.get("/", headers={"Authorization": "Bearer x"}).status_code == 401
    assert browser.get("/", headers={"Authorization": "Basic x"}).status_code == 200


def test_viewer_gives_no_verdict(app: Celery) -> None:
    """Neither finds a form for it, nor may send one."""
    record = a_written(app)
    viewer = a_program(a_page(app, write=False))

    for page in ("/records", f"/record?key={record.key}"):
        assert '<form method="post"' not in viewer.get(page).text
        assert "checkbox" not in viewer.get(page).text
    assert viewer.post("/judge", data=a_verdict(record)).status_code == 403
    assert now_of(app, record) == record


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_nothing_else_is_done(stranger: TestClient, method: str) -> None:
    """A page is read or sent."""
    assert stranger.request(method, "/", headers=BEARER).status_code == 405


# -- what is too large, or leads elsewhere


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"x=" + b"y" * 2**20, 413, "The form is too large."),
        (b"&".join(b"x=1" for _ in range(300)), 400, "The form cannot be read."),
        (b"\xff=\xfe", 400, "The form cannot be read."),
        (b"", 400, "Choose at least one record"),
    ],
    ids=["large", "many fields", "not UTF-8", "empty"],
)
def test_form_that_cannot_be_meant_is_refused(app: Celery, content: bytes, status: int, reason: str) -> None:
    """Before anything is looked for."""
    answer = a_program(a_page(app)).post("/judge", content=content)
    assert (answer.status_code, reason in answer.text) == (status, True)


def test_stranger_can_send_no_more_than_a_token(app: Celery) -> None:
    """Hundreds of half-sent forms would otherwise stay in memory; who has logged out by time is told so."""
    page, sent, read = a_page(app), [], []

    async def receive() -> Any:
        read.append(2**10)
        return {"type": "http.request", "body": b"x" * 2**10, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", b"1000000")]
    asked = {"type": "http", "method": "POST", "path": "/judge", "query_string": b"", "headers": headers}

    async def served() -> None:
        await page({**asked, "root_path": "", "scheme": "http", "server": ("h", 80)}, receive, send)

    asyncio.run(served())

    assert sent[0]["status"] == 401
    assert sum(read) <= 2**14


def test_long_address_is_refused(stranger: TestClient) -> None:
    """Before anybody's token is looked at."""
    assert stranger.get("/records", params={"label": "x" * 9000}).status_code == 414


@pytest.mark.parametrize(
    "path",
    [
        *("/static/", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/..%2f..%2fpages.py", "/static/x.css"),
        *(
            "/record/../../etc/passwd",
            "/%00",
            "/x%0D%0AX-Evil:%201",
            "/templates/base.html",
            "//record",
            "/records/",
            "/judge",
        ),
    ],
)
def test_path_leads_to_a_page_or_nowhere(app: Celery, path: str) -> None:
    """No path names a file."""
    answer = a_program(a_page(app)).get(f"http://testserver{path}", follow_redirects=False)
    assert answer.status_code in (307, 404, 405)


@pytest.mark.parametrize("path", ["/static/style.css", "/static/icon.svg"])
def test_style_is_everybodys(stranger: TestClient, path: str) -> None:
    """The page that asks for the token has it, too."""
    assert stranger.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [*((path, BEARER) for path in PAGES), ("/", {}), ("/static/style.css", {}), ("/?token=x", {}), ("//", {})],
)
def test_every_answer_tells_browsers_what_to_refuse(stranger: TestClient, path: str, headers: dict[str, str]) -> None:
    """Scripts, foreign frames and copies, whatever the answer is."""
    told = stranger.get(f"http://testserver{path}", headers=headers).headers
    assert "default-src 'none'" in told["content-security-policy"]
    assert "script-src" not in told["content-security-policy"]
    assert "unsafe" not in told["content-security-policy"]
    assert "frame-ancestors 'none'" in told["content-security-policy"]
    assert (told["x-frame-options"], told["referrer-policy"]) == ("DENY", "same-origin")
    assert (told["cache-control"], told["x-content-type-options"]) == ("no-store", "nosniff")


@pytest.mark.parametrize("path", ["/", "/records", "/records?status=UNKNOWN"])
def test_pages_hold_no_script_and_no_style(app: Celery, path: str) -> None:
    """The policy refuses them, and nothing needs them."""
    a_written(app)
    html = a_program(a_page(app)).get(path).text
    assert "<script" not in html
    assert "<style" not in html
    assert " style=" not in html
    assert " on" not in {each[:3] for each in html.split("<")}


# -- where it is mounted


@pytest.mark.parametrize("prefix", ["/idem", "/a/b"])
def test_page_works_under_a_prefix(app: Celery, prefix: str) -> None:
    """Every link, form and redirect, and the cookie, stay below it."""
    record = a_written(app)
    outer = Starlette(routes=[Mount(prefix, a_page(app))])
    browser = a_browser(outer, prefix)

    (cookie,) = browser.cookies.jar
    assert cookie.path == prefix
    for path in ("/", "/records", f"/record?key={record.key}", "/nowhere"):
        html = browser.get(prefix + path).text
        places = [each.partition('"')[0] for name in ("href", "action", "src") for each in html.split(f' {name}="')[1:]]
        assert [each for each in places if not each.startswith((f"{prefix}/", "#"))] == []
    token = form_token_in(browser.get(f"{prefix}/records").text)
    answer = browser.post(f"{prefix}/judge", data={**a_verdict(record), "form_token": token})
    assert answer.status_code == 200
    assert browser.get(f"{prefix}/static/style.css").status_code == 200


def test_app_of_another_token_has_another_cookie(app: Celery) -> None:
    """Browsers share cookies between the ports of a machine."""
    assert Sessions(TOKEN).cookie != Sessions("another token, longer").cookie


def test_nobody_talks_to_it_by_websocket(app: Celery) -> None:
    """There is nothing to talk about."""
    with pytest.raises(WebSocketDisconnect), a_program(a_page(app)).websocket_connect("/"):
        pass


# -- what it takes


@pytest.mark.parametrize("token", ["", "brief", "x" * 15])
def test_short_token_is_refused(app: Celery, token: str) -> None:
    """Somebody would guess it; the error does not tell it."""
    with pytest.raises(PolicyError, match="at least 16 characters") as refusal:
        create_app(app, token=token)
    assert not token or token not in str(refusal.value)


def test_missing_extra_is_named(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed without it still imports the module."""
    monkeypatch.delitem(sys.modules, "celery_idempotent.contrib.web.pages", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'pip install "celery-idempotent\[web\]"'):
        create_app(app, token=TOKEN)


def test_store_that_is_not_set_is_told_at_once() -> None:
    """Not when the first person comes."""
    unset: Any = None
    app = a_shop()
    app.conf.idempotency_store = unset
    with pytest.raises(PolicyError, match="idempotency_store"):
        create_app(app, token=TOKEN)
