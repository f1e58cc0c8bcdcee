"""A database server, seen past the store."""

from typing import Any

from django.db import connections

from tests.support.waiting import wait_until

__all__ = ["Server"]


class Server:
    """The database server behind an alias, asked over a connection of its own."""

    def __init__(self, alias: str) -> None:
        settings = connections.settings[alias]
        self._is_mysql = "mysql" in settings["ENGINE"]
        self._name = settings["NAME"]
        self._connection = connections.create_connection(alias)
        self.close = self._connection.close

    def sessions(self) -> set[int]:
        """Who is connected to the database, apart from this."""
        question = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
        if self._is_mysql:
            question = "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> connection_id()"
        return {each[0] for each in self.ask(question, self._name)}

    def hang_up(self, session: int) -> None:
        """End a session from this side; its socket is closed by then."""
        # PostgreSQL's list forgets a session before its process closes the socket; given a time, it waits for that.
        self.ask(f"KILL {session}" if self._is_mysql else f"SELECT pg_terminate_backend({session}, 60000)")
        wait_until(lambda: session not in self.sessions(), "the session ends")

    def ask(self, text: str, *values: str | int) -> Any:
        """The rows of the answer; none where a command has none."""
        with self._connection.cursor() as cursor:
            cursor.execute(text, values)
            return cursor.fetchall() if cursor.description else []
