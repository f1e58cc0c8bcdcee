"""Clients of Redis: which a URL means, as Celery and redis-py write it, and what redis-py's errors mean."""

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis import exceptions
from redis.backoff import FullJitterBackoff, NoBackoff
from redis.cluster import REDIS_ALLOWED_KEYS, ClusterNode, RedisCluster
from redis.credentials import CredentialProvider, UsernamePasswordCredentialProvider
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from celery_idempotent.errors import PolicyError
from celery_idempotent.printable import scheme_of
from celery_idempotent.stores.failures import NO_RULE, Meaning, Rule, rule_of

Client: TypeAlias = redis.Redis | RedisCluster

DRIVER_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, exceptions.ChildDeadlockedError, OSError)

OTHER_TYPE = Rule(
    text=r"\bWRONGTYPE\b", remedy="a key of another program begins with the store's prefix; choose another by ?prefix="
)

# The patterns were read off Redis 6.2, Redis 7.0 and Valkey 9.1.
_RULES = (
    Rule(
        errors=(exceptions.ReadOnlyError,),
        text="-READONLY",
        meaning=Meaning.READ_ONLY,
        remedy="this server is a replica; name its primary, or the sentinels that know it",
    ),
    Rule(errors=(exceptions.AuthenticationError,), remedy="the server does not accept user and password"),
    Rule(
        errors=(exceptions.NoPermissionError,),
        text="ACL failure in script|can't run this command",
        remedy="the user may not do this; grant it "
        "+evalsha +eval +time +hgetall +hset +hdel +persist +pexpireat on keys that begin with the store's prefix, "
        "+client|setname, and to an operator also +scan +hget +del",
    ),
    OTHER_TYPE,
    Rule(
        errors=(exceptions.MovedError,),
        text=r"^MOVED \d",  # redis-py before 6 has the class only in a cluster
        remedy="the server is part of a cluster; write redis+cluster:// or rediss+cluster://",
    ),
    Rule(text="Cluster mode is not enabled", remedy="the server is not part of a cluster; write redis:// or rediss://"),
    Rule(text="DB index is out of range", remedy="the server has no database with this number"),
    Rule(text="unknown command", remedy="the server lacks a command; it must be Redis 6.2 or later, or Valkey"),
    Rule(
        errors=(ssl.SSLCertVerificationError,),
        remedy="the server's certificate is not trusted; name the authority by ssl_ca_certs, and the host as certified",
    ),
    Rule(
        errors=(exceptions.OutOfMemoryError,),
        text="-OOM",
        meaning=Meaning.UNAVAILABLE,
        remedy="the server's memory is full, so it accepts no claims; raise maxmemory, or shorten retain",
    ),
    Rule(
        text="^Too many connections$",  # of redis-py's own pool
        meaning=Meaning.UNAVAILABLE,
        remedy="more is asked at once than max_connections allows; raise it: one for each body, and one for renewals",
    ),
    Rule(
        errors=(MasterNotFoundError,),
        meaning=Meaning.UNAVAILABLE,
        remedy="no sentinel names a primary that is up; if it stays so, check master_name and the sentinels",
    ),
)


def trouble_of(error: BaseException | None) -> Rule:
    """What kind of failure ``error`` is, or else its cause; a lost connection has none."""
    while error is not None:
        rule = rule_of(_RULES, error, "", str(error))
        if rule is not NO_RULE:
            return rule
        error = error.__cause__ or error.__context__
    return NO_RULE


_LOST: list[type[Exception]] = [redis.ConnectionError, redis.TimeoutError]
"""After these a command is sent again. redis-py before 6 does so only if told, except to a cluster."""

_takes_no_name = signature(redis.ConnectionPool.get_connection).parameters["command_name"].default is None
_NAME_FOR_POOL = () if _takes_no_name else ("EVALSHA",)
"""redis-py before 5.3 demands the name of a command, and does nothing with it; later ones warn of it."""


