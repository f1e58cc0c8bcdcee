"""``celery idempotency web``: where it listens, what it prints, and what it refuses."""

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result
from starlette.testclient import TestClient

from celery_idempotent.integration.cli import idempotency
from tests.support.web import a_shop, a_verdict, a_written

OWN = "a token of their own"


class _Served:
    """What uvicorn was given instead of being started."""

    def __init__(self) -> None:
        self.config: Any = None
        self.address: Any = None
        self.waits: bool | None = None

    def run(self, server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        self.config = server.config
        self.address = sockets[0].getsockname()
        with socket.create_connection(self.address[:2]), sockets[0].accept()[0] as accepted:
            self.waits = not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> _Served:
    served = _Served()
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: served.run(server, sockets))
    return served


def _run(*arguments: str, app: Any = None, **environment: str) -> Result:
    return CliRunner().invoke(
        idempotency, ["web", "--port", "0", *arguments], obj=SimpleNamespace(app=app or a_shop()), env=environment
    )


def test_printed_link_leads_in(served: _Served) -> None:
    """On this machine alone, by a token that is drawn; no log of requests could keep it."""
    result = _run()
    assert result.exit_code == 0, result.output
    host, port = served.address[:2]
    assert host == "127.0.0.1"
    (link,) = result.output.split()
    assert link.startswith(f"http://127.0.0.1:{port}/?token=")
    assert not served.config.access_log
    assert TestClient(served.config.app, base_url=f"http://127.0.0.1:{port}").get(link).status_code == 200
    assert _run().output.partition("token=")[2] != link.partition("token=")[2]


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_answer_does_not_wait_until_its_first_part_is_acknowledged(served: _Served, bind: str) -> None:
    """A browser lets that take 40 ms."""
    assert _run("--token", OWN, "--bind", bind).exit_code == 0
    assert served.waits is False


@pytest.mark.parametrize(
    ("arguments", "environment"), [(("--token", OWN), {}), ((), {"IDEMPOTENCY_WEB_TOKEN": OWN})], ids=["option", "env"]
)
def test_token_of_their_own_is_not_printed(
    served: _Served, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    """They know it, and others may read a log."""
    result = _run(*arguments, **environment)
    assert result.exit_code == 0, result.output
    assert OWN not in result.output
    assert "log in with your token" in result.output
    client = TestClient(served.config.app, headers={"Authorization": f"Bearer {OWN}"})
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(("arguments", "status"), [((), 403), (("--write",), 200)], ids=["view", "write"])
def test_verdicts_need_write(served: _Served, arguments: tuple[str, ...], status: int) -> None:
    """Whoever starts it decides."""
    app = a_shop()
    record = a_written(app)
    _run("--token", OWN, *arguments, app=app)
    client = TestClient(served.config.app, headers={"Authorization": f"Bearer {OWN}"})
    assert client.post("/judge", data=a_verdict(record)).status_code == status


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_are_not_let_in_by_a_drawn_token(served: _Served, bind: str) -> None:
    """It stands in a log, and changes at each start; nothing listens."""
    result = _run("--bind", bind)
    assert result.exit_code == 2
    assert "set IDEMPOTENCY_WEB_TOKEN" in result.output
    assert served.config is None


def test_address_of_others_is_warned_of(served: _Served) -> None:
    """With a token of one's own it is served, and TLS is asked for."""
    result = _run("--bind", "0.0.0.0", "--token", OWN)
    assert result.exit_code == 0, result.output
    assert "without TLS" in result.output


@pytest.mark.parametrize("bind", ["localhost", "::1", "127.0.0.2"])
def test_every_address_of_this_machine_is_local(served: _Served, bind: str) -> None:
    """By whichever name."""
    if bind == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    result = _run("--bind", bind)
    assert result.exit_code == 0, result.output
    assert "TLS" not in result.output


def test_port_that_is_taken_is_told(served: _Served) -> None:
    """In a sentence, and no link is printed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = _run("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "cannot listen on 127.0.0.1" in result.output
    assert "token=" not in result.output


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (("--token", "short"), "none", "at least 16 characters"),
        ((), "uvicorn", 'pip install "celery-idempotent[web]"'),
    ],
    ids=["token", "extra"],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], missing: str, said: str
) -> None:
    """Without a traceback."""
    monkeypatch.setitem(sys.modules, missing, None)
    result = _run(*arguments)
    assert result.exit_code == 1
    assert said in result.output
