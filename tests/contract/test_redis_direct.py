"""The short way of a swap to one server: what it must not lose of what redis-py does."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.credentials import CredentialProvider
from redis.retry import Retry

from celery_idempotent.stores.redis.client import DirectClient, _pack, read_url
from celery_idempotent.stores.redis.store import RedisStore
from lab.embedded.redis import EmbeddedRedis
from tests.support.redis_servers import HOST, administrator, opened


class Struck(Exception):
    """Raised by a signal, as a soft time limit is."""


def _strike(*_: Any, **__: Any) -> Any:
    raise Struck


class ShortLived(CredentialProvider):
    """Credentials that redis-py asks for again and again."""

    def get_credentials(self) -> tuple[str]:
        """No password."""
        return ("",)


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


def _all(client: DirectClient, *said: bytes) -> list[Any]:
    return client.ask_all([(b"ECHO", each) for each in said])


each_way = pytest.mark.parametrize("ask", [_one, _all], ids=["one by one", "all at once"])


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_command_is_packed_as_redis_py_packs_it(command: list[bytes]) -> None:
    """The wire sees no difference between the two ways."""
    assert _pack([b"EVALSHA", *command]) == b"".join(Connection().pack_command(b"EVALSHA", *command))


def test_calls_of_one_thread_share_a_connection(client: DirectClient) -> None:
    """Also after an error of the server's, a reply like any other, as that a script is not known yet."""
    before = _connection_id(client)
    with pytest.raises(redis.ResponseError):
        client.ask(b"EVALSHA", b"0" * 40, b"0")
    assert _connection_id(client) == before


def test_reply_that_nobody_waited_for_goes_to_nobody(client: DirectClient, redis_server: EmbeddedRedis) -> None:
    """A time limit that strikes between request and reply closes the connection: the next would read the old reply."""
    previous = signal.signal(signal.SIGALRM, _strike)
    with administrator(redis_server) as other:
        other.client_pause(60_000, all=False)  # writes only, or nobody could end it
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Struck):
                client.ask(b"INCR", b"number")
        finally:
            signal.signal(signal.SIGALRM, previous)
            other.client_unpause()
    assert client.ask(b"ECHO", b"two") == b"two"


@each_way
def test_strike_before_a_reply_is_read_leaves_neither_reply_nor_place(
    single: DirectClient, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., list[Any]]
) -> None:
    """redis-py closes a connection where the strike hits while it reads; in the moment before, nobody else would."""
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "read_response", _strike)
        with pytest.raises(Struck):
            ask(single, b"one", b"two")
    assert ask(single, b"three") == [b"three"]


@each_way
@pytest.mark.parametrize("error", [redis.ConnectionError, redis.TimeoutError])
def test_reply_that_came_too_late_goes_to_nobody(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., list[Any]], error: type[Exception]
) -> None:
    """All is sent again by a new connection: by the old one, each reply from now on would be the one before."""
    read, lost = Connection.read_response, iter([False, True])

    def once(connection: Any, *arguments: Any, **options: Any) -> Any:
        if next(lost, False):
            raise error
        return read(connection, *arguments, **options)

    monkeypatch.setattr(Connection, "read_response", once)
    assert ask(client, b"one", b"two", b"three") == [b"one", b"two", b"three"]


def test_dropped_connections_are_closed_and_leave_their_place(single: DirectClient) -> None:
    """After a fail-over the name leads elsewhere, and an old connection to the replica that was the primary."""
    before = _connection_id(single)
    single.drop()
    assert _connection_id(single) != before


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
            _strike()
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


@pytest.mark.parametrize(
    ("given", "is_direct"),
    [
        ("", True),
        ("?wait_replicas=1", False),  # WAIT must follow on the same connection
        (f"?credential_provider={__name__}:ShortLived", False),  # the pool renews a login between two commands
        (None, False),
    ],
)
def test_store_says_which_way_its_writes_go(redis_server: EmbeddedRedis, given: str | None, is_direct: bool) -> None:
    """People who miss the writes in their traces look there."""
    url = redis_server.url
    store = RedisStore(lambda: redis.Redis.from_url(url)) if given is None else RedisStore.from_url(url + given)
    if given != "?wait_replicas=1":
        store._connected()
    assert store.way == ("on the direct path" if is_direct else "through redis-py's execute_command")
    store.close()
