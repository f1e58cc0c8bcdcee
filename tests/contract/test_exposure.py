"""Connections to another machine that others could read or answer: the check before a worker starts warns of them.

This machine's own address in its network stands for another machine, with a proxy behind it that forwards bytes.
"""
# mypy: allow-untyped-decorators

import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.store import VerifiableStore
from celery_idempotent.stores import open_store
from celery_idempotent.stores.failures import leaves_machine, weakness_of
from celery_idempotent.stores.sql import SQLStore
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis
from tests.support.certificates import Certificates, new_certificates
from tests.support.tcp_proxy import TcpProxy


def _own_address() -> str | None:
    """Of this machine in its network; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = asking.getsockname()[0]
    return None if address.startswith("127.") else address


ELSEWHERE = _own_address()
pytestmark = pytest.mark.skipif(
    ELSEWHERE is None and os.environ.get("CI") != "true", reason="this machine is in no network"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    assert ELSEWHERE
    return new_certificates(tmp_path_factory.mktemp("certificates"), ELSEWHERE)


def _warnings_of(store: Any) -> list[str]:
    assert isinstance(store, VerifiableStore)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.verify()
    assert all(each.category is IdempotencyWarning for each in caught)
    return [str(each.message) for each in caught]


# -- Redis


@pytest.mark.parametrize(
    ("scheme", "options", "weakness"),
    [
        ("redis", "", "is not encrypted"),
        ("rediss", "?ssl_cert_reqs=none", "is encrypted, but the other end is not verified"),
        ("rediss", "?ssl_ca_certs={ca}", ""),
        ("rediss", "?ssl_ca_certs={ca}&ssl_check_hostname=false", ""),
    ],
)
def test_redis_elsewhere(
    redis_server: EmbeddedRedis, certificates: Certificates, scheme: str, options: str, weakness: str
) -> None:
    """One warning says what is weak, and what to write instead."""
    tls = certificates.for_server() if scheme == "rediss" else None
    with TcpProxy(redis_server.port, tls=tls, listen_on=ELSEWHERE or "") as proxy:
        store = open_store(f"{scheme}://{ELSEWHERE}:{proxy.port}/0{options.format(ca=certificates.authority)}")
        found = _warnings_of(store)
        store.close()

    assert len(found) == bool(weakness)
    if weakness:
        assert f"{store!r}: the connection to another machine {weakness}, so " in found[0]
        assert "write rediss://" in found[0]


# -- SQL


class MariaDBWithTls(EmbeddedMariaDB):
    certificates: Certificates

    def prepare(self) -> None:
        super().prepare()
        for file in (self.certificates.certificate, self.certificates.key):
            target = Path(shutil.copy(file, self.folder))
            os.chown(target, self.folder.stat().st_uid, self.folder.stat().st_gid)

    def start_program(self, *command: str, **options: Any) -> Any:
        files = (f"--ssl-cert={self.folder}/cert.pem", f"--ssl-key={self.folder}/key.pem")
        return super().start_program(*command, *files, **options)


@pytest.fixture(scope="module")
def mariadb_with_tls(certificates: Certificates) -> Iterator[EmbeddedMariaDB]:
    if missing := MariaDBWithTls.missing():
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"MariaDB: {missing}")
    MariaDBWithTls.certificates = certificates
    with MariaDBWithTls() as server:
        yield server


def _warns_of_sql(url: str, proxy: TcpProxy, driver: str, options: str, weakness: str, remedy: str) -> None:
    place = make_url(url).set(drivername=driver, host=ELSEWHERE, port=proxy.port)
    store = SQLStore(f"{place.render_as_string(hide_password=False)}{options}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.provision()
    found = _warnings_of(store)
    store.close()

    assert len(found) == bool(weakness)
    if weakness:
        assert f"{store!r}: the connection to another machine {weakness}, so " in found[0]
        assert remedy in found[0]


@pytest.mark.parametrize(
    ("driver", "options", "weakness"),
    [
        *(
            (driver, *each)
            for driver in ("postgresql+psycopg", "postgresql+psycopg2")
            for each in (
                ("?sslmode=disable", "is not encrypted"),
                ("", "is encrypted, but the other end is not verified"),
                ("?sslmode=require", "is encrypted, but the other end is not verified"),
                ("?sslmode=verify-ca&sslrootcert={ca}", ""),
                ("?sslmode=verify-full&sslrootcert={ca}", ""),
            )
        ),
        ("postgresql+pg8000", "", "is not encrypted"),
    ],
)
def test_postgresql_elsewhere(
    postgres: EmbeddedPostgres, certificates: Certificates, driver: str, options: str, weakness: str
) -> None:
    """What the driver has done counts, and not the URL: by default libpq takes what the server offers."""
    tls = None if weakness == "is not encrypted" else certificates.for_server()
    with TcpProxy(postgres.port, tls=tls, listen_on=ELSEWHERE or "") as proxy:
        options = options.format(ca=certificates.authority)
        _warns_of_sql(postgres.url, proxy, driver, options, weakness, "set sslmode=verify-full and sslrootcert")


@pytest.mark.parametrize(
    ("server", "options", "weakness"),
    [
        ("mariadb", "", "is not encrypted"),
        ("mariadb_with_tls", "?ssl_check_hostname=false", "is encrypted, but the other end is not verified"),
        ("mariadb_with_tls", "?ssl_ca={ca}", ""),
    ],
)
def test_mariadb_elsewhere(
    request: pytest.FixtureRequest, certificates: Certificates, server: str, options: str, weakness: str
) -> None:
    """PyMySQL verifies if it is given an authority."""
    running: EmbeddedMariaDB = request.getfixturevalue(server)
    with TcpProxy(running.port, listen_on=ELSEWHERE or "") as proxy:
        options = options.format(ca=certificates.authority)
        _warns_of_sql(running.url, proxy, "mysql+pymysql", options, weakness, "set ssl_ca")


# -- what is no connection to another machine


def test_connections_within_this_machine_are_not_warned_of(
    redis_server: EmbeddedRedis, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """A proxy beside the worker is a common way to encrypt; a file has no other side."""
    for url in (redis_server.url, postgres.url, f"sqlite:///{tmp_path}/records.sqlite"):
        store = open_store(url)
        store.provision()
        assert _warnings_of(store) == []
        store.close()


def test_kinds_of_sockets_are_told_apart() -> None:
    """By the address of the other end; the descriptor itself stays open."""
    one, other = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, one, other:
        with socket.create_connection(server.getsockname()) as local:
            assert not leaves_machine(local.fileno())
            assert not leaves_machine(one.fileno())
            local.send(b"x")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
            far.connect((ELSEWHERE or "", 9))
            assert leaves_machine(far.fileno())
        with socket.socket() as nowhere:
            assert not leaves_machine(nowhere.fileno())
        assert weakness_of(one) == "is not encrypted"
