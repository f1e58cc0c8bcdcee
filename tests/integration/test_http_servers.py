"""Requests with an ``Idempotency-Key`` to real servers: together, and with the worker killed in the midst of one."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from celery_idempotent.stores import open_store
from lab.embedded.server import HOST, accepts, free_port
from tests.support.documents import ROOT
from tests.support.waiting import wait_until

UVICORN = ("uvicorn", "--factory", "--host", HOST, "--workers", "2", "--log-level", "warning", "--port")
GUNICORN = ("gunicorn", "--workers", "2", "--log-level", "warning", "--timeout", "600")

SERVERS: dict[str, tuple[tuple[str, ...], str]] = {
    "starlette": (UVICORN, "redis_server"),
    "django_wsgi": ((*GUNICORN, "--worker-class", "sync", "--bind"), "postgres"),
    "flask on threads": ((*GUNICORN, "--worker-class", "gthread", "--threads", "8", "--bind"), "redis_server"),
    "flask on gevent": ((*GUNICORN, "--worker-class", "gevent", "--bind"), "redis_server"),
}
"""By function of ``http_shop``: server and store."""
BY_NIGHT = ("django_wsgi", "flask on gevent")


@dataclass
class Shop:
    """A running server, and its bank's ledger."""

    folder: Path
    client: httpx2.Client

    def charge(self, key: str, **order: Any) -> httpx2.Response | None:
        """The answer to one request; None where there is none."""
        try:
            return self.client.post("/charges", json=order, headers={"Idempotency-Key": f'"{key}"'})
        except httpx2.TransportError:
            return None

    def insist(self, key: str, **order: Any) -> httpx2.Response:
        """Send a request until it is answered, as a client does."""
        while (answer := self.charge(key, **order)) is None or answer.status_code in (409, 502, 503):
            time.sleep(0.1)
        return answer

    def charges(self) -> int:
        """How often the bank has charged."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as bank:
            count: int = bank.execute("SELECT count(*) FROM charges").fetchone()[0]
            return count


@contextmanager
def serving(name: str, store: str, folder: Path) -> Iterator[Shop]:
    """The shop on its server."""
    with sqlite3.connect(folder / "ledger.sqlite") as bank:
        bank.execute("CREATE TABLE charges (key TEXT PRIMARY KEY, receipt TEXT)")
    command, port = SERVERS[name][0], free_port()
    at = str(port) if command[-1] == "--port" else f"{HOST}:{port}"
    shop = f"tests.integration.http_shop:{name.split()[0]}{'' if '--factory' in command else '()'}"
    environment = {**os.environ, "SHOP_STORE": store, "SHOP_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", *command, at, shop)
    server = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True)
    caller = {"Authorization": "Bearer ann"}
    try:
        with httpx2.Client(base_url=f"http://{HOST}:{port}", headers=caller, timeout=60) as client:
            wait_until(lambda: accepts(port), f"{name} is up")
            yield Shop(folder, client)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _together(shop: Shop, key: str) -> list[httpx2.Response]:
    with ThreadPoolExecutor(8) as pool:
        return [*pool.map(lambda _: shop.insist(key, cents=5), range(8))]


def _killed(shop: Shop, key: str) -> httpx2.Response:
    """The answer that a client gets whose first request's worker died between the charge and the answer."""
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(shop.charge, key, stall=True)
        wait_until((shop.folder / "stalled").exists, "the charge is made")
        worker = int((shop.folder / "stalled").read_text())
        (shop.folder / "killed").touch()
        os.kill(worker, signal.SIGKILL)
        assert lost.result() is None
    return shop.insist(key, stall=True)


@pytest.mark.parametrize(
    "server", ["starlette", "flask on threads", *(pytest.param(each, marks=pytest.mark.nightly) for each in BY_NIGHT)]
)
def test_one_charge_and_equal_answers(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of eight equal requests at a time, and of one whose worker was killed after the charge."""
    url: str = request.getfixturevalue(SERVERS[server][1]).url
    with closing(open_store(url)) as store:
        store.provision()
    with serving(server, url, tmp_path) as shop:
        key = str(uuid4())
        answers = _together(shop, key)
        assert len({(each.status_code, each.content) for each in answers}) == 1
        assert sum("idempotent-replayed" not in each.headers for each in answers) == 1
        assert (answers[0].status_code, shop.charges()) == (201, 1)

        key = str(uuid4())
        answer = _killed(shop, key)
        again = shop.insist(key, stall=True)
        assert (answer.status_code, answer.content) == (again.status_code, again.content)
        assert (again.headers["idempotent-replayed"], shop.charges()) == ("true", 2)

        other = shop.charge(key, stall=False)
        assert other is not None
        assert (other.status_code, other.headers["content-type"]) == (422, "application/problem+json")


@pytest.mark.parametrize("server", ["starlette", pytest.param("django_wsgi", marks=pytest.mark.nightly)])
def test_without_the_library_there_are_more(server: str, tmp_path: Path) -> None:
    """The same requests to the same application: the harness sees what it is there to see."""
    with serving(server, "", tmp_path) as shop:
        answers = _together(shop, "k")
        assert len({each.content for each in answers}) == shop.charges() == 8
        _killed(shop, "l")
        assert shop.charges() == 10
