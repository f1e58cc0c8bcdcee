"""The short way of a swap to one server: what it must not lose of what redis-py does."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from threading import Barrier, Thread
from typing import Any, cast

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
from celery_idempotent.testing.contract import a_record
from lab.embedded.redis import EmbeddedRedis
from tests.support.redis_servers import HOST


class Struck(Exception):
    """Raised by a signal, as a soft time limit is."""


class ShortLived(CredentialProvider):
    """Credentials that redis-py asks for again and again."""

    def get_credentials(self) -> tuple[str]:
        """No password."""
        return ("",)


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[DirectClient]:
    """What a URL of one server gives."""
    made = read_url(redis_server.url).connect()
    assert isinstance(made, DirectClient)
    yield made
    made.close()


def _connection_id(client: DirectClient) -> Any:
    return client.ask(b"CLIENT", b"ID")


@pytest.fixture
def single(redis_server: EmbeddedRedis) -> Iterator[DirectClient]:
    """A client whose pool has room for one connection: whoever keeps that one leaves none."""
    made = DirectClient(resends=Retry(NoBackoff(), 1), host=HOST, port=redis_server.port, max_connections=1, protocol=2)
    yield made
    made.close()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_command_is_packed_as_redis_py_packs_it(command: list[bytes]) -> None:
    """The wire sees no difference between the two ways."""
    assert _pack([b"EVALSHA", *command]) == b"".join(Connection().pack_command(b"EVALSHA", *command))


def test_calls_of_one_thread_share_a_connection(client: DirectClient) -> None:
    """Otherwise every swap would connect anew."""
    assert _connection_id(client) == _connection_id(client)


def test_an_error_of_the_server_keeps_the_connection(client: DirectClient) -> None:
    """It is a reply like any other, as that a script is not known yet."""
    before = _connection_id(client)
    with pytest.raises(redis.ResponseError):
        client.ask(b"EVALSHA", b"0" * 40, b"0")
    assert _connection_id(client) == before


def test_threads_never_share_a_connection(client: DirectClient, redis_server: EmbeddedRedis) -> None:
    """Each gets the reply to its own command, however they interleave."""
    together, wrong = Barrier(4), list[bytes]()

    def talk(name: bytes) -> None:
        together.wait()
        for number in range(200):
            said = b"%s%d" % (name, number)
            wrong.extend({client.ask(b"ECHO", said)} - {said})

    threads = [Thread(target=talk, args=(name,)) for name in (b"a", b"b", b"c", b"d")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_reply_that_nobody_waited_for_goes_to_nobody(client: DirectClient, redis_server: EmbeddedRedis) -> None:
    """A time limit that strikes between request and reply closes the connection: the next would read the old reply."""
    other = redis.Redis.from_url(redis_server.url)
    client.ask(b"ECHO", b"warm")
    other.client_pause(60_000, all=False)  # writes only, or nobody could end it
    previous = signal.signal(signal.SIGALRM, _strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Struck):
            client.ask(b"INCR", b"number")
    finally:
        signal.signal(signal.SIGALRM, previous)
        other.client_unpause()
        other.close()
    assert client.ask(b"ECHO", b"two") == b"two"


def test_strike_before_the_reply_is_read_closes_the_connection(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py closes it where the strike hits while it reads; in the moment before, nobody else would."""
    client.ask(b"ECHO", b"warm")
    (connection,) = client._in_hand
    with monkeypatch.context() as patched:
        patched.setattr(connection, "read_response", lambda: _strike(0, None))
        with pytest.raises(Struck):
            client.ask(b"ECHO", b"one")
    assert client.ask(b"ECHO", b"two") == b"two"


