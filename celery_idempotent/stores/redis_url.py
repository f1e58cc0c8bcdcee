"""Redis URLs, as Celery and redis-py spell them: which servers they mean, and how a client for those is made.

=================================================  ==========================================================
``redis://[user:password@]host[:port][/db]``       one server
``rediss://...``                                   the same over TLS
``redis+socket:///path``, ``unix:///path``         the same through a Unix socket
``sentinel://host[:port][;host[:port]...][/db]``   the primary that these sentinels name
``redis+cluster://host[:port][;host[:port]...]``   the cluster that these nodes belong to
``rediss+cluster://...``                           the same over TLS
=================================================  ==========================================================
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_idempotent.errors import PolicyError

__all__ = ["SCHEMES", "Client", "Target", "read_url"]

Client: TypeAlias = redis.Redis | RedisCluster

_CLUSTER = frozenset({"redis+cluster", "rediss+cluster"})
_SOCKET = frozenset({"redis+socket", "unix"})
_TLS = frozenset({"rediss", "rediss+cluster"})
_SEVERAL = _CLUSTER | {"sentinel"}
SCHEMES = _CLUSTER | _SOCKET | _TLS | {"redis", "sentinel"}

_LIMITS: Mapping[str, Any] = {
    "socket_connect_timeout": 2.0,
    "socket_timeout": 3.0,
    # At least the concurrency of any sane worker, greenlets included: beyond it redis-py fails instead of waiting.
    "max_connections": 10_000,
}
"""Seconds, and connections. redis-py's own 5 s and 10 resends can outlast a lease."""

_RESENDS = 2
"""By the driver, after a lost connection or reply; ``swap.lua`` recognises what was written before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a URL says."""

    #: For people: scheme, servers and database, never credentials.
    name: str
    #: Makes a client. Only that of a cluster connects at once.
    connect: Callable[[], Client]
    #: What is meant for the store.
    options: Mapping[str, Any]


def read_url(url: str) -> Target:
    """What ``url`` means; nothing is connected.

    Raises:
        PolicyError: A part cannot be understood, an option is unknown, or two parts contradict each other.
    """
    scheme = url.partition(":")[0].lower()
    chunks = _chunks(url, scheme)
    options = _options(scheme, chunks)
    own = {name: options.pop(name) for name in _OF_THE_STORE & options.keys()}
    if own.get("wait_timeout", 0) >= options["socket_timeout"]:
        raise _unusable(scheme, "wait_timeout must be less than socket_timeout (both in seconds; 3 by default)")
    if scheme in _SOCKET:
        path = unquote(chunks[0].path)
        if not path.strip("/"):
            raise _unusable(scheme, "write the path of the socket after three slashes")
        return Target(
            name=f"{scheme}://{path}",
            connect=partial(_server, unix_socket_path=path, **options),
            options=own,
        )
    nodes = [_node(scheme, each) for each in chunks]
    name = f"{scheme}://{';'.join(f'{host}:{port}' for host, port in nodes)}"
    if scheme in _CLUSTER:
        return Target(name=name, connect=partial(_cluster, nodes, **options), options=own)
    name += f"/{options['db']}"
    if scheme == "sentinel":
        if "master_name" not in options:
            raise _unusable(scheme, "name the group of servers by ?master_name=")
        name += f"?master_name={options['master_name']}"
        return Target(name=name, connect=partial(_primary, nodes, **options), options=own)
    ((host, port),) = nodes
    return Target(name=name, connect=partial(_server, host=host, port=port, **options), options=own)


def _server(**options: Any) -> Client:
    return redis.Redis(retry=_retry(), **options)


def _cluster(nodes: list[tuple[str, int]], **options: Any) -> Client:
    return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in nodes], retry=_retry(), **options)


def _primary(
    nodes: list[tuple[str, int]],
    *,
    master_name: str,
    min_other_sentinels: int = 0,
    sentinel_username: str | None = None,
    sentinel_password: str | None = None,
    sentinel_ssl: bool = False,
    **options: Any,
) -> Client:
    if any(name.startswith("ssl_") for name in options):
        options["ssl"] = True
    shared = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_", "protocol"))}
    sentinels = Sentinel(
        nodes,
        min_other_sentinels=min_other_sentinels,
        sentinel_kwargs={
            **{name: value for name, value in shared.items() if sentinel_ssl or not name.startswith("ssl_")},
            "ssl": sentinel_ssl,
            "username": sentinel_username,
            "password": sentinel_password,
            "retry": Retry(NoBackoff(), 0),  # the next sentinel is asked instead
        },
        **options,
    )
    client: Client = sentinels.master_for(master_name, retry=_retry())
    return client


