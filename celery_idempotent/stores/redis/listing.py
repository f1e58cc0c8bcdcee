"""Finding few records among many: of a page of names, only those that may be meant are read whole."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import redis
from redis.exceptions import AskError, ResponseError

from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.redis.checks import raised
from celery_idempotent.stores.redis.direct import DirectClient
from celery_idempotent.stores.redis.errors import OTHER_TYPE, trouble_of
from celery_idempotent.stores.redis.hashes import encoded
from celery_idempotent.stores.redis.url import Client

_PAGE = 500
"""Records that a scan asks about in one round trip."""

_KNOWN = frozenset(str(each).encode() for each in Status)


@dataclass(frozen=True, slots=True)
class Source:
    """A server that has records.

    Args:
        client: Where they are read.
        server: Where their fields are asked for.
        names: All their names there.
    """

    client: Client
    server: redis.Redis
    names: Iterator[bytes]

    def page(self, wanted: Mapping[str, str]) -> Sequence[tuple[bytes, Any]] | None:
        """The next names with their hashes, or the error that says why one is none; None: that was all.

        Args:
            wanted: By field, the value that it must have to be meant; what certainly has another is left out.
        """
        names = list(islice(self.names, _PAGE))
        if not names:
            return None
        meant = self._candidates(names, wanted) if wanted else names
        return list(zip(meant, _read(self.client, meant), strict=True))

    def _candidates(self, names: Sequence[bytes], wanted: Mapping[str, str]) -> Sequence[bytes]:
        """Those that may be meant, among them whatever is of no known status, and what has moved to another server."""
        fields = b"status", *map(str.encode, wanted)
        replies = _about_records(_asked(self.server, names, fields), AskError)
        values = [encoded(each) for each in wanted.values()]
        return [name for name, reply in zip(names, replies, strict=True) if _may_be(reply, values)]


def sources(client: Client, pattern: bytes) -> Sequence[Source]:
    """The servers of ``client``, each with the names there that match ``pattern``.

    A cluster's are asked one by one: the pipeline of its client takes three times as long.
    """
    if isinstance(client, redis.Redis):
        return [Source(client, client, client.scan_iter(match=pattern, count=_PAGE))]
    return [
        Source(
            client,
            client.get_redis_connection(node),
            client.scan_iter(match=pattern, count=_PAGE, target_nodes=node),
        )
        for node in client.get_primaries()
    ]


def _read(client: Client, names: Sequence[bytes]) -> Sequence[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(name)
        return _about_records(pipeline.execute(raise_on_error=False))


def _asked(server: redis.Redis, names: Sequence[bytes], fields: Sequence[bytes]) -> Sequence[Any]:
    if isinstance(server, DirectClient):
        return server.ask_all([(b"HMGET", name, *fields) for name in names])
    with server.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hmget(name, fields)
        return cast(Sequence[Any], pipeline.execute(raise_on_error=False))


def _about_records(replies: Sequence[Any], *expected: type[Exception]) -> Sequence[Any]:
    """The replies, among them what is said of a name that is no hash, and ``expected`` errors; others are raised."""
    raised([each for each in replies if not isinstance(each, expected) and not _is_of_other_type(each)])
    return replies


def _is_of_other_type(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and trouble_of(reply) is OTHER_TYPE


def _may_be(reply: Any, values: Sequence[bytes]) -> bool:
    if isinstance(reply, ResponseError):
        return True
    status, *found = reply
    return status not in _KNOWN or [each or b"" for each in found] == values
