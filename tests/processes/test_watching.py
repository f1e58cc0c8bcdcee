"""What leaves the process in a task's body is seen, by the line of its author's and the step."""

import smtplib
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner

from celery_idempotent import IdempotentTask, Policy, current_attempt
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.operating import watching
from celery_idempotent.integration.operating.watching import EFFECTS
from celery_idempotent.testing import FakeStore, SeenEffect, watch_effects
from tests.support.deliveries import an_app, deliver


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer anything."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(204)
        self.end_headers()

    do_GET = do_POST  # noqa: N815 - http.server looks for it

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def place() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def a_task(body: Any, mode: Any = "enforce", **settings: Any) -> Any:
    policy = Policy(key="secret", mode=mode)
    return an_app(**settings).task(base=IdempotentTask, name="shop.charge", idempotent=policy, shared=False)(body)


def told(seen: list[SeenEffect], body: Any) -> list[tuple[Any, ...]]:
    """Each by its distance from the body's first line."""
    return [(each.line - body.__code__.co_firstlineno, each.step, each.method, each.has_key) for each in seen]


def test_requests_are_told_by_line_step_and_key(place: str) -> None:
    """Method, host and path without the query; once for each line; and a read apart from what may be repeated."""

    def charge(secret: str) -> None:
        url = f"http://{place}/v1/charges?token={secret}"
        urlopen(url).close()
        for _ in range(2):
            urlopen(url, b"").close()
        current_attempt().step("keyed", lambda step: urlopen(Request(url, b"", {"Idempotency-Key": step.key})).close())
        current_attempt().step("unkeyed", lambda step: urlopen(url, b"").close())

    def later(secret: str) -> None:
        urlopen(f"http://{place}/later", b"").close()

    with watch_effects() as seen:
        deliver(a_task(charge), "hunter2")
    urlopen(f"http://{place}/outside", b"").close()
    deliver(a_task(later), "hunter3")
    assert told(seen, charge) == [(4, None, "POST", False), (5, "keyed", "POST", True), (6, "unkeyed", "POST", False)]
    assert told(seen.reads, charge) == [(2, None, "GET", False)]
    assert {(each.task, each.path, each.host, each.target) for each in (*seen, *seen.reads)} == {
        ("shop.charge", __file__, place, "/v1/charges")
    }
    assert str(seen[0]).endswith(f"POST {place}/v1/charges outside any step and without Idempotency-Key")


def test_mails_programs_and_connections_are_told_without_what_they_say(place: str) -> None:
    """A mail by its server, a program without its arguments, and a connection where nobody sees what is sent."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"220 ready\r\n")
            for line in lines:
                code = {b"DATA": b"354", b"QUIT": b"221"}.get(line[:4].strip().upper(), b"250")
                connection.sendall(code + b" ok\r\n")
                while code == b"354" and next(lines) != b".\r\n":
                    pass
                connection.sendall(b"250 ok\r\n" if code == b"354" else b"")

    def notify(secret: str) -> None:
        with smtplib.SMTP("127.0.0.1", server.getsockname()[1]) as client:
            client.sendmail("a@b.example", "c@d.example", secret)
        subprocess.run(["true", secret], check=True)
        socket.create_connection((place.split(":")[0], int(place.split(":")[1]))).close()

    threading.Thread(target=serve, daemon=True).start()
    with server, watch_effects() as seen:
        deliver(a_task(notify), "hunter2")
    assert [each[::2] for each in told(seen, notify)] == [(2, "MAIL"), (3, "RUN"), (4, "CONNECT")]
    assert "hunter2" not in repr(seen)


def test_observed_workers_note_what_the_command_shows(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command shows each line once, what may be repeated first; a day later it is forgotten. Nobody else notes."""

    def charge(secret: str) -> None:
        urlopen(f"http://{place}/quotes").close()
        urlopen(f"http://{place}/charges/{secret[-1]}?{secret}", b"").close()

    store = FakeStore()
    for mode, watch in (("observe", False), ("enforce", True)):
        deliver(a_task(charge, mode, idempotency_store=store, idempotency_watch_effects=watch), "hunter2")
    assert not list(store.scan(task=EFFECTS))
    task = a_task(charge, "observe", idempotency_store=store, idempotency_watch_effects=True)
    for secret in ("hunter2", "hunter3"):
        deliver(task, secret)
    run = partial(CliRunner().invoke, idempotency, obj=SimpleNamespace(app=task.app))
    lines = run(["effects"]).output.splitlines()
    assert [line.split(": ")[1].split()[:2] for line in lines] == [
        ["POST", f"{place}/charges/2"],
        ["GET", f"{place}/quotes"],
    ]
    assert "hunter" not in repr(list(store.scan(task=EFFECTS)))
    assert run(["effects", "--task", "shop.other", "--json"]).output == "[]\n"
    monkeypatch.setattr(watching, "_MOST", 0)
    store.advance(80_000)
    deliver(task, "hunter4")
    store.advance(80_000)
    assert len(run(["effects"]).output.splitlines()) == 2, "what is still sent is noted again, however many are known"
    store.advance(6_401)
    assert run(["effects", "--json"]).output == "[]\n"


def test_a_store_that_is_away_disturbs_no_observed_task(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be noted is told to the log."""

    def charge(secret: str) -> str:
        urlopen(f"http://{place}/charges", b"").close()
        return "charged"

    store = FakeStore()
    task = a_task(charge, "observe", idempotency_store=store, idempotency_watch_effects=True)
    store.swap = Mock(side_effect=StoreUnavailable("store", "swap", "away"))  # type: ignore[method-assign]
    assert deliver(task, "hunter2").value == "charged"
    assert "effects_not_noted" in caplog.text