class DirectClient(redis.Redis):
    """A redis-py client that keeps connections in hand between two calls of :meth:`ask`.

    ``execute_command`` takes a connection out of the pool, looks whether something waits on it, and keeps statistics,
    each time: two thirds of what a request costs. Here a lost connection is found by the request that it fails, and
    sent again at once; ``resends`` says how further losses are met. All other commands go redis-py's way.
    """

    def __init__(self, *, resends: Retry, **options: Any) -> None:
        super().__init__(**options)
        self._resends = resends
        self._in_hand: list[Any] = []

    def ask(self, *command: bytes) -> Any:
        """The server's reply to ``command``, as ``execute_command`` gives and raises it."""
        packed = _pack(command)
        try:
            connection = self._in_hand.pop()
        except IndexError:
            connection = self.connection_pool.get_connection(*_NAME_FOR_POOL)

        def send() -> Any:
            connection.send_packed_command([packed])
            return connection.read_response()

        try:
            try:
                reply = send()
            except (redis.ConnectionError, redis.TimeoutError):
                connection.disconnect()
                reply = self._resends.call_with_retry(send, lambda _: connection.disconnect())
        except redis.ResponseError:
            self._in_hand.append(connection)  # an answer, too
            raise
        except BaseException:
            # Whatever else it is, such as a time limit: a reply may still come, and it is nobody's.
            connection.disconnect()
            self.connection_pool.release(connection)
            raise
        self._in_hand.append(connection)
        return reply

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        self._give_back()
        return cast(Any, super()).execute_command(*arguments, **options)

    def pipeline(self, *arguments: Any, **options: Any) -> Any:
        self._give_back()
        return super().pipeline(*arguments, **options)

    def drop(self) -> None:
        """Close the connections that nobody uses: the next call makes a new one, to whoever has the name now."""
        self._give_back()
        self.connection_pool.disconnect(inuse_connections=False)

    def _give_back(self) -> None:
        """Leave what is in hand to other commands: with ``max_connections``, the pool may have no more than that."""
        while True:
            try:
                connection = self._in_hand.pop()
            except IndexError:  # not asked before: another thread may take the last one in between
                return
            self.connection_pool.release(connection)


def _pack(command: Sequence[bytes]) -> bytes:
    """The command as the wire has it: an array of bulk strings (the RESP specification, "Sending commands")."""
    # redis-py's packer looks at each argument several times, and takes five times as long.
    return b"*%d\r\n" % len(command) + b"".join([b"$%d\r\n%b\r\n" % (len(each), each) for each in command])


WAIT_TIMEOUT = 1.0
"""Seconds; a replica in the same data centre answers in a few milliseconds."""

_CLUSTER = frozenset({"redis+cluster", "rediss+cluster"})
_SOCKET = frozenset({"redis+socket", "unix"})
_TLS = frozenset({"rediss", "rediss+cluster"})

_LIMITS: Mapping[str, Any] = {
    "socket_connect_timeout": 2.0,
    "socket_timeout": 3.0,
    # At least the concurrency of any sane worker, greenlets included: beyond it redis-py fails instead of waiting.
    "max_connections": 10_000,
    # By which an operator tells our connections from those of the broker, whose server it may be, too.
    "client_name": "celery-idempotent",
}
"""Seconds, connections and a name. redis-py's own 5 s and up to 10 resends can outlast a lease."""

_RESENDS = 2
"""By the driver, after a lost connection or reply; ``swap.lua`` recognises what was written before.

That, and TCP keepalive, is why there is no health check: it would be a second round trip before many a swap.
"""

_CLUSTERS_CHECK_NAMES = "ssl_check_hostname" in REDIS_ALLOWED_KEYS
"""redis-py before 6 drops the option on the way to a cluster."""

_LASTING = (type(None), UsernamePasswordCredentialProvider)
"""Credentials that do not end while a connection lasts; of others, redis-py's pool renews the login."""

_ESCAPE = "write special characters of user and password as %xx"


class _UrlUnusable(Exception):
    """A part of a URL cannot be used; the text says which, and how to write it."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL says: servers and database without credentials, how to make a client, and what the store is told."""

    name: str
    connect: Callable[[], Client]
    options: Mapping[str, Any]


