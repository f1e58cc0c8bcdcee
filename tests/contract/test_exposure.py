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
from celery_idempotent.stores import open_store
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
def mariadb_with_tls(mariadb: EmbeddedMariaDB, certificates: Certificates) -> Iterator[EmbeddedMariaDB]:
    MariaDBWithTls.certificates = certificates
    with MariaDBWithTls() as server:
        yield server


def _warnings_of(url: str) -> list[str]:
    store: Any = open_store(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.provision()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.verify()
    store.close()
    assert all(each.category is IdempotencyWarning for each in caught)
    return [str(each.message).replace(repr(store), "STORE") for each in caught]


def with_tls(*more: str) -> Any:
    """A server of its own."""
    return pytest.param("mariadb_with_tls", "mysql+pymysql", *more, marks=pytest.mark.nightly)


NOT_ENCRYPTED, NOT_VERIFIED = "is not encrypted", "is encrypted, but the other end is not verified"


@pytest.mark.parametrize(
    ("name", "scheme", "options", "weakness"),
    [
        ("redis_server", "redis", "", NOT_ENCRYPTED),
        ("redis_server", "rediss", "?ssl_cert_reqs=none", NOT_VERIFIED),
        ("redis_server", "rediss", "?ssl_ca_certs={ca}", ""),
        ("postgres", "postgresql+psycopg", "?sslmode=disable", NOT_ENCRYPTED),
        ("postgres", "postgresql+psycopg", "", NOT_VERIFIED),
        ("postgres", "postgresql+psycopg", "?sslmode=verify-ca&sslrootcert={ca}", ""),
        ("postgres", "postgresql+psycopg2", "?sslmode=verify-full&sslrootcert={ca}", ""),
        ("postgres", "postgresql+pg8000", "", NOT_ENCRYPTED),
        ("mariadb", "mysql+pymysql", "", NOT_ENCRYPTED),
        with_tls("?ssl_check_hostname=false", NOT_VERIFIED),
        with_tls("?ssl_ca={ca}", ""),
    ],
)
def test_one_warning_says_what_is_weak_and_what_to_write(
    request: pytest.FixtureRequest, certificates: Certificates, name: str, scheme: str, options: str, weakness: str
) -> None:
    """What the driver has done counts, and not the URL: by default libpq takes what the server offers."""
    server = request.getfixturevalue(name)
    by_proxy = scheme == "rediss" or (name == "postgres" and weakness != NOT_ENCRYPTED)
    tls = certificates.for_server() if by_proxy else None
    with TcpProxy(server.port, tls=tls, listen_on=ELSEWHERE or "") as proxy:
        place = make_url(server.url).set(drivername=scheme, host=ELSEWHERE, port=proxy.port)
        url = place.render_as_string(hide_password=False).removesuffix("?")
        found = _warnings_of(url + options.format(ca=certificates.authority))

    remedy = {"redis": "write rediss://", "postg": "set sslmode=verify-full and sslrootcert"}.get(
        name[:5], "set ssl_ca"
    )
    assert len(found) == bool(weakness)
    for warning in found:
        assert f"STORE: the connection to another machine {weakness}, so " in warning
        assert remedy in warning


def test_connections_within_this_machine_are_not_warned_of(
    redis_server: EmbeddedRedis, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """A proxy beside the worker is a common way to encrypt; a file has no other side."""
    for url in (redis_server.url, postgres.url, f"sqlite:///{tmp_path}/records.sqlite"):
        assert _warnings_of(url) == []
