"""Redis and Valkey: one script per swap, one round trip, one hash per record.

The script compares, writes, and answers with what is stored and with the server's clock. The driver sends again
after a lost reply; the script then recognises the record that it has written, and leaves it as it is.

By default, Redis acknowledges a write before it is on disk or on a replica, and a fail-over can forget what was
acknowledged. ``verify`` warns of settings that lose writes; ``docs/how-to/redis.md`` says what remains.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, Self, TypeVar, Unpack, cast
from uuid import uuid4

import redis
from redis.cluster import RedisCluster
from redis.exceptions import AskError, ClusterDownError, NoScriptError, RedisError, ResponseError, SlotNotCoveredError

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import ANY_TEXT
from celery_idempotent.protocol.record import BLANK, Record, Status
from celery_idempotent.protocol.store import Wanted
from celery_idempotent.stores import readable
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.stores.failures import (
    UNENCRYPTED,
    UNVERIFIED,
    Meaning,
    failure,
    leaves_machine,
    warn_if_exposed,
    warn_of_losses,
    weakness_of,
)
from celery_idempotent.stores.forks import PerProcess
from celery_idempotent.stores.redis.client import (
    DRIVER_ERRORS,
    WAIT_TIMEOUT,
    Client,
    DirectClient,
    read_url,
    trouble_of,
)
from celery_idempotent.stores.redis.hashes import fields_of, pages, primaries, raised, record_of, text_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_SCRIPT = files(__package__).joinpath("swap.lua").read_bytes()
_SCRIPT_SHA = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest().encode()

_KEYS_TO_CHOOSE_FROM = 500
"""So many that, of fifty primaries, one gets none of them in one check out of five hundred."""

_REDIRECTIONS = 3
"""In a cluster, before a slot that is being moved counts as unavailable."""

_MOVED = (AskError, ClusterDownError, SlotNotCoveredError, redis.ConnectionError, redis.TimeoutError)
"""How a cluster's node says that it does not serve a slot, or no longer says anything; MovedError is an AskError."""