def read_url(url: str) -> Target:
    """What ``url`` means; nothing is connected."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    servers = [rest]
    if scheme in _CLUSTER | {"sentinel"}:  # each with the options written behind it; the scheme need not be repeated
        servers = [each.removeprefix(f"{scheme}://") for each in rest.split(";")]
    try:
        chunks = [_split(scheme, each) for each in servers]
        options = _options(scheme, chunks)
        own = {name: options.pop(name) for name in _OF_THE_STORE & options.keys()}
        if own.get("wait_replicas") and own.get("wait_timeout", WAIT_TIMEOUT) >= options["socket_timeout"]:
            raise _UrlUnusable("wait_timeout (1 by default) must be less than socket_timeout (3), both in seconds")
        name, connect = _connection(scheme, chunks, options)
    except _UrlUnusable as error:
        raise PolicyError("idempotency_store", scheme_of(f"{scheme}://"), str(error)) from None
    return Target(f"{scheme}://{name}", connect, own)


def _split(scheme: str, text: str) -> SplitResult:
    if "://" in text:
        raise _UrlUnusable("the servers of one URL have one scheme; several need sentinel:// or redis+cluster://")
    try:
        chunk = urlsplit(f"{scheme}://{text}")
        _ = chunk.port
    except ValueError:  # whose text would quote the password
        raise _UrlUnusable(f"host or port cannot be read; {_ESCAPE}") from None
    if chunk.fragment or "@" in chunk.path + chunk.query:
        raise _UrlUnusable(f"there is an @ or # after the host; {_ESCAPE}")
    return chunk


def _options(scheme: str, chunks: Sequence[SplitResult]) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for name, text in (pair for chunk in chunks for pair in _pairs(scheme, chunk)):
        if texts.setdefault(name, text) != text:
            raise _UrlUnusable(f"{name} is given twice, and differently")
    if scheme in _CLUSTER and texts.get("db") == "0":
        del texts["db"]
    known = {
        **_OPTIONS,
        **({} if scheme in _CLUSTER else {"db": _DATABASE}),
        **(_OPTIONS_OF_TLS if scheme in _TLS | {"sentinel"} else {}),
        **(_OPTIONS_OF_SENTINEL if scheme == "sentinel" else {}),
    }
    if unknown := texts.keys() - known:
        remedy = "; TLS needs rediss:// or rediss+cluster://" if unknown & _OPTIONS_OF_TLS.keys() else ""
        raise _UrlUnusable(f"unknown option {', '.join(sorted(unknown))}{remedy}; there are: {', '.join(known)}")
    options = {**_LIMITS, **{name: _value(name, text, *known[name]) for name, text in texts.items()}}
    # A provider is what redis-py makes of both anyway; unlike them it is not shown, in no version, by any repr.
    for provider, prefix in (("credential_provider", ""), ("sentinel_credentials", "sentinel_")):
        login = options.pop(f"{prefix}username", None), options.pop(f"{prefix}password", None)
        if login != (None, None):
            if provider in options:
                raise _UrlUnusable(f"{provider} brings user and password; drop those from the URL")
            options[provider] = UsernamePasswordCredentialProvider(*login)
    if scheme not in _CLUSTER:
        options.setdefault("db", 0)
    if scheme not in _SOCKET:
        options["socket_keepalive"] = True
    if scheme in _TLS:
        options["ssl"] = True
    is_encrypted = scheme in _TLS or any(name.startswith("ssl_") for name in options)
    if is_encrypted and options.get("ssl_cert_reqs") != "none":
        options.setdefault("ssl_check_hostname", True)  # redis-py's own default only since 6
    if options.get("ssl_check_hostname") and scheme in _CLUSTER and not _CLUSTERS_CHECK_NAMES:
        raise _UrlUnusable("checks the names of hosts only since redis-py 6; upgrade, or ssl_check_hostname=false")
    # The newer protocol has nothing that is used here, and a longer greeting.
    return {**options, "protocol": 2}


def _pairs(scheme: str, chunk: SplitResult) -> Iterator[tuple[str, str]]:
    if chunk.username:
        yield "username", unquote(chunk.username)
    if chunk.password:
        yield "password", unquote(chunk.password)
    if scheme not in _SOCKET and chunk.path.strip("/"):
        yield "db", unquote(chunk.path).strip("/")
    for name, text in parse_qsl(chunk.query, keep_blank_values=True):
        yield "db" if name == "virtual_host" else name, text


def _value(name: str, text: str, read: Callable[[str], Any], accepts: Callable[[Any], object], remedy: str) -> Any:
    try:
        if accepts(value := read(text)):
            return value
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        remedy = str(error)
    raise _UrlUnusable(f"{name}={text!r} cannot be used: {remedy}")


def _connection(
    scheme: str, chunks: Sequence[SplitResult], options: Mapping[str, Any]
) -> tuple[str, Callable[[], Client]]:
    """Name and maker of a client. Only that of a cluster connects at once."""
    if scheme in _SOCKET:
        path = unquote(chunks[0].path)
        if chunks[0].hostname or not path.strip("/"):
            raise _UrlUnusable("write the path of the socket after three slashes")
        return path, partial(_server, unix_socket_path=path, **options)
    if not all(each.hostname for each in chunks):
        raise _UrlUnusable("write a host after the two slashes")
    usual = 26379 if scheme == "sentinel" else 6379
    nodes = [(str(each.hostname), each.port or usual) for each in chunks]
    name = ";".join(f"{host}:{port}" for host, port in nodes)
    if scheme in _CLUSTER:
        # A client keeps its nodes with their connections, so each has its own.
        return name, lambda: RedisCluster(
            startup_nodes=[ClusterNode(*each) for each in nodes], retry=_retry(), **options
        )
    name += f"/{options['db']}"
    if scheme == "sentinel":
        if "master_name" not in options:
            raise _UrlUnusable("name the group of servers by ?master_name=")
        return f"{name}?master_name={options['master_name']}", partial(_primary, nodes, **options)
    ((host, port),) = nodes
    return name, partial(_server, host=host, port=port, **options)


def _server(**options: Any) -> Client:
    if type(options.get("credential_provider")) in _LASTING:
        return DirectClient(resends=_retry(_RESENDS - 1), retry=_retry(), retry_on_error=_LOST, **options)
    return redis.Redis(retry=_retry(), retry_on_error=_LOST, **options)


def _primary(nodes: Sequence[tuple[str, int]], *, master_name: str, **options: Any) -> Client:
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    sentinels = Sentinel(
        nodes,
        min_other_sentinels=options.pop("min_other_sentinels", 0),
        sentinel_kwargs={
            **{name: options[name] for name in ("socket_connect_timeout", "socket_timeout", "protocol")},
            "credential_provider": options.pop("sentinel_credentials", None),
            "retry": Retry(NoBackoff(), 0),  # the next sentinel is asked instead
            **({"ssl": True, **tls} if options.pop("sentinel_ssl", False) else {}),
        },
    )
    client: Client = sentinels.master_for(master_name, retry=_retry(), retry_on_error=_LOST, ssl=bool(tls), **options)
    return client


def _retry(resends: int = _RESENDS) -> Retry:
    return Retry(FullJitterBackoff(base=0.05, cap=0.5), resends)


_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_Kind: TypeAlias = tuple[Callable[[str], Any], Callable[[Any], object], str]
"""What reads the text of an option, which values it may have, and what to write instead of others."""

_TEXT: _Kind = str, bool, "it is empty"
_WHOLE: _Kind = int, lambda number: number >= 0, "it must not be negative"
_SECONDS: _Kind = float, lambda seconds: 0 < seconds <= 60, "write seconds, more than 0 and at most 60"
_FLAG: _Kind = lambda text: _FLAGS.get(text.lower()), lambda flag: flag is not None, "write true or false"
_FILE: _Kind = str, lambda path: Path(path).is_file(), "the file does not exist"
# As text: hiredis 3.5 crashes the process where a signal's handler raises while it writes a number, as in SELECT.
# And 0 as a number, for which redis-py sends none.
_DATABASE: _Kind = lambda text: str(int(text)) if int(text) else 0, lambda db: int(db) >= 0, _WHOLE[2]

_OF_THE_STORE = frozenset({"prefix", "wait_replicas", "wait_timeout"})
_OPTIONS: Mapping[str, _Kind] = {
    "prefix": _TEXT,
    "wait_replicas": _WHOLE,
    "wait_timeout": _SECONDS,
    "username": _TEXT,
    "password": _TEXT,
    "credential_provider": (
        lambda name: resolve_name(name)(),
        lambda provider: isinstance(provider, CredentialProvider),
        "it does not name a redis.CredentialProvider",
    ),
    "client_name": (str, lambda name: True, ""),
    "socket_connect_timeout": _SECONDS,
    "socket_timeout": _SECONDS,
    "max_connections": _WHOLE,
}
_OPTIONS_OF_TLS: Mapping[str, _Kind] = {
    "ssl_cert_reqs": (
        lambda text: text.removeprefix("CERT_").lower(),
        {"required", "optional", "none"}.__contains__,
        "write required, optional or none",
    ),
    "ssl_ca_certs": _FILE,
    "ssl_ca_path": (str, lambda path: Path(path).is_dir(), "the folder does not exist"),
    "ssl_certfile": _FILE,
    "ssl_keyfile": _FILE,
    "ssl_check_hostname": _FLAG,
}
_OPTIONS_OF_SENTINEL: Mapping[str, _Kind] = {
    "master_name": _TEXT,
    "min_other_sentinels": _WHOLE,
    "sentinel_username": _TEXT,
    "sentinel_password": _TEXT,
    "sentinel_ssl": _FLAG,
}
