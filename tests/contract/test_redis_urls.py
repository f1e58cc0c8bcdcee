"""What Redis URLs mean: servers, options, defaults; and that what cannot be meant is refused, telling no secret."""

from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.credentials import CredentialProvider

from celery_idempotent.errors import PolicyError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.client import read_url

SECRET = "5ecret"


def pool_of(url: str) -> ConnectionPool:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    client = store._connected()
    assert isinstance(client, redis.Redis)
    return client.connection_pool


def meant(url: str) -> dict[str, Any]:
    """What the driver is told, with user and password as they will be sent."""
    pool = pool_of(url)
    options: dict[str, Any] = dict(pool.connection_kwargs)
    provider = options.get("credential_provider")
    return {
        **{name: options.get(name) for name in ("host", "port", "db", "path")},
        "credentials": provider.get_credentials() if provider else None,
        "class": pool.connection_class.__name__,
    }


PLAIN = {"host": None, "port": 6379, "db": 0, "path": None, "credentials": None, "class": "Connection"}
SOCKET = {**PLAIN, "port": None, "class": "UnixDomainSocketConnection"}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", {**PLAIN, "host": "localhost"}),
        ("redis://localhost/", {**PLAIN, "host": "localhost"}),
        ("REDIS://localhost", {**PLAIN, "host": "localhost"}),
        ("redis://10.0.0.7:6380/2", {**PLAIN, "host": "10.0.0.7", "port": 6380, "db": "2"}),
        ("redis://[::1]:6380/2", {**PLAIN, "host": "::1", "port": 6380, "db": "2"}),
        ("redis://localhost?db=3", {**PLAIN, "host": "localhost", "db": "3"}),
        ("redis://localhost/3?db=3", {**PLAIN, "host": "localhost", "db": "3"}),
        ("redis://localhost?virtual_host=3", {**PLAIN, "host": "localhost", "db": "3"}),
        ("redis://:p%40ss%2Fw@localhost", {**PLAIN, "host": "localhost", "credentials": ("p@ss/w",)}),
        ("redis://shop:p%3Bw@localhost", {**PLAIN, "host": "localhost", "credentials": ("shop", "p;w")}),
        ("redis://shop@localhost", {**PLAIN, "host": "localhost", "credentials": ("shop", "")}),
        (
            "rediss://localhost:6390/1",
            {**PLAIN, "host": "localhost", "port": 6390, "db": "1", "class": "SSLConnection"},
        ),
        ("redis+socket:///run/redis.sock", {**SOCKET, "path": "/run/redis.sock"}),
        ("redis+socket:///run/redis.sock?virtual_host=4", {**SOCKET, "path": "/run/redis.sock", "db": "4"}),
        ("redis+socket://:pw@/run/redis.sock", {**SOCKET, "path": "/run/redis.sock", "credentials": ("pw",)}),
        ("unix:///run/a%20b.sock?db=4", {**SOCKET, "path": "/run/a b.sock", "db": "4"}),
        (
            "unix://shop@/run/redis.sock?password=pw",
            {**SOCKET, "path": "/run/redis.sock", "credentials": ("shop", "pw")},
        ),
    ],
)
def test_url_of_one_server_means_what_celery_and_redis_py_mean(url: str, expected: dict[str, Any]) -> None:
    """Host, port, database, socket and login are those that a broker URL of the same text names."""
    assert meant(url) == expected


def test_database_is_chosen_by_text() -> None:
    """hiredis crashes the process where a time limit strikes while it writes a number, such as that of SELECT."""
    assert pool_of("redis://localhost/2").connection_kwargs["db"] == "2"