class RedisStore:
    """Records in Redis (6.2 or later) or Valkey: one server, the primary that sentinels name, or a cluster.

    A record is a hash whose fields are those of :class:`~celery_idempotent.protocol.record.Record`, so that
    ``redis-cli hgetall`` shows it. Only outcomes expire, and the server forgets them by itself.

    Args:
        client: A function that makes a redis-py client, called once per process; or a client, which is used
            in every process (redis-py's pools notice a fork). Its timeouts and resends are yours; without
            ``decode_responses``.
        prefix: What every key of ours begins with. An ACL needs it, and so do two apps that share a database.
        wait_replicas: How many replicas must have a record before a swap counts as certain; 0: none.
        wait_timeout: Seconds to wait for them, less than the client's ``socket_timeout``. Fewer in that time
            are ``StoreUnavailable``: the record is written, but could be forgotten in a fail-over. A claim is given
            back then.
        name: What errors and logs call the store; without credentials.

    Raises:
        PolicyError: An option cannot be used.
    """

    def __init__(
        self,
        client: Client | Callable[[], Client],
        *,
        prefix: str = "celery-idempotent:",
        wait_replicas: int = 0,
        wait_timeout: float = WAIT_TIMEOUT,
        name: str | None = None,
    ) -> None:
        if not prefix:
            raise PolicyError("prefix", repr(prefix), "without one, every key of the database would be taken for ours")
        if wait_replicas < 0:
            raise PolicyError("wait_replicas", repr(wait_replicas), "write a number of replicas, or 0 for none")
        if not 0.001 <= wait_timeout <= 60:
            raise PolicyError("wait_timeout", repr(wait_timeout), "write seconds, from 0.001 to 60")
        self._given = client
        self._prefix = prefix
        self._wait_replicas = wait_replicas
        self._wait_timeout = wait_timeout
        self._name = name or "redis://(a client of your own)"
        self._clock = ServerClock(self._ask_time)
        # Not alone: a cluster's client connects at once, and in an outage each would wait for those before it.
        self._connected = PerProcess(self._new_client, alone=False)
        if callable(client):
            return
        problem = _unfit(client)
        if not problem and isinstance(client, redis.Redis) and client.connection is not None:
            problem = "has a single connection, which must not cross a fork; pass a function that makes it"
        if problem:
            raise PolicyError("client", type(client).__name__, problem)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that a URL names: see ``docs/how-to/redis.md``.

        Raises:
            PolicyError: The URL cannot be used; the message names the part and the remedy.
        """
        target = read_url(url)
        return cls(target.connect, name=target.name, **target.options)

    def __repr__(self) -> str:
        return self._name

    @property
    def way(self) -> str:
        """For people: the path that writes take, once the first has been made, as by :meth:`verify`."""
        # WAIT must follow on the same connection.
        is_direct = isinstance(self._connected.made(), DirectClient) and not self._wait_replicas
        return "on the direct path" if is_direct else "through redis-py's execute_command"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._swap("swap", new, expected)

    def _swap(self, operation: str, new: Record, expected: str | None) -> Record | None:
        forget_at = b"" if new.expires_at is None else b"%d" % (new.expires_at * 1000)
        written, stored = self._run(operation, new.key, expected or "", new.revision, forget_at, *fields_of(new))
        if stored:
            return record_of(new.key, stored, store=self._name)
        return new if written else None

    def get(self, key: str) -> Record | None:
        stored = self._ask("get", lambda client: client.hgetall(self._redis_key(key)))
        return record_of(key, cast(dict[bytes, bytes], stored), store=self._name) if stored else None

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`. While the server resizes, it may list a record twice."""
        exact = [(name, wanted.get(name)) for name in ("status", "task", "label")]

        def read(found: tuple[bytes, Mapping[bytes, bytes] | ResponseError]) -> Record | None:
            name, stored = found
            if isinstance(stored, ResponseError):
                raise self._failure("read", stored) from stored
            key = text_of(name).removeprefix(self._prefix)
            return record_of(key, stored, store=self._name) if stored else None  # deleted since

        found, left = self._ask("scan", lambda client: pages(client, self._redis_key(""), wanted)), wanted.get("oldest")
        while left != 0 and (page := self._ask("scan", lambda client: next(found, None))) is not None:
            for record in readable(page, read, lambda each: text_of(each[0])):
                # It may have changed since it was found.
                if all(each in (None, getattr(record, name)) for name, each in exact):
                    left = left and left - 1
                    yield record

    def reads_all(self, **wanted: Unpack[Wanted]) -> bool:
        """See :meth:`celery_idempotent.stores.IndexedStore.reads_all`."""
        return True

    def delete(self, key: str, expected: str) -> bool:
        deleted, _ = self._run("delete", key, expected, "", b"")
        return deleted

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`; the server's ``TIME``, which every swap's reply tells."""
        return self._clock.now()

    def provision(self) -> None:
        """There is nothing to create; this checks as :meth:`verify` does."""
        self.verify()

    def verify(self) -> None:
        """Claim a key of its own and complete it, already expired.

        Nothing of it remains. Then warn if the server can lose writes, or if others can read them. Warnings are
        :class:`~celery_idempotent.errors.IdempotencyWarning`.

        Raises:
            StoreMisconfigured: Login, permission, or a server that cannot be written; the message says which.
            StoreUnavailable: The server did not answer, has no memory left, or is still loading.
        """
        for key in self._ask("verify", self._keys_to_check):
            self._ask("verify", partial(_prove_permissions, name=self._redis_key(key)))
            claimed = BLANK.but(
                key=key,
                status=Status.COMPLETED,
                revision=uuid4().hex,
                owner=key,
                task="celery_idempotent.verify",
                task_id=key,
                error="a check of the store at a worker's start, forgotten in seconds",
                expires_at=self.now() // 1000 + 10,
            )
            self._swap("verify", claimed, None)
            self._swap("verify", claimed.but(revision=uuid4().hex, error=None, expires_at=1), claimed.revision)
        self._warn_of_losses()
        self._warn_of_exposure()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`; a client given by you stays open."""
        client = self._connected.forget()
        if client is not None and client is not self._given:
            client.close()

    def _keys_to_check(self, client: Client) -> Sequence[str]:
        """Keys that nobody else has: one, and in a cluster, as far as chance leads there, one on every primary."""
        keys = [f"celery_idempotent.verify:{uuid4().hex}" for _ in range(_KEYS_TO_CHOOSE_FROM)]
        if isinstance(client, redis.Redis):
            return keys[:1]
        return list({client.get_node_from_key(self._redis_key(key)).name: key for key in keys}.values())

    def _run(
        self, operation: str, key: str, expected: str, revision: str, forget_at: bytes, *fields: bytes
    ) -> tuple[bool, Mapping[bytes, bytes]]:
        """What the script did: whether ``revision`` is stored, and what is, unless it has just been written."""
        arguments = (self._redis_key(key), expected.encode(*ANY_TEXT), revision.encode(*ANY_TEXT), forget_at, *fields)
        asked_at = self._clock.before_asking()
        now, written, *stored = self._ask(operation, lambda client: self._call(client, *arguments))
        self._clock.learn(now, asked_at)
        if not stored:
            return bool(written), {}
        fields = iter(stored[0])
        return bool(written), dict(zip(fields, fields, strict=True))

    def _call(self, client: Client, *arguments: Any) -> Any:
        # hiredis 3.5 crashes the process where a signal's handler raises while it writes a number; a cluster's client
        # counts the keys by it, before hiredis sees it.
        keys: Any = 1 if isinstance(client, RedisCluster) else b"1"
        try:
            return self._send(client, "EVALSHA", _SCRIPT_SHA, keys, *arguments)
        except NoScriptError:
            return self._send(client, "EVAL", _SCRIPT, keys, *arguments)

    def _send(self, client: Client, name: str, *arguments: Any) -> Any:
        if not self._wait_replicas:
            if isinstance(client, DirectClient):
                return client.ask(name.encode(), *arguments)
            return cast(Any, client).execute_command(name, *arguments)
        if isinstance(client, redis.Redis):
            return self._awaited(client, name, *arguments)
        for _ in range(_REDIRECTIONS):
            try:
                node = client.get_node_from_key(arguments[2])
                return self._awaited(client.get_redis_connection(node), name, *arguments)
            except _MOVED:
                # The driver finds out where the slot is now, and writes there without waiting. The next turn
                # writes the same once more, and waits.
                cast(Any, client).execute_command(name, *arguments)
        raise redis.ConnectionError(f"the record's slot is still being moved after {_REDIRECTIONS} redirections")

    def _awaited(self, server: redis.Redis, *command: Any) -> Any:
        """The reply, once enough replicas have what was written; WAIT is about the connection that wrote."""
        with server.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*command)
            pipeline.execute_command("WAIT", str(self._wait_replicas), str(round(self._wait_timeout * 1000)))
            # Raised by the pipeline itself, an error would quote the request.
            reply, acknowledged = raised(pipeline.execute(raise_on_error=False))
        _, written, *_ = reply
        if written and acknowledged < self._wait_replicas:
            have = f"{acknowledged} of {self._wait_replicas} replicas have the record"
            raise _TooFewReplicas(f"{have} after {self._wait_timeout:g} s")
        return reply

    def _ask(self, operation: str, call: Callable[[Client], _T]) -> _T:
        try:
            return call(self._connected())
        except DRIVER_ERRORS as error:
            raise self._failure(operation, error) from error
        except BaseException:
            # Of somebody else's, such as a soft time limit. Where it strikes while redis-py connects, the pool keeps a
            # connection that is not logged in, or would write to another database.
            self._drop_idle_connections()
            raise

    def _ask_time(self) -> int:
        seconds, microseconds = self._ask("time query", lambda client: client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _new_client(self) -> Client:
        if not callable(self._given):
            return self._given
        client = self._given()
        if problem := _unfit(client):
            raise StoreMisconfigured(self._name, "connect", f"the client made by your function {problem}")
        return client

    def _redis_key(self, key: str) -> bytes:
        return (self._prefix + key).encode(*ANY_TEXT)

    def _failure(self, operation: str, error: BaseException) -> Exception:
        trouble, is_stored = trouble_of(error), isinstance(error, _TooFewReplicas)
        if trouble.meaning is Meaning.READ_ONLY or is_stored:
            self._drop_idle_connections()
        # Not the arguments that a server quotes of a command unknown to it.
        reason = str(error).partition(", with args")[0] or type(error).__name__
        found = failure(trouble, self._name, operation, reason)
        if isinstance(found, StoreUnavailable):
            found.is_stored = is_stored
        return found

    def _drop_idle_connections(self) -> None:
        # A primary that was demoted, or knows nothing of it yet and has lost its replicas, keeps its connections. A new
        # connection finds its successor behind the name.
        client = self._connected.made()
        if isinstance(client, DirectClient):
            client.drop()
            return
        for server in primaries(client) if client is not None else ():
            server.connection_pool.disconnect(inuse_connections=False)

    def _warn_of_losses(self) -> None:
        losses: set[str] = set()
        silent: set[str] = set()

        def told(command: str, ask: Callable[[], Mapping[Any, Any]]) -> Mapping[str, Any]:
            try:
                return self._ask("verify", lambda client: ask())
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, ResponseError):
                    raise
                silent.add(command)
                return {}

        for server in primaries(self._connected()):
            info = told("INFO", server.info)
            fsync = told("CONFIG GET", partial(server.config_get, "*appendfsync*"))
            losses.update(_losses_of(info, fsync, self._wait_replicas))
        if silent:
            reason = f"{self!r} refuses {' and '.join(sorted(silent))}, so its settings were not all checked"
            say(logger.warning, "store_unchecked", reason=reason)
        warn_of_losses(self._name, " ".join(sorted(losses)))

    def _warn_of_exposure(self) -> None:
        found = {self._ask("verify", partial(_weakness, server)) for server in primaries(self._connected())}
        worst = next(each for each in (UNENCRYPTED, UNVERIFIED, "") if each in found)
        remedy = "write rediss:// or rediss+cluster://, and name the authority by ssl_ca_certs"
        warn_if_exposed(self._name, worst, remedy)


class _TooFewReplicas(RedisError):
    pass


def _unfit(client: object) -> str:
    if not isinstance(client, redis.Redis | RedisCluster):
        return "is neither a redis.Redis nor a redis.RedisCluster"
    if client.get_encoder().decode_responses:
        return "decodes replies, but results can be bytes; make it without decode_responses"
    return ""


def _prove_permissions(client: Client, name: bytes) -> None:
    """Do what does nothing where there is no key: a refusal then names its command, and no check is left half done."""
    with client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command("EVAL", "return 1", 1, name)  # as long as the script is known, only EVALSHA is used
        pipeline.hgetall(name)
        pipeline.hdel(name, b"")
        pipeline.persist(name)
        pipeline.pexpireat(name, 1)
        raised(pipeline.execute(raise_on_error=False))


def _losses_of(info: Mapping[str, Any], fsync: Mapping[str, Any], wait_replicas: int) -> Iterator[str]:
    """What a server's ``INFO`` and its ``CONFIG`` of fsync say that it may forget, and what to set instead."""
    if info.get("aof_enabled") == 0:
        yield "appendonly is no: a restart forgets; set appendonly yes and appendfsync always."
    else:
        when = fsync.get("appendfsync", "always")
        if when != "always":
            yield f"appendfsync is {when}: a power failure forgets the last second or more; set appendfsync always."
        if fsync.get("no-appendfsync-on-rewrite", "no") != "no":
            yield "no-appendfsync-on-rewrite is yes: a power failure during a rewrite forgets; set it to no."
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        yield f"maxmemory-policy is {policy}: a full memory evicts records; set maxmemory-policy noeviction."
    if info.get("connected_slaves") and not wait_replicas:
        yield (
            "Replicas are attached and none is waited for: a fail-over forgets what they did not have yet; "
            "add wait_replicas=1 to the URL."
        )


def _weakness(server: redis.Redis, client: Client) -> str:
    """What is weak about a connection to ``server`` on another machine; empty if nothing is."""
    # Not server.client(), which makes another of the user's own class.
    with redis.Redis(connection_pool=server.connection_pool, single_connection_client=True) as single:
        link: Any = getattr(single.connection, "_sock", None)
        return weakness_of(link) if link is not None and leaves_machine(link.fileno()) else ""
