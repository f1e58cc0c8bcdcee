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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What uvicorn was given instead of being started, and whether an answer's second part waits for its first."""
    served = SimpleNamespace(config=None, address=None, waits=None)

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        served.config, served.address = server.config, sockets[0].getsockname()
        with socket.create_connection(served.address[:2]), sockets[0].accept()[0] as accepted:
            served.waits = not accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return served


def _run(*arguments: str, app: Any = None, **environment: str) -> Result:
    words = ["web", "--port", "0", *arguments]
    return CliRunner().invoke(idempotency, words, obj=SimpleNamespace(app=app or a_shop()), env=environment)


def test_printed_link_leads_in(served: Any) -> None:
    """On this machine alone, by a token that is drawn; no log of requests could keep it."""
    link = _run().output.strip()
    host, port = served.address[:2]
    assert (host, served.config.access_log) == ("127.0.0.1", False)
    assert link.startswith(f"http://127.0.0.1:{port}/?token=")
    assert TestClient(served.config.app, base_url=f"http://127.0.0.1:{port}").get(link).status_code == 200
    assert _run().output.partition("token=")[2] != link.partition("token=")[2]


@pytest.mark.parametrize(
    ("arguments", "environment", "status"),
    [(("--token", OWN), {}, 403), (("--write",), {"IDEMPOTENCY_WEB_TOKEN": OWN}, 200)],
    ids=["option, and only to look", "environment, and to judge"],
)
def test_token_of_their_own_is_not_printed(
    served: Any, arguments: tuple[str, ...], environment: dict[str, str], status: int
) -> None:
    """They know it, and others may read a log; whoever starts it decides whether it takes verdicts."""
    app = a_shop()
    record = a_written(app)
    result = _run(*arguments, app=app, **environment)
    assert (result.exit_code, OWN in result.output, "log in with your token" in result.output) == (0, False, True)
    client = TestClient(served.config.app, headers={"Authorization": f"Bearer {OWN}"})
    assert [client.get("/").status_code, client.post("/judge", data=a_verdict(record)).status_code] == [200, status]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        *((("--bind", each), 2, "set IDEMPOTENCY_WEB_TOKEN") for each in ("0.0.0.0", "::", "example.org")),
        (("--bind", "0.0.0.0", "--token", OWN), 0, "without TLS"),
        *((("--bind", each), 0, "") for each in ("localhost", "127.0.0.2")),
        (("--token", "short"), 1, "at least 16 characters"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else "",
)
def test_others_come_in_by_ones_own_token_alone(served: Any, arguments: tuple[str, ...], code: int, said: str) -> None:
    """A drawn one stands in a log, and changes at each start; TLS is asked for; no answer waits for a delayed ACK."""
    result = _run(*arguments)
    assert (result.exit_code, said in result.output) == (code, True)
    assert ("without TLS" in result.output) is (said == "without TLS")
    assert (served.config is None, served.waits) == ((True, None) if code else (False, False))


def test_what_is_taken_or_missing_is_said(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port, and the extra: in a sentence, and no link is printed."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = [_run("--port", str(taken.getsockname()[1]))]
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused.append(_run())
    assert [(each.exit_code, "token=" in each.output) for each in refused] == [(1, False)] * 2
    assert "cannot listen on 127.0.0.1" in refused[0].output
    assert 'pip install "celery-idempotent[web]"' in refused[1].output