def test_request_that_was_struck_leaves_its_place_in_the_pool(
    single: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise so many time limits would use up all connections that a process may open."""
    single.ask(b"ECHO", b"warm")
    (connection,) = single._in_hand
    with monkeypatch.context() as patched:
        patched.setattr(connection, "read_response", lambda: _strike(0, None))
        with pytest.raises(Struck):
            single.ask(b"ECHO", b"one")
    assert single.ask(b"ECHO", b"two") == b"two"


def test_reply_that_came_too_late_goes_to_nobody(client: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is sent again by a new connection: by the old one, each reply from now on would be the one before."""
    client.ask(b"ECHO", b"warm")
    (connection,) = client._in_hand
    read = connection.read_response

    def too_late() -> None:
        monkeypatch.setattr(connection, "read_response", read)
        raise redis.TimeoutError

    monkeypatch.setattr(connection, "read_response", too_late)
    assert [client.ask(b"ECHO", said) for said in (b"one", b"two")] == [b"one", b"two"]


def test_lost_request_is_sent_as_often_as_by_redis_py(client: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways give up at the same time, well within a lease."""
    client.ask(b"PING")
    client.ping()
    sent: list[str] = []

    def lose(way: str) -> None:
        sent.append(way)
        raise redis.ConnectionError

    for way, request in (("ours", partial(client.ask, b"PING")), ("redis-py's", client.ping)):
        monkeypatch.setattr(Connection, "send_packed_command", lambda *args, way=way, **options: lose(way))
        with pytest.raises(redis.ConnectionError):
            request()
    assert sent == ["ours"] * 3 + ["redis-py's"] * 3


def test_dropped_connection_leaves_its_place_in_the_pool(single: DirectClient) -> None:
    """Each fail-over would otherwise take some of the connections that a process may open."""
    single.ask(b"PING")
    single.drop()
    assert single.ask(b"PING") == b"PONG"


def test_dropped_connections_are_closed(client: DirectClient) -> None:
    """After a fail-over the name leads elsewhere, and an old connection to the replica that was the primary."""
    client.ping()
    before = _connection_id(client)
    client.drop()
    assert _connection_id(client) != before


def test_dropping_never_fails_where_another_thread_takes_the_last_connection(client: DirectClient) -> None:
    """In a fail-over all threads drop at once, and a delivery that failed of that would be lost."""

    class Raced(list[Any]):
        """A list whose last item another thread takes between a look and a ``pop``."""

        def __len__(self) -> int:
            return 1

    client._in_hand = Raced()
    client.drop()


def test_one_connection_is_enough_for_all_commands(redis_server: EmbeddedRedis) -> None:
    """``max_connections`` may be the number of threads: what is in hand is left to the command that comes next."""
    client = read_url(f"{redis_server.url}?max_connections=1").connect()
    assert isinstance(client, DirectClient)
    for _ in range(2):
        assert client.ask(b"ECHO", b"swap") == b"swap"
        assert client.ping()
        with client.pipeline(transaction=False) as several:
            assert several.ping().execute() == [True]
    client.close()


def test_strike_while_a_connection_is_made_leaves_none_to_another_database(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py's pool keeps a connection that has not chosen its database yet, and takes it for ready."""
    url = redis_server.url.removesuffix("/0") + "/1"
    store, send = RedisStore.from_url(url), cast(Any, Connection).send_command

    def struck(self: Connection, *arguments: Any, **options: Any) -> None:
        if arguments[0] == "SELECT":
            _strike(0, None)
        send(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "send_command", struck)
        with pytest.raises(Struck):
            store.get("k")
    client = store._connected()
    assert isinstance(client, DirectClient)
    client.ask(b"SET", b"written", b"")
    with redis.Redis.from_url(url) as other:
        assert other.exists("written")
    store.close()


def test_closed_client_leaves_no_connection(client: DirectClient, redis_server: EmbeddedRedis) -> None:
    """``close()`` closes those in hand, too."""
    connection = str(_connection_id(client))
    client.close()
    with redis.Redis.from_url(redis_server.url) as other:
        assert connection not in {each["id"] for each in other.client_list()}


def test_lost_connection_is_replaced_at_once(client: DirectClient, redis_server: EmbeddedRedis) -> None:
    """A server that closes idle connections fails no request."""
    with redis.Redis.from_url(redis_server.url) as other:
        other.client_kill_filter(_id=str(_connection_id(client)))
    assert client.ask(b"ECHO", b"still") == b"still"


def test_server_that_is_gone_is_told_as_redis_py_tells_it() -> None:
    """The error is redis-py's own, so it has one meaning on both ways."""
    with EmbeddedRedis() as brief:
        client = read_url(brief.url).connect()
        assert isinstance(client, DirectClient)
        client.ask(b"PING")
    with pytest.raises(redis.ConnectionError):
        client.ask(b"PING")
    client.close()


def test_credentials_that_end_keep_redis_pys_way(redis_server: EmbeddedRedis) -> None:
    """redis-py's pool renews a login between two commands, and no connection in hand would hear of it."""
    url = f"{redis_server.url}?credential_provider={__name__}:ShortLived"
    client = read_url(url).connect()
    with suppress(redis.RedisError):
        client.close()
    assert type(client) is redis.Redis


def test_store_says_which_way_its_writes_go(redis_server: EmbeddedRedis) -> None:
    """People who miss the writes in their traces look there."""
    stores = {
        "on the direct path": RedisStore.from_url(redis_server.url),
        "through redis-py's execute_command": RedisStore(lambda: redis.Redis.from_url(redis_server.url)),
    }
    for way, store in stores.items():
        store.swap(a_record(), None)
        assert store.way == way
        store.close()
    assert RedisStore.from_url(f"{redis_server.url}?wait_replicas=1").way == "through redis-py's execute_command"


def _strike(signum: int, frame: object) -> None:
    raise Struck


def test_many_questions_leave_at_once_and_errors_are_answers(client: DirectClient) -> None:
    """One that the server refuses hides none of the others."""
    one, refused, two = client.ask_all([(b"ECHO", b"one"), (b"NOSUCH",), (b"ECHO", b"two")])

    assert (one, type(refused), two) == (b"one", redis.ResponseError, b"two")


def test_strike_among_many_replies_closes_the_connection(single: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of them is nobody's, and the pool has its place back."""
    single.ask_all([(b"PING",)])
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "read_response", lambda *_, **__: _strike(0, None))
        with pytest.raises(Struck):
            single.ask_all([(b"ECHO", b"one"), (b"ECHO", b"two")])
    assert single.ask_all([(b"ECHO", b"three")]) == [b"three"]


def test_lost_questions_are_sent_again(client: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, on a new connection: none of their first replies is taken for one of the second."""
    client.ask_all([(b"PING",)])
    read, lost = Connection.read_response, iter([False, True])

    def once(connection: Any, *arguments: Any, **options: Any) -> Any:
        if next(lost, False):
            raise redis.ConnectionError
        return read(connection, *arguments, **options)

    monkeypatch.setattr(Connection, "read_response", once)
    assert client.ask_all([(b"ECHO", b"one"), (b"ECHO", b"two")]) == [b"one", b"two"]
