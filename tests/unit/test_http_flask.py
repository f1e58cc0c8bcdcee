"""Flask's views behind the decorator, by Flask's own client."""

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pytest
from flask import Flask, Response, abort, request, send_file

from celery_idempotent import Policy, PolicyError
from celery_idempotent.contrib.http.flask import idempotent_view
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http_behaviour import Behaviour, Got, Reply, Shop


def client_of(view: Callable[..., Any], **options: Any) -> Any:
    """A client of an application with this view."""
    app = Flask("shop")
    app.testing = True
    protected = idempotent_view(**{"caller": "anybody", **options})(view)
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


KEY = {"Idempotency-Key": "k"}


def test_abort_is_a_response() -> None:
    """With the application's own page; it is an outcome, and replayed."""
    store = MemoryStore()
    aborted: list[int] = []

    def view(path: str) -> None:
        aborted.append(1)
        abort(int(path))

    client = client_of(view, store=store)
    for status in (404, 410):
        answers = [client.post(f"/{status}", headers=KEY) for _ in range(2)]
        assert [each.status_code for each in answers] == [status] * 2
        assert answers[0].data == answers[1].data
    assert answers[0].data == b"gone for good"
    assert len(aborted) == 2


def test_file_is_recorded() -> None:
    """Though Flask would hand it to the server; it is closed when it was read."""
    file = BytesIO(b"report")
    client = client_of(lambda path: send_file(file, download_name="report.txt"), store=MemoryStore())
    first, again = (client.post("/report", headers=KEY) for _ in range(2))
    assert first.data == again.data == b"report"
    assert first.headers["Content-Disposition"] == again.headers["Content-Disposition"]
    assert file.closed


def test_what_a_view_calls_on_close_is_called_once() -> None:
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

    client = client_of(view, store=MemoryStore())
    with client.post("/a", headers=KEY) as first:
        assert first.data == b"a"
    assert closed == ["stream", "response"]


def test_mounted_app_has_keys_of_its_own() -> None:
    """One app can serve several tenants by where it is mounted."""
    client = client_of(lambda path: request.root_path, store=MemoryStore())
    answers = [client.post("/a", headers=KEY, base_url=f"http://shop{mount}").data for mount in ("/eu", "/us", "/eu")]
    assert answers == [b"/eu", b"/us", b"/eu"]


def test_header_of_several_lines_is_replayed_as_such() -> None:
    """Not all are lists that fit into one."""
    client = client_of(lambda path: ("", 200, [("X-Note", "a, b"), ("X-Note", "c")]), store=MemoryStore())
    assert [client.post("/a", headers=KEY).headers.getlist("X-Note") for _ in range(2)] == [["a, b", "c"]] * 2


def test_limit_of_the_app_holds_where_it_is_smaller() -> None:
    """It says what the author wants to read at most."""
    client = client_of(lambda path: "done", store=MemoryStore(), max_request=1_000)
    client.application.config["MAX_CONTENT_LENGTH"] = 4
    assert client.post("/a", headers=KEY, data=b"12345").status_code == 413


def test_async_view_is_run() -> None:
    """As Flask runs it."""

    async def view(path: str) -> dict[str, str]:
        return {"path": path}

    client = client_of(view, store=MemoryStore())
    assert [client.post("/a", headers=KEY).json for _ in range(2)] == [{"path": "a"}] * 2


def test_form_is_read_after_its_body() -> None:
    """What was read for the fingerprint is there for Flask's parsers."""
    client = client_of(lambda path: dict(request.form), store=MemoryStore())
    assert client.post("/a", headers=KEY, data={"order": "7"}).json == {"order": "7"}


@pytest.mark.parametrize("content", ["5", (BytesIO(b"5"), "cents")])
def test_form_that_was_read_before_is_refused(content: Any) -> None:
    """Without a body, one with other cents would be taken for a repetition."""
    client = client_of(lambda path: "done", store=MemoryStore())
    client.application.before_request(lambda: request.form.get("csrf") and None)
    with pytest.raises(PolicyError, match="get_data"):
        client.post("/a", headers=KEY, data={"cents": content})


def test_form_whose_body_was_kept_is_told_from_another() -> None:
    """As its refusal advises; and a body that is no form is left by who looks for one."""
    client = client_of(lambda path: "done", store=MemoryStore())
    client.application.before_request(lambda: request.get_data() and request.form.get("csrf") and None)
    assert [client.post("/a", headers=KEY, data={"cents": each}).status_code for each in "55"] == [200, 200]
    assert client.post("/a", headers=KEY, data={"cents": "500"}).status_code == 422
    client.application.before_request_funcs[None] = [lambda: request.form.get("csrf") and None]
    assert client.post("/b", headers=KEY).status_code == 200
    assert [client.post("/c", headers=KEY, json={"cents": each}).status_code for each in (5, 500)] == [200, 422]


def test_form_that_was_read_before_runs_where_a_policy_is_tried_out() -> None:
    """Nothing is refused then."""
    client = client_of(lambda path: request.form["cents"], store=MemoryStore(), policy=Policy(mode="observe"))
    client.application.before_request(lambda: request.form.get("csrf") and None)
    assert client.post("/a", headers=KEY, data={"cents": "5"}).data == b"5"


@pytest.mark.parametrize("limit", [None, 1_000])
def test_body_in_chunks_is_bounded(limit: int | None) -> None:
    """Also where no length is declared."""
    store = MemoryStore()
    client = client_of(lambda path: "done", store=store, max_request=4)
    client.application.config["MAX_CONTENT_LENGTH"] = limit

    def sent(body: bytes) -> Any:
        environ = {"wsgi.input_terminated": True, "wsgi.input": BytesIO(body)}
        return client.post("/a", headers=KEY, environ_overrides=environ)

    assert sent(b"12345").status_code == 413
    assert sent(b"1234").status_code == 200


def test_wrong_length_is_refused() -> None:
    """By the library, where the server has let it pass."""
    client = client_of(lambda path: "done", store=MemoryStore())
    assert client.post("/a", headers=KEY, environ_overrides={"CONTENT_LENGTH": "ten"}).status_code == 400


def test_path_that_no_rule_has_is_its_own_name() -> None:
    """As where a view is called by a handler of errors."""
    store = MemoryStore()
    app = Flask("shop")
    app.errorhandler(404)(idempotent_view(caller="anybody", store=store)(lambda error: ("found", 200)))
    assert app.test_client().post("/lost", headers=KEY).status_code == 200
    assert [each.task for each in store.scan()] == ["POST /lost"]


@pytest.fixture(autouse=True)
def _no_request_left() -> Iterator[None]:
    yield
    assert not request
