"""RabbitMQ on this machine: Debian's package, or another that is installed.

It has a node name, a cookie, a port mapper and a data folder of its own, so it meets no other Erlang node. Its
management plugin runs, on the next port, as AMQP tells neither what is being worked on nor who is connected.
"""

import json
import shutil
import subprocess
import urllib.request
import uuid
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlsplit

from lab.embedded.server import HOST, Server, free_port

PATH = "/usr/lib/rabbitmq/bin:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
"""Debian's own program first: the one in /usr/sbin changes to another user."""

ONE_THREAD = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none"
"""Erlang takes every core otherwise, and spins on it."""

SETTINGS = (
    # How old the lengths of queues may be is the sum of both; by default they are 5 s each.
    "collect_statistics_interval = 200",
    *(f"management.sample_retention_policies.{each}.minute = 1" for each in ("global", "basic", "detailed")),
    "disk_free_limit.absolute = 10MB",
    "vm_memory_high_watermark.absolute = 1GB",
)


class EmbeddedRabbitMQ(Server):
    """A private RabbitMQ."""

    def __init__(self, port: int | None = None, settings: Mapping[str, int] | None = None) -> None:
        super().__init__(port)
        self._settings = settings or {}
        self._node = f"rabbit-{uuid.uuid4().hex}@localhost"

    @staticmethod
    def missing() -> str | None:
        return None if _program() else "run: apt-get install rabbitmq-server"

    @property
    def broker_url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/{quote(vhost, safe='')}"

    def new_vhost(self) -> str:
        """A virtual host that nobody else uses: its name."""
        name = uuid.uuid4().hex
        self.ask("PUT", f"vhosts/{name}")
        return name

    def drop_connections(self, vhost: str) -> int:
        """Close the connections to a virtual host that are older than a second, and tell how many there were."""
        found = [each["name"] for each in self.ask("GET", "connections") if each.get("vhost") == vhost]
        for name in found:
            self.ask("DELETE", f"connections/{quote(name)}")
        return len(found)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """A request to the management plugin; None where there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        account = {"Authorization": f"Basic {b64encode(b'guest:guest').decode()}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{HOST}:{self.port + 1}/api/{path}", data, account, method=method)
        with urllib.request.urlopen(request, timeout=10) as reply:
            answer = reply.read()
        return json.loads(answer) if answer else None

    def launch(self) -> subprocess.Popen[bytes]:
        mapper = free_port()
        places = (f"management.tcp.ip = {HOST}", f"management.tcp.port = {self.port + 1}")
        (self.folder / "rabbitmq.conf").write_text("\n".join((*SETTINGS, *places, "")))
        (self.folder / "plugins").write_text("[rabbitmq_management].")
        (self.folder / "environment").touch()
        settings = (f"-rabbit {name} {value}" for name, value in self._settings.items())
        environment = {
            "HOME": self.folder,  # where the cookie is
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": mapper,
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": self.folder / "environment",
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": " ".join((ONE_THREAD, *settings)),
        }
        both = 'epmd -port "$ERL_EPMD_PORT" & exec "$0"'
        variables = (f"{name}={value}" for name, value in environment.items())
        return self.start_program("env", *variables, "sh", "-c", both, str(_program()))

    def is_ready(self) -> bool:
        try:
            listeners = self.ask("GET", "overview")["listeners"]
        except (OSError, ValueError, KeyError, HTTPException):
            return False  # or a server of another kind, or our own socket, which met itself at a port that is free yet
        return any((each["node"], each["port"]) == (self._node, self.port) for each in listeners)


def length(broker_url: str, queue: str) -> int:
    """How many messages of a queue wait or are being worked on: a second old, as the management plugin counts."""
    address = urlsplit(broker_url)
    found = EmbeddedRabbitMQ(address.port).ask("GET", f"queues/{address.path[1:]}/{quote(queue, safe='')}")
    return int(found.get("messages", 0))


def _program() -> str | None:
    return shutil.which("rabbitmq-server", path=PATH) or shutil.which("rabbitmq-server")
