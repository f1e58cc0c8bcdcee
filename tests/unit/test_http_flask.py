"""Flask's views behind the decorator, by Flask's own client."""

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any
from unittest.mock import Mock

import pytest
from flask import Flask, Response, abort, request, send_file

from celery_idempotent import Policy, PolicyError
from celery_idempotent.contrib.http.flask import idempotent_view
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http_behaviour import Behaviour, Got, Reply, Shop

KEY = {"Idempotency-Key": "k"}


def client_of(view: Callable[..., Any], **options: Any) -> Any:
    """A client of an application with this view, and a store in memory."""
    app = Flask("shop")
    app.testing = True
    protected = idempotent_view(**{"caller": "anybody", "store": MemoryStore(), **options})(view)
    app.route("/<path:path>", methods=["POST", "PATCH", "PUT"])(protected)
    app.errorhandler(410)(lambda error: ("gone for good", 410))
    return app.test_client(use_cookies=False)


class FlaskShop(Shop):
    """An application of Flask's."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._client: Any = None

    def serve(self, respond: Callable[[], Reply], **options: Any) -> None:
        def view(path: str) -> Response:
            self.bodies.append(request.get_data())
            reply = respond()
            body: Any = reply.body if reply.chunks is None else iter(reply.chunks)
            return Response(body, reply.status, dict(reply.headers))

        self._client = client_of(view, **options)

    def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Got:
        got = self._client.open(path, method=method, data=body, headers=headers)
        return Got(got.status_code, {name.lower(): value for name, value in got.headers.items()}, got.data)


class TestFlask(Behaviour):
    """The behaviour that all coats share."""

    @pytest.fixture
    def shop(self) -> FlaskShop:
        return FlaskShop()


def posted(client: Any, *paths: str, **options: Any) -> list[tuple[int, bytes]]:
    """Status and body of the answers to requests with one key."""
    answers = [client.post(path, headers=KEY, **options) for path in paths]
    return [(each.status_code, each.data) for each in answers]


def test_abort_is_an_outcome() -> None:
    """With the application's own page."""
    view = Mock(__name__="view", side_effect=lambda path: abort(int(path)))
    client = client_of(view)
    assert posted(client, "/410", "/410") == [(410, b"gone for good")] * 2
    first, again = posted(client, "/404", "/404")
    assert (first, view.call_count) == (again, 2)


def test_file_is_recorded() -> None:
    """Though Flask would hand it to the server; it is closed when it was read."""
    file = BytesIO(b"report")
    assert posted(client_of(lambda path: send_file(file, "text/plain")), "/a", "/a") == [(200, b"report")] * 2
    assert file.closed


def test_functions_that_a_view_calls_on_close_are_called_once() -> None:
    """At the end of its request, as ever; its stream is closed when it was read."""
    closed: list[str] = []

    def chunks() -> Iterator[bytes]:
        try:
            yield b"a"
        finally:
            closed.append("stream")

    def view(path: str) -> Response:
        response = Response(chunks())
        response.call_on_close(lambda: closed.append("response"))
        return response

    with client_of(view).post("/a", headers=KEY) as first:
        assert first.data == b"a"
    assert closed == ["stream", "response"]


def test_mounted_app_has_keys_of_its_own() -> None:
    """One app can serve several tenants by where it is mounted."""
    client = client_of(lambda path: request.root_path)
    answers = [client.post("/a", headers=KEY, base_url=f"http://shop{mount}").data for mount in ("/eu", "/us", "/eu")]
    assert answers == [b"/eu", b"/us", b"/eu"]


def test_header_of_several_lines_is_replayed_as_such() -> None:
    """Not all are lists that fit into one."""
    client = client_of(lambda path: ("", 200, [("X-Note", "a, b"), ("X-Note", "c")]))
    assert [client.post("/a", headers=KEY).headers.getlist("X-Note") for _ in range(2)] == [["a, b", "c"]] * 2


@pytest.mark.parametrize(
    ("keeps", "mode", "sent", "statuses"),
    [
        (False, "enforce", [{"data": {"cents": "5"}}], []),
        (False, "enforce", [{"data": {"cents": (BytesIO(b"5"), "cents")}}], []),
        (False, "observe", [{"data": {"cents": "5"}}], [200]),
        (False, "enforce", [{"json": {"cents": each}} for each in (5, 500)], [200, 422]),
        (True, "enforce", [{"data": {"cents": each}} for each in ("5", "5", "500")], [200, 200, 422]),
    ],
)
def test_form_that_was_read_before_is_refused_unless_its_body_was_kept(
    keeps: bool, mode: Any, sent: list[Any], statuses: list[int]
) -> None:
    """Without a body, one with other cents would be taken for a repetition; no form and no body are left."""
    client = client_of(lambda path: str(request.form), policy=Policy(mode=mode))
    client.application.before_request(lambda: (not keeps or request.get_data()) and request.form.get("csrf") and None)
    if statuses:
        assert [posted(client, "/a", **each)[0][0] for each in sent] == statuses
    else:
        with pytest.raises(PolicyError, match="get_data"):
            posted(client, "/a", **sent[0])


@pytest.mark.parametrize(("ours", "theirs", "is_chunked"), [(1_000, 4, False), (4, 1_000, False), (4, None, True)])
def test_body_is_bounded_by_the_smaller_limit(ours: int, theirs: int | None, is_chunked: bool) -> None:
    """The coat's or the app's; the coat's also where no length is declared, and a wrong one is refused."""
    client = client_of(lambda path: "done", max_request=ours)
    client.application.config["MAX_CONTENT_LENGTH"] = theirs

    def sent(body: bytes) -> int:
        environ = {"wsgi.input_terminated": True, "wsgi.input": BytesIO(body)}
        options: Any = {"environ_overrides": environ} if is_chunked else {"data": body}
        return posted(client, "/a", **options)[0][0]

    assert (sent(b"12345"), sent(b"1234")) == (413, 200)
    assert posted(client, "/a", environ_overrides={"CONTENT_LENGTH": "ten"})[0][0] == 400


@pytest.fixture(autouse=True)
def _no_request_left() -> Iterator[None]:
    yield
    assert not request
