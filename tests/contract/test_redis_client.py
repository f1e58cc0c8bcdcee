"""URLs of Redis and the client that one gives: what they mean, what is refused, and the short way of a swap."""

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock
from urllib.parse import quote

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import Connection
from redis.credentials import CredentialProvider
from redis.retry import Retry

from celery_idempotent.errors import PolicyError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.client import DirectClient, _pack, read_url
from lab.embedded import EmbeddedRedis
from tests.support.redis_servers import HOST, administrator, opened
from tests.support.scene import raising

SECRET = "5ecret"
PEM, HERE = __file__, str(Path(__file__).parent)
"""Whether files are there is all that is looked at before a connection is made."""


class Provider(CredentialProvider):
    """What a cloud's login would be."""

    def get_credentials(self) -> tuple[str, str]:
        """User and a token."""
        return "shop", "token"


def _told(pool: Any) -> dict[str, Any]:
    """What a pool tells its connections, with the login as it will be sent."""
    options = dict(pool.connection_kwargs)
    provider = options.get("credential_provider")
    login = provider.get_credentials() if provider else None
    return {**options, "login": login, "class": pool.connection_class.__name__, "most": pool.max_connections}


def told(url: str) -> dict[str, Any]:
    """What the driver is told of one server, or of the primary that sentinels name; and those, under ``sentinels``."""
    client = RedisStore.from_url(url)._connected()
    assert isinstance(client, redis.Redis)
    pool: Any = client.connection_pool
    shown = repr(pool) + repr(pool.connection_kwargs)
    manager = getattr(pool, "sentinel_manager", None)
    if manager:
        shown += repr(manager.sentinels) + repr(manager.connection_kwargs)
    assert SECRET not in shown
    sentinels = [_told(each.connection_pool) for each in manager.sentinels] if manager else []
    return {**_told(pool), "sentinels": sentinels, "others": getattr(manager, "min_other_sentinels", None)}


PLAIN = (
    {"host": "h", "port": 6379, "path": None, "db": 0, "login": None, "class": "Connection", "protocol": 2}
    | {"socket_timeout": 3, "socket_connect_timeout": 2, "socket_keepalive": True, "most": 10_000}
    | {"client_name": "celery-idempotent", "sentinels": []}
)
ABSENT = dict.fromkeys(("host", "port", "socket_keepalive", "socket_connect_timeout"))
SOCKET = {**PLAIN, **ABSENT, "class": "UnixDomainSocketConnection"}
TLS = {**PLAIN, "class": "SSLConnection", "ssl_cert_reqs": "required", "ssl_check_hostname": True}
LIMITS = "socket_timeout=1.5&socket_connect_timeout=0.5&max_connections=7&client_name=s"
LIMITED = {"socket_timeout": 1.5, "socket_connect_timeout": 0.5, "most": 7, "client_name": "s"}
FILES = f"ssl_ca_certs={PEM}&ssl_ca_path={HERE}&ssl_certfile={PEM}&ssl_keyfile={PEM}"


@pytest.mark.parametrize(
    ("url", "usual", "other"),
    [
        ("redis://h", PLAIN, {}),
        ("redis://10.0.0.7:6380/2", PLAIN, {"host": "10.0.0.7", "port": 6380, "db": "2"}),
        ("redis://[::1]/0", PLAIN, {"host": "::1"}),
        ("redis://shop@h", PLAIN, {"login": ("shop", "")}),
        (f"redis://h?credential_provider={__name__}.Provider", PLAIN, {"login": ("shop", "token")}),
        (f"redis://h?{LIMITS}", PLAIN, LIMITED),
        ("rediss://h?ssl_cert_reqs=none", {**PLAIN, "class": "SSLConnection"}, {"ssl_cert_reqs": "none"}),
        (f"rediss://h?{FILES}", TLS, {"ssl_ca_certs": PEM, "ssl_ca_path": HERE, "ssl_certfile": PEM}),
        ("redis+socket:///run/r.sock?virtual_host=4", SOCKET, {"path": "/run/r.sock", "db": "4"}),
        ("unix://shop@/run/a%20b.sock?password=pw", SOCKET, {"path": "/run/a b.sock", "login": ("shop", "pw")}),
    ],
)
def test_url_of_one_server_means_what_celery_and_redis_py_mean(url: str, usual: Any, other: Any) -> None:
    """Host, port, database, socket, login and TLS; a database as text, as a number crashes hiredis under a signal."""
    wanted, found = {**usual, **other}, told(url)
    assert {name: found.get(name) for name in wanted} == wanted


@settings(max_examples=10)
@given(st.text(min_size=1), st.text(min_size=1))
def test_escaped_login_arrives_as_it_was_and_is_shown_by_nobody(user: str, password: str) -> None:
    """Not by the store's name, and not by the driver's own objects, which its errors quote."""
    password += SECRET
    url = f"redis://{quote(user, safe='')}:{quote(password, safe='')}@h"

    assert told(url)["login"] == (user, password)
    assert repr(open_store(url)) == "redis://h:6379/0"