@pytest.mark.parametrize(
    ("url", "sentinels", "db", "credentials"),
    [
        ("sentinel://a:1?master_name=m", [("a", 1)], 0, None),
        ("sentinel://a?master_name=m", [("a", 26379)], 0, None),
        ("sentinel://:pw@a:1;sentinel://b:2/3?master_name=m", [("a", 1), ("b", 2)], "3", ("pw",)),
        ("sentinel://:pw@a:1/3;sentinel://:pw@b:2/3?master_name=m", [("a", 1), ("b", 2)], "3", ("pw",)),
        ("sentinel://a:1/3?master_name=m;b:2;c:3", [("a", 1), ("b", 2), ("c", 3)], "3", None),
    ],
)
def test_url_of_sentinels_means_the_primary_that_they_name(
    url: str, sentinels: list[tuple[str, int]], db: int | str, credentials: tuple[str, ...] | None
) -> None:
    """Servers are parted by semicolons, as in a broker URL; login and database are the primary's."""
    pool: Any = pool_of(url)

    provider = pool.connection_kwargs.get("credential_provider")
    assert (pool.service_name, pool.is_master) == ("m", True)
    asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == sentinels
    assert pool.connection_kwargs["db"] == db
    assert pool.connection_kwargs["socket_keepalive"] is True
    assert (provider and provider.get_credentials()) == credentials
    assert all(each["credential_provider"] is None for each in asked)


def test_sentinels_have_a_login_and_tls_of_their_own(tmp_path: Path) -> None:
    """What the primary is told, the sentinels are told only if the URL says so."""
    authority = tmp_path / "ca.pem"
    authority.touch()
    base = f"sentinel://u:p@a?master_name=m&sentinel_username=su&sentinel_password=sp&ssl_ca_certs={authority}"
    for suffix, is_safe in (("&sentinel_ssl=true", True), ("&sentinel_ssl=false", False), ("", False)):
        pool: Any = pool_of(f"{base}{suffix}&min_other_sentinels=2")
        manager = pool.sentinel_manager
        (sentinel,) = manager.sentinels
        asked = sentinel.connection_pool

        assert pool.connection_class is redis.SentinelManagedSSLConnection
        assert pool.connection_kwargs["ssl_ca_certs"] == str(authority)
        assert pool.connection_kwargs["credential_provider"].get_credentials() == ("u", "p")
        assert manager.min_other_sentinels == 2
        assert (asked.connection_class is redis.SSLConnection) is is_safe
        assert asked.connection_kwargs.get("ssl_ca_certs") == (str(authority) if is_safe else None)
        assert asked.connection_kwargs["credential_provider"].get_credentials() == ("su", "sp")
        assert asked.connection_kwargs["socket_timeout"] == 3
        assert asked.connection_kwargs["socket_connect_timeout"] == 2