def _retry() -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RESENDS)


def _chunks(url: str, scheme: str) -> list[SplitResult]:
    """The servers of the URL, each as a URL of its own; the scheme need not be repeated."""
    rest = url.partition("://")[2]
    texts = rest.split(";") if scheme in _SEVERAL else [rest]
    try:
        return [urlsplit(f"{scheme}://{text.removeprefix(f'{scheme}://')}") for text in texts]
    except ValueError as error:
        raise _unusable(scheme, f"{error}; write special characters of a password as %xx") from None


def _node(scheme: str, chunk: SplitResult) -> tuple[str, int]:
    try:
        port = chunk.port
    except ValueError as error:
        raise _unusable(scheme, f"{error}; several servers need sentinel:// or redis+cluster://") from None
    if not chunk.hostname:
        raise _unusable(scheme, "write a host after the two slashes")
    return chunk.hostname, port or (26379 if scheme == "sentinel" else 6379)


def _options(scheme: str, chunks: list[SplitResult]) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for name, text in (pair for chunk in chunks for pair in _pairs(scheme, chunk)):
        if texts.setdefault(name, text) != text:
            raise _unusable(scheme, f"{name} is given twice, and differently")
    if scheme in _CLUSTER and texts.get("db") == "0":
        del texts["db"]
    known = _known(scheme)
    unknown = texts.keys() - known
    if unknown:
        remedy = "; TLS needs rediss:// or rediss+cluster://" if unknown & _PARSERS_OF_TLS.keys() else ""
        raise _unusable(scheme, f"knows no option {', '.join(sorted(unknown))}{remedy}; there are: {', '.join(known)}")
    options = {**_LIMITS, **{name: _parsed(scheme, name, text, known[name]) for name, text in texts.items()}}
    if "credential_provider" in options and {"username", "password"} & options.keys():
        raise _unusable(scheme, "credential_provider brings user and password; drop those from the URL")
    if scheme not in _CLUSTER:
        options.setdefault("db", 0)
    if scheme in _TLS:
        options["ssl"] = True
    # The newer protocol has nothing that is used here, and greets at greater length.
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


def _known(scheme: str) -> dict[str, Callable[[str], Any]]:
    known = dict(_PARSERS)
    if scheme not in _CLUSTER:
        known["db"] = _whole
    if scheme in _TLS or scheme == "sentinel":
        known |= _PARSERS_OF_TLS
    if scheme == "sentinel":
        known |= _PARSERS_OF_SENTINEL
    return known


def _parsed(scheme: str, name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (ValueError, ImportError, AttributeError) as error:
        raise _unusable(scheme, f"{name}={text!r} cannot be used: {error}") from None


def _unusable(scheme: str, remedy: str) -> PolicyError:
    return PolicyError("idempotency_store", f"'{scheme}://...'", remedy)


def _text(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("it must not be negative")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError("write seconds, more than 0")
    return seconds


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(f"write one of {', '.join(_FLAGS)}")
    return _FLAGS[text.lower()]


_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _certificate_demand(text: str) -> str:
    demand = text.removeprefix("CERT_").lower()
    if demand not in {"required", "optional", "none"}:
        raise ValueError("write required, optional or none")
    return demand


def _provider(text: str) -> CredentialProvider:
    provider = resolve_name(text)()
    if not isinstance(provider, CredentialProvider):
        raise ValueError("it names no redis.CredentialProvider")
    return provider


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "prefix": _text,
    "wait_replicas": _whole,
    "wait_timeout": _seconds,
    "username": _text,
    "password": _text,
    "credential_provider": _provider,
    "client_name": _text,
    "socket_connect_timeout": _seconds,
    "socket_timeout": _seconds,
    "max_connections": _whole,
}
_OF_THE_STORE = frozenset({"prefix", "wait_replicas", "wait_timeout"})
_PARSERS_OF_TLS: Mapping[str, Callable[[str], Any]] = {
    "ssl_cert_reqs": _certificate_demand,
    "ssl_ca_certs": _text,
    "ssl_ca_path": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_password": _text,
    "ssl_check_hostname": _flag,
}
_PARSERS_OF_SENTINEL: Mapping[str, Callable[[str], Any]] = {
    "master_name": _text,
    "min_other_sentinels": _whole,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "sentinel_ssl": _flag,
}