SENTINELS = {"host": "a", "port": 26379, "login": None, "class": "Connection", "socket_timeout": 3, "protocol": 2}


@pytest.mark.parametrize(
    ("url", "primary", "sentinels", "name"),
    [
        ("a:1?master_name=m", {}, [{"port": 1}], "a:1/0"),
        (":pw@a;sentinel://b:2/3?master_name=m", {"db": "3", "login": ("pw",)}, [{}, {"host": "b", "port": 2}], None),
        (
            f"u:{SECRET}@a?master_name=m&sentinel_username=su&sentinel_password={SECRET}&min_other_sentinels=2",
            {"login": ("u", SECRET), "others": 2},
            [{"login": ("su", SECRET)}],
            "a:26379/0",
        ),
        (
            f"a?master_name=m&ssl_ca_certs={PEM}",
            {"class": "SentinelManagedSSLConnection", "ssl_ca_certs": PEM, "ssl_check_hostname": True},
            [{"ssl_ca_certs": None}],
            None,
        ),
        (f"a?master_name=m&ssl_ca_certs={PEM}&sentinel_ssl=true", {}, [{"class": "SSLConnection"}], None),
    ],
)
def test_url_of_sentinels_means_the_primary_that_they_name(
    url: str, primary: dict[str, Any], sentinels: list[dict[str, Any]], name: str | None
) -> None:
    """Servers are parted by semicolons, as in a broker's URL; what the primary is told, sentinels are told if asked."""
    found = told(f"sentinel://{url}")
    wanted = {"db": 0, "login": None, "others": 0, "socket_keepalive": True, **primary}

    assert {each: found[each] for each in wanted} == wanted
    for asked, other in zip(found["sentinels"], sentinels, strict=True):
        assert {each: asked.get(each) for each in {**SENTINELS, **other}} == {**SENTINELS, **other}
    if name:
        assert repr(open_store(f"sentinel://{url}")) == f"sentinel://{name}?master_name=m"


@pytest.mark.parametrize(
    ("url", "nodes"),
    [
        (f"redis+cluster://:{SECRET}@a;b:2/0", [("a", 6379), ("b", 2)]),
        ("rediss+cluster://a:1;b?ssl_check_hostname=false", [("a", 1), ("b", 6379)]),
    ],
)
def test_url_of_a_cluster_names_where_to_begin(
    url: str, nodes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several nodes may be named, so that one of them may be down."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(RedisCluster, "__init__", lambda self, **options: seen.update(options))
    target = read_url(url)
    target.connect()

    assert [(each.host, each.port) for each in seen["startup_nodes"]] == nodes
    assert (seen.get("ssl", False), "db" in seen) == (url.startswith("rediss"), False)
    assert target.name.partition("://")[2] == ";".join(f"{host}:{port}" for host, port in nodes)


def test_tls_to_a_cluster_is_never_weaker_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A redis-py that would not look at the name in a certificate is refused, unless nobody is to look."""
    monkeypatch.setattr("celery_idempotent.stores.redis.client._CLUSTERS_CHECK_NAMES", False)
    with pytest.raises(PolicyError, match="redis-py 6"):
        read_url("rediss+cluster://a")
    for allowed in ("ssl_cert_reqs=none", "ssl_check_hostname=false"):
        read_url(f"rediss+cluster://a?{allowed}")


@pytest.mark.parametrize(
    ("url", "part"),
    [
        *(("redis://", "host"), ("redis:///0", "host"), ("sentinel://a:1;;b:2?master_name=m", "host")),
        *(("redis://h/first", "db='first'"), ("redis://h/-1", "negative"), ("redis://h/1?db=2", "db is given twice")),
        *(("redis://h:99999", "port"), ("redis://h:1;h:2", "port"), ("redis://h/0#1", "@ or #")),
        *(("redis://h:1;redis://h:2", "sentinel://"), ("sentinel://a:1;redis://2?master_name=m", "one scheme")),
        ("redis://h?wait_replica=1", "wait_replica; there are: .*wait_replicas"),
        ("redis://h?wait_replicas=one", "wait_replicas='one'"),
        *((f"redis://h?wait_replicas=1&{each}", "less than") for each in ("wait_timeout=3", "socket_timeout=0.5")),
        *(("redis://h?wait_timeout=0", "wait_timeout='0'"), ("redis://h?socket_timeout=61", "at most 60")),
        *((f"{each}?ssl_cert_reqs=none", "TLS needs rediss://") for each in ("redis://h", "unix:///s")),
        *(("rediss://h?ssl_cert_reqs=maybe", "required"), ("rediss://h?ssl_check_hostname=maybe", "true or false")),
        *(("rediss://h?ssl_ca_certs=/no/such", "file"), ("rediss://h?ssl_ca_path=/no/such", "folder")),
        ("redis://h?credential_provider=os.getcwd", "redis.CredentialProvider"),
        *((f"redis://h?credential_provider={each}", "provider") for each in ("no.such", "os.nothing", "os.path.join")),
        (f"redis://u:{SECRET}@h?credential_provider={__name__}.Provider", "credential_provider brings"),
        *(("redis+socket://", "path of the socket"), ("unix:///", "path of the socket"), ("unix://run/r", "slashes")),
        *(("sentinel://a:1", "master_name="), ("sentinel://a:1?master_name=m;b:2?master_name=n", "given twice")),
        *(("redis://h?master_name=m", "option master_name"), ("redis+cluster://h/1", "option db")),
    ],
)
def test_unusable_url_is_refused_with_the_part(url: str, part: str) -> None:
    """When the store is opened, and not when a task runs."""
    with pytest.raises(PolicyError, match=f"^idempotency_store='.*{part}") as raised:
        open_store(url)
    assert SECRET not in str(raised.value)


def test_all_tries_of_a_call_end_within_half_a_lease() -> None:
    """Each may wait as long as it may; both ways give up after as many."""
    client = RedisStore.from_url("redis://localhost")._connected()
    assert isinstance(client, DirectClient)
    options: Any = client.connection_pool.connection_kwargs

    tries = 1 + options["retry"]._retries
    assert tries == 2 + client._resends._retries
    assert tries * (options["socket_connect_timeout"] + options["socket_timeout"]) == 15


class Struck(Exception):
    """Raised by a signal, as a soft time limit is."""


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[DirectClient]:
    """What a URL of one server gives, connected."""
    made = read_url(redis_server.url).connect()
    assert isinstance(made, DirectClient)
    made.ask(b"PING")
    yield made
    made.close()


@pytest.fixture
def single(redis_server: EmbeddedRedis) -> Iterator[DirectClient]:
    """A client whose pool has room for one connection: whoever keeps that one leaves none."""
    made = DirectClient(resends=Retry(NoBackoff(), 1), host=HOST, port=redis_server.port, max_connections=1, protocol=2)
    made.ask(b"PING")
    yield made
    made.close()


def _connection_id(client: DirectClient) -> Any:
    return client.ask(b"CLIENT", b"ID")


def _one(client: DirectClient, *said: bytes) -> list[Any]:
    return [client.ask(b"ECHO", each) for each in said]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_command_is_packed_as_redis_py_packs_it(command: list[bytes]) -> None:
    """The wire sees no difference between the two ways."""
    assert _pack([b"EVALSHA", *command]) == b"".join(Connection().pack_command(b"EVALSHA", *command))


def test_strike_before_a_reply_is_read_leaves_neither_reply_nor_place(
    single: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py closes a connection where the strike hits while it reads; in the moment before, nobody else would."""
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "read_response", raising(Struck()))
        with pytest.raises(Struck):
            _one(single, b"one", b"two")
    assert _one(single, b"three") == [b"three"]