@pytest.mark.parametrize(
    ("url", "nodes"),
    [
        ("redis+cluster://a:1", [("a", 1)]),
        ("redis+cluster://a;b:2/0", [("a", 6379), ("b", 2)]),
        ("redis+cluster://a:1;redis+cluster://b:2", [("a", 1), ("b", 2)]),
        ("rediss+cluster://a:1;b?ssl_check_hostname=false", [("a", 1), ("b", 6379)]),
    ],
)
def test_url_of_a_cluster_names_where_to_begin(
    url: str, nodes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several nodes may be named, so that one of them may be down."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(RedisCluster, "__init__", lambda self, **options: seen.update(options))

    read_url(url).connect()

    assert [(each.host, each.port) for each in seen["startup_nodes"]] == nodes
    assert seen.get("ssl", False) is url.startswith("rediss")
    assert "db" not in seen


def test_tls_to_a_cluster_is_never_weaker_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redis-py that would not look at the name in a certificate is refused, unless nobody is to look."""
    monkeypatch.setattr("celery_idempotent.stores.redis.client._CLUSTERS_CHECK_NAMES", False)

    with pytest.raises(PolicyError, match="since redis-py 6; upgrade"):
        read_url("rediss+cluster://a")
    for allowed in ("rediss+cluster://a?ssl_cert_reqs=none", "rediss+cluster://a?ssl_check_hostname=false"):
        read_url(allowed)


class Provider(CredentialProvider):
    """What a cloud's login would be."""

    def get_credentials(self) -> tuple[str, str]:
        """User and a token."""
        return "shop", "token"


def test_options_reach_the_driver(tmp_path: Path) -> None:
    """Every option that the URL may carry is what the driver calls by the same name."""
    file = tmp_path / "pem"
    file.touch()
    options = pool_of(
        "rediss://h?socket_timeout=1.5&socket_connect_timeout=0.5&max_connections=7&client_name=shop&"
        f"credential_provider={__name__}.Provider&ssl_cert_reqs=CERT_OPTIONAL&ssl_ca_certs={file}&"
        f"ssl_ca_path={tmp_path}&ssl_certfile={file}&ssl_keyfile={file}&ssl_check_hostname=False"
    )

    given: dict[str, Any] = options.connection_kwargs
    assert isinstance(given["credential_provider"], Provider)
    assert options.max_connections == 7
    assert {
        name: given[name] for name in given if name.startswith(("ssl_c", "ssl_k", "socket_", "client"))
    }.items() >= {
        "socket_timeout": 1.5,
        "socket_connect_timeout": 0.5,
        "socket_keepalive": True,
        "client_name": "shop",
        "ssl_cert_reqs": "optional",
        "ssl_ca_certs": str(file),
        "ssl_ca_path": str(tmp_path),
        "ssl_certfile": str(file),
        "ssl_keyfile": str(file),
        "ssl_check_hostname": False,
    }.items()


def test_certificates_are_demanded_unless_the_url_says_otherwise() -> None:
    """TLS without a look at the certificate is no default."""
    assert pool_of("rediss://h").connection_kwargs["ssl_cert_reqs"] == "required"
    assert pool_of("rediss://h").connection_kwargs["ssl_check_hostname"] is True
    assert pool_of("rediss://h?ssl_cert_reqs=none").connection_kwargs["ssl_cert_reqs"] == "none"


def test_options_of_the_store_reach_the_store() -> None:
    """Prefix, number of replicas and seconds to wait for them."""
    store = open_store("redis://h?prefix=shop%3A&wait_replicas=2&wait_timeout=0.5")

    assert isinstance(store, RedisStore)
    assert (store._prefix, store._wait_replicas, store._wait_timeout) == ("shop:", 2, 0.5)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("redis://", "write a host"),
        ("redis:///0", "write a host"),
        ("redis://h/first", "db='first'"),
        ("redis://h/-1", "negative"),
        ("redis://h/1?db=2", "db is given twice"),
        ("redis://h:99999", "port cannot be read"),
        ("redis://h:1;redis://h:2", "several need sentinel:// or redis"),
        ("redis://h:1;h:2", "port cannot be read"),
        ("redis://h?wait_replica=1", "unknown option wait_replica; there are: .*wait_replicas"),
        ("redis://h?wait_replicas=one", "wait_replicas='one'"),
        ("redis://h?wait_replicas=1&wait_timeout=3", "wait_timeout .* less than socket_timeout"),
        ("redis://h?wait_replicas=1&socket_timeout=0.5", "wait_timeout .* less than socket_timeout"),
        ("redis://h?wait_timeout=0", "wait_timeout='0'"),
        ("redis://h?socket_timeout=61", "at most 60"),
        ("redis://h?prefix=", "prefix=''"),
        ("redis://h?ssl_cert_reqs=none", "TLS needs rediss://"),
        ("unix:///s?ssl_cert_reqs=none", "TLS needs rediss://"),
        ("rediss://h?ssl_cert_reqs=maybe", "required, optional or none"),
        ("rediss://h?ssl_check_hostname=maybe", "true or false"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "the file does not exist"),
        ("rediss://h?ssl_ca_path=/no/such/folder", "the folder does not exist"),
        ("redis://h?credential_provider=os.getcwd", "not name a redis.CredentialProvider"),
        ("redis://h?credential_provider=no.such.module", "No module"),
        ("redis://h?credential_provider=os.nothing", "credential_provider"),
        ("redis://h?credential_provider=os.path.join", "credential_provider"),
        (f"redis://u:{SECRET}@h?credential_provider={__name__}.Provider", "credential_provider brings"),
        ("redis+socket://", "path of the socket"),
        ("unix:///", "path of the socket"),
        ("unix://run/redis.sock", "three slashes"),
        ("sentinel://a:1", "master_name="),
        ("sentinel://a:1?master_name=", "master_name=''"),
        ("sentinel://a:1?master_name=m;b:2?master_name=n", "master_name is given twice"),
        ("sentinel://a:1;redis://2?master_name=m", "one scheme"),
        ("redis+cluster://a:1;rediss+cluster://b:2", "one scheme"),
        ("sentinel://a:1;;b:2?master_name=m", "write a host"),
        ("redis://h?master_name=m", "unknown option master_name"),
        ("redis+cluster://h/1", "unknown option db"),
        ("redis://h/0#1", "@ or #"),
    ],
)
def test_unusable_url_is_refused_with_the_part_and_the_remedy(url: str, remedy: str) -> None:
    """What cannot be meant is told when the store is opened, not when a task runs."""
    with pytest.raises(PolicyError, match=f"^idempotency_store='.*{remedy}") as raised:
        open_store(url)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("special", ["/", "?", "#", "[", "]", ":", ";", "@", "%"])
