"""The client of one server, with a short way for the one command that every delivery sends."""

from collections.abc import Sequence
from inspect import signature
from typing import Any, cast

import redis
from redis.retry import Retry


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
        packed = _packed(command)
        try:
            connection = self._in_hand.pop()
        except IndexError:
            connection = self.connection_pool.get_connection(*_TOLD)
        try:
            reply = self._asked(connection, packed)
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

    def ask_all(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """The replies to commands that only read, sent at once; where the server refuses one, the error."""
        packed = b"".join(map(_packed, commands))
        self._give_back()
        connection: Any = self.connection_pool.get_connection(*_TOLD)

        def ask() -> list[Any]:
            connection.send_packed_command([packed])
            return [_reply(connection) for _ in commands]

        try:
            return self._resends.call_with_retry(ask, lambda _: connection.disconnect())
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self.connection_pool.release(connection)

    def _asked(self, connection: Any, packed: bytes) -> Any:
        def ask() -> Any:
            connection.send_packed_command([packed])
            return connection.read_response()

        def hang_up(_: Exception) -> None:
            connection.disconnect()

        try:
            return ask()
        except (redis.ConnectionError, redis.TimeoutError) as error:
            hang_up(error)
            return self._resends.call_with_retry(ask, hang_up)

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        """As redis-py's."""
        self._give_back()
        return cast(Any, super()).execute_command(*arguments, **options)

    def pipeline(self, *arguments: Any, **options: Any) -> Any:
        """As redis-py's."""
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


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def _told(pool: type[Any]) -> tuple[str, ...]:
    """What a pool of this class is told when a connection is taken out of it.

    redis-py before 5.3 demands the name of a command, and does nothing with it; later ones warn of it.
    """
    name = signature(pool.get_connection).parameters["command_name"]
    return ("EVALSHA",) if name.default is name.empty else ()


_TOLD = _told(redis.ConnectionPool)


def _packed(command: Sequence[bytes]) -> bytes:
    """The command as the wire has it: an array of bulk strings (the RESP specification, "Sending commands")."""
    # redis-py's packer looks at each argument several times, and takes five times as long.
    return b"*%d\r\n" % len(command) + b"".join([b"$%d\r\n%b\r\n" % (len(each), each) for each in command])