def test_reply_that_came_too_late_goes_to_nobody(client: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is sent again by a new connection: by the old one, each reply from now on would be the one before."""
    read = Connection.read_response
    for error in (redis.ConnectionError, redis.TimeoutError):
        replies = Mock(side_effect=chain([DEFAULT, error], repeat(DEFAULT)), wraps=read)
        monkeypatch.setattr(Connection, "read_response", lambda *asked, replies=replies, **how: replies(*asked, **how))
        assert _one(client, b"one", b"two", b"three") == [b"one", b"two", b"three"]


def test_dropping_never_fails_where_another_thread_takes_the_last_connection(client: DirectClient) -> None:
    """In a fail-over all threads drop at once, and a delivery that failed of that would be lost."""

    class Raced(list[Any]):
        """A list whose last item another thread takes between a look and a ``pop``."""

        def __len__(self) -> int:
            return 1

    client._in_hand = Raced()
    client.drop()


def test_one_connection_is_enough_for_all_commands(single: DirectClient) -> None:
    """``max_connections`` may be the number of threads: what is in hand is left to the command that comes next."""
    for _ in range(2):
        assert single.ask(b"ECHO", b"swap") == b"swap"
        assert single.ping()
        assert single.ask(b"ECHO", b"swap") == b"swap"
        with single.pipeline(transaction=False) as several:
            assert several.ping().execute() == [True]


def test_strike_while_a_connection_is_made_leaves_none_to_another_database(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py's pool keeps a connection that has not chosen its database yet, and takes it for ready."""
    url = redis_server.url.removesuffix("/0") + "/1"
    send: Any = Connection.send_command

    def struck(self: Connection, *arguments: Any, **options: Any) -> None:
        if arguments[0] == "SELECT":
            raise Struck
        send(self, *arguments, **options)

    with opened(url) as store, redis.Redis.from_url(url) as other:
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "send_command", struck)
            with pytest.raises(Struck):
                store.get("k")
        client = store._connected()
        assert isinstance(client, DirectClient)
        client.ask(b"SET", b"written", b"")
        assert other.exists("written")


def test_lost_connection_is_replaced_at_once_and_a_closed_client_leaves_none(
    client: DirectClient, redis_server: EmbeddedRedis
) -> None:
    """A server that closes idle connections fails no request; ``close()`` closes those in hand, too."""
    with administrator(redis_server) as other:
        other.client_kill_filter(_id=str(_connection_id(client)))
        connection = str(_connection_id(client))
        client.close()
        assert connection not in {each["id"] for each in other.client_list()}