@pytest.mark.parametrize(
    "form", ["redis://u:{}@h", "redis://:{}@h:6379/0", "sentinel://:{}@h?master_name=m", "redis+cluster://u:{}@h"]
)
@pytest.mark.parametrize("beginning", [SECRET, "12"])
def test_password_that_breaks_its_url_is_not_told(special: str, form: str, beginning: str) -> None:
    """Of a password with special characters that were not escaped, no piece appears in the error or in the name."""
    try:
        shown = repr(open_store(form.format(f"{beginning}{special}{SECRET}")))
    except PolicyError as error:
        shown = f"{error} {error!r} {error.__cause__} "
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (f"redis://u:{SECRET}@h:1/2?prefix=x", "redis://h:1/2"),
        (f"rediss://u:{SECRET}@h", "rediss://h:6379/0"),
        (f"redis+socket://:{SECRET}@/run/r.sock", "redis+socket:///run/r.sock"),
        (f"unix:///run/r.sock?password={SECRET}", "unix:///run/r.sock"),
        (
            f"sentinel://:{SECRET}@a;b:2/1?master_name=m&sentinel_password={SECRET}",
            "sentinel://a:26379;b:2/1?master_name=m",
        ),
        (f"redis+cluster://:{SECRET}@a;b:2", "redis+cluster://a:6379;b:2"),
    ],
)
def test_name_has_no_credentials(url: str, name: str) -> None:
    """What appears in logs and errors says where the records are, and nothing else."""
    store = open_store(url)

    assert repr(store) == name


@pytest.mark.parametrize(
    "url", [f"redis://u:{SECRET}@h", f"sentinel://:{SECRET}@a?master_name=m&sentinel_password={SECRET}"]
)
def test_driver_does_not_show_the_password_either(url: str) -> None:
    """Not even the driver's own objects, which its errors quote."""
    pool: Any = pool_of(url)

    shown = f"{pool!r} {pool.connection_kwargs!r}"
    if "sentinel" in url:
        shown += f"{pool.sentinel_manager.sentinels!r} {pool.sentinel_manager.connection_kwargs!r}"
    assert SECRET not in shown


def test_nothing_is_connected_when_a_store_is_opened() -> None:
    """A publisher that only names the store needs no server."""
    for url in ("redis://127.0.0.1:1", "redis+cluster://127.0.0.1:1", "sentinel://127.0.0.1:1?master_name=m"):
        store = open_store(url)
        store.close()
    assert store._connected.made() is None  # type: ignore[attr-defined]
